"""Metrics of a run: accumulate, time, record, show, plot. The code that measures a metric defines its meaning."""

from dapo_mega.metrics.histogram import Histogram
from dapo_mega.metrics.jsonl import read_metrics
from dapo_mega.metrics.plotting import plot_run
from dapo_mega.metrics.progress import ProgressDisplay
from dapo_mega.metrics.run_text import Example, RunDescription
from dapo_mega.metrics.timers import StageTimers
from dapo_mega.metrics.writer import MetricsWriter, validate_metric_name
