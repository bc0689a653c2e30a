"""Turns groups of scored responses into packed micro-batches on the ranks that train on them. No model, no engine."""
