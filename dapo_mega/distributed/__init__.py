"""Which part of the layout a process is, and what all processes do together. No samples, no Megatron."""
