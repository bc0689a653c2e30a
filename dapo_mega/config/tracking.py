"""Where a run can be watched, and what is shown of it besides curves."""

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dapo_mega.config.base import Section

_CREDENTIALS = re.compile(r"://[^/@]*@")


class TrackingConfig(Section):
    """Where the run can be watched besides TensorBoard, and what is shown besides curves. Keys and passwords come from
    the variables of the trackers themselves: WANDB_API_KEY, MLFLOW_TRACKING_TOKEN, HF_TOKEN."""

    backends: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Trackers that get every record, each in its own process: wandb, mlflow, trackio. Install the extra of the same
    name."""
    project: str = Field(default="dapo_mega", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")
    """Project of wandb and trackio, experiment of mlflow: letters, digits and any of _.-"""
    run_name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_. -]{0,127}$")
    """The run's name in the trackers. null: the name of output_dir."""
    entity: str | None = None
    """Team or user of wandb. null: the default of the account."""
    offline: bool = False
    """Send nothing over the network: wandb writes below output_dir/tracking, for `wandb sync`."""
    mlflow_uri: str | None = None
    """MLflow's server or database. null: MLFLOW_TRACKING_URI, or else sqlite:///mlflow.db in the working folder."""
    trackio_space: str | None = None
    """Hugging Face Space for trackio, which is made private. null: files on this machine."""
    close_limit_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds that trackers get at the run's end to send the rest."""
    histograms_every: int = Field(default=1, ge=0)
    """Steps between histograms of lengths, rewards, advantages, staleness and importance ratios. 0: none."""
    timeline: bool = True
    """Record what trainer and engines did when, as output_dir/timeline.jsonl: a few kilobytes a step. `dapo-mega plot
    --timeline` draws it."""
    samples_per_evaluation: int = Field(default=8, ge=0)
    """Responses of each evaluation that are written as text: the first to each of so many prompts, always the same
    ones. 0: none."""

    @field_validator("backends", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.backends)) < len(self.backends):
            raise ValueError(f"tracking.backends={list(self.backends)} names a tracker twice; name each once")
        uri = self.mlflow_uri or ""
        if _CREDENTIALS.search(uri):
            raise ValueError(
                "tracking.mlflow_uri contains a user name or password, and would be written to config.yaml; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment instead"
            )
        if self.offline and (uri.startswith(("http://", "https://")) or self.trackio_space):
            raise ValueError(
                "tracking.offline=true, but tracking.mlflow_uri or tracking.trackio_space names a server; remove one "
                "of them"
            )
        return self
