"""The rollout fleet: where SGLang engines are, how their health is judged, how weights reach them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from dapo_mega.config.base import Section


class FleetConfig(Section):
    """SGLang engines behind HTTP. Every call carries the API key; times are in seconds."""

    urls: tuple[str, ...] = Field(
        default=(), description="Engines that run already, such as http://10.0.0.7:30000; a list, or with commas."
    )
    rendezvous: str | None = Field(
        default=None,
        description=(
            "host:port on which rank 0 listens for engines that launch/serve_rollouts.py starts; a port that neither "
            "engines (22000 to 29999) nor the system (on Linux from 32768) take for themselves."
        ),
    )
    api_key_env: str = Field(
        default="DAPO_MEGA_API_KEY", description="Environment variable that holds the engines' API key."
    )
    min_engines: int = Field(default=1, ge=1, description="With fewer healthy engines the run pauses.")
    wait_limit_s: float = Field(
        default=3600.0, gt=0, description="How long the run waits for min_engines before it ends with an error."
    )
    requests_per_engine: int = Field(default=256, ge=1, description="Requests in flight on one engine at most.")
    request_timeout_s: float = Field(default=3600.0, gt=0, description="Deadline of one attempt at one request.")
    heartbeat_s: float = Field(default=5.0, gt=0, description="Between two health probes of an engine.")
    hung_after_s: float = Field(
        default=60.0, gt=0, description="An engine that answers no probe for this long is hung; its work moves on."
    )

    @field_validator("urls", mode="before")
    @classmethod
    def _split(cls, urls: Any) -> Any:
        given = urls.split(",") if isinstance(urls, str) else urls
        return [str(url).strip().rstrip("/") for url in given] if isinstance(given, list | tuple) else given

    @model_validator(mode="after")
    def _check(self) -> FleetConfig:
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("rollout.fleet.urls names an engine twice; name each once")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"rollout.fleet.urls has {url!r}; give URLs such as http://10.0.0.7:30000")
        if self.hung_after_s <= self.heartbeat_s:
            raise ValueError(
                f"rollout.fleet.hung_after_s={self.hung_after_s:g} must be larger than rollout.fleet.heartbeat_s="
                f"{self.heartbeat_s:g}"
            )
        return self


class WeightSyncConfig(Section):
    """How weights reach the engines."""

    bucket_mib: float = Field(default=512.0, gt=0, description="Memory for buckets: at most twice this at a time.")
    transport: Literal["auto", "distributed", "disk", "tensor"] = Field(
        default="auto",
        description="Of a fleet: distributed broadcasts (NCCL on GPUs, gloo on the CPU), disk writes a checkpoint that "
        "all machines see, tensor hands over memory of this machine (CUDA IPC). auto: tensor where engines are "
        "colocated, else distributed.",
    )
    in_flight: Literal["finish", "continue"] = Field(
        default="finish",
        description="What responses in flight do at an update: finish on the old weights first, or continue with the "
        "new ones (partial rollouts).",
    )
    pause: Literal["abort", "retract", "in_place"] = Field(
        default="abort",
        description="How engines hold responses that continue: abort takes them back and asks for the rest later, "
        "retract recomputes their keys and values with the new weights, in_place keeps those of the old ones.",
    )
    full_every: int = Field(
        default=1,
        ge=1,
        description="Delta sync: all weights are sent every so many updates and whenever an engine joins, otherwise "
        "only what has changed in bf16 since the last update. Needs dapo_mega in the engines' environments.",
    )
    timeout_s: float = Field(default=600.0, gt=0, description="Limit of each step of an update, such as one bucket.")
    folder: str | None = Field(
        default=None, description="Where transport=disk writes; null is output_dir/weight_sync. Engines must see it."
    )

    @property
    def bucket_bytes(self) -> int:
        """`bucket_mib` in bytes."""
        return int(self.bucket_mib * 2**20)
