"""Converts and compares checkpoints, file by file and without a model in memory. Nothing here knows a run."""
