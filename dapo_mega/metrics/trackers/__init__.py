"""Sends a run to trackers (wandb, mlflow, trackio), each in its own process, which cannot disturb training."""

from dapo_mega.metrics.trackers.background import BackgroundTracker, close_all, missing_packages
from dapo_mega.metrics.trackers.records import Record, TrackedRun
from dapo_mega.metrics.trackers.run_identity import LastStep, run_id_in
