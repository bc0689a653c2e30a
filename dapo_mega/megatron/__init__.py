"""The policy on Megatron-Core: model, losses, updates, gathering. Besides `checkpoints` and `conversion`, only this
room imports Megatron-Core."""
