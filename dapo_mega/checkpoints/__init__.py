"""The state of a run, saved so that it is whole or not there, and found again. Files without a run: `conversion`."""
