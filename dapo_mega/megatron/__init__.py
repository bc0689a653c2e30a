"""The policy on Megatron-Core: models, losses on them, updates, gathering. With `checkpoints` and `conversion` the only
room that knows Megatron-Core."""
