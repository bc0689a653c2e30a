"""A run in MLflow."""

import os
import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from dapo_mega.metrics.run_text import examples_as_markdown
from dapo_mega.metrics.trackers.records import Record, TrackedRun

_TAG = "dapo_mega.run"
_MAX_PARAMS = 100
_MAX_METRICS = 1000
_MAX_VALUE = 500


class MlflowRun:
    """Metrics under their names, with `_at_` for the `@` that MLflow refuses; samples as files. MLflow has no
    histograms. A run that is continued is found by a tag with its identity."""

    def __init__(self, run: TrackedRun) -> None:
        for name, value in (("MAX_RETRIES", "2"), ("TIMEOUT", "30")):
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = (
            run.mlflow_uri or (None if run.offline else os.environ.get("MLFLOW_TRACKING_URI")) or "sqlite:///mlflow.db"
        )
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment(run.project)
        found = self._client.search_runs([experiment], filter_string=f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING", name=run.name)
        else:
            versions = {f"version.{name}": version for name, version in run.versions.items()}
            created = self._client.create_run(experiment, run_name=run.name, tags={_TAG: run.id, **versions})
            self._id = created.info.run_id
            params = [Param(name, str(value)[:_MAX_VALUE]) for name, value in run.hyper_parameters.items()]
            for start in range(0, len(params), _MAX_PARAMS):
                self._client.log_batch(self._id, params=params[start : start + _MAX_PARAMS])
        self._client.log_dict(self._id, dict(run.config), "config.json")
        self.url = f"{uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._id}" if uri.startswith("http") else None

    def log(self, record: Record) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(n.replace("@", "_at_"), value, now, record.step) for n, value in record.metrics.items()]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MAX_METRICS])
        if record.examples:
            text = examples_as_markdown(record.examples)
            self._client.log_text(self._id, text, f"samples/evaluation_step_{record.step:08d}.md")

    def finish(self, *, is_finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "KILLED")

    def _experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        if known is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # Another run has just made it.
                known = self._client.get_experiment_by_name(name)
                if known is None:
                    raise
        return str(known.experiment_id)
