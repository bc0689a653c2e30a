"""Repairs of Megatron-Core 0.19 and newer."""
