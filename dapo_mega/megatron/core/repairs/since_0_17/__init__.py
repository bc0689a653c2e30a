"""Repairs of Megatron-Core 0.17 and newer."""
