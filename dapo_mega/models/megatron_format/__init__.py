"""Megatron's checkpoint format, read and written without Megatron and without running what files name."""
