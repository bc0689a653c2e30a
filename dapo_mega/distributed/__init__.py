"""Each rank's place in the parallel layout, shared errors, and stores. No samples, no Megatron."""
