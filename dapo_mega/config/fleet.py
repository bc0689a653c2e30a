"""The rollout fleet: addresses of SGLang engines, request limits and health checks."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from dapo_mega.config.base import Section


class FleetConfig(Section):
    """SGLang engines behind HTTP. Every call carries the API key; times are in seconds."""

    urls: tuple[str, ...] = Field(
        default=(), description="URLs of running engines, such as http://10.0.0.7:30000; a list, or comma-separated."
    )
    rendezvous: str | None = Field(
        default=None,
        description=(
            "host:port on which rank 0 listens for engines that launch/serve_rollouts.py starts. Choose a port that "
            "neither engines (22000 to 29999) nor the system (on Linux from 32768) use."
        ),
    )
    api_key_env: str = Field(
        default="DAPO_MEGA_API_KEY", description="Environment variable that holds the engines' API key."
    )
    min_engines: int = Field(default=1, ge=1, description="With fewer healthy engines the run is paused.")
    wait_limit_s: float = Field(
        default=3600.0, gt=0, description="How long the run waits for min_engines before it ends with an error."
    )
    requests_per_engine: int = Field(
        default=256, ge=1, description="Largest number of requests in flight on one engine."
    )
    request_timeout_s: float = Field(default=3600.0, gt=0, description="Time limit of one attempt at a request.")
    heartbeat_s: float = Field(default=5.0, gt=0, description="Time between two health probes of an engine.")
    hung_after_s: float = Field(
        default=60.0,
        gt=0,
        description="An engine that answers no probe for this long is hung; its requests move to others.",
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
