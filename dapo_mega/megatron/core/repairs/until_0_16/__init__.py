"""Repairs of Megatron-Core 0.16. The folder goes with the support of that version."""
