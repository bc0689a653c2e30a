"""Saves and restores the state of a run atomically. For checkpoint files without a run see `conversion`."""
