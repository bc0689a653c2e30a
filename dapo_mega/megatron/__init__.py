"""The policy on Megatron-Core: model, losses, updates, gathering. Only its
`core` imports Megatron-Core."""
