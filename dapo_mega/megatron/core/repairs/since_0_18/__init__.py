"""Repairs of Megatron-Core 0.18 and newer."""
