"""The rollout fleet: addresses of SGLang engines, request limits and health checks."""

import os
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from dapo_mega.config.base import Section
from dapo_mega.config.components.servers import url_problem
from dapo_mega.errors import InputError

_MIN_KEY_LENGTH = 16


class FleetConfig(Section):
    """SGLang engines behind HTTP. Every call carries the API key; times are in seconds."""

    urls: tuple[str, ...] = ()
    """URLs of running engines, such as http://10.0.0.7:30000: a list, or text with commas. Give it or rendezvous."""
    rendezvous: str | None = None
    """host:port on which rank 0 listens for engines that launch/serve_rollouts.py starts; host is an address of rank
    0's machine. Choose a port that neither engines (22000 to 30000 and some above) nor the system (on Linux from 32768)
    use, such as 21600."""
    api_key_env: str = "DAPO_MEGA_API_KEY"
    """Name of the environment variable that holds the API key, the same for trainer and engines."""
    min_engines: int = Field(default=1, ge=1)
    """The run waits while fewer engines than this are healthy. Set it to all you start, or a few less."""
    engine_tensor: int | None = Field(default=None, ge=1)
    """GPUs of one engine, the --tensor-parallel of launch/serve_rollouts.py: plans use it, and the run refuses engines
    of another size. null: any size, and plans choose one."""
    wait_limit_s: float = Field(default=3600.0, gt=0)
    """Seconds the run waits for min_engines before it ends with exit status 4."""
    requests_per_engine: int = Field(default=256, ge=1)
    """Requests in flight on one engine at most. Lower it if engines run out of cache, raise it for small models."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds one attempt at a response may take. Raise it for long responses."""
    heartbeat_s: float = Field(default=5.0, gt=0)
    """Seconds between two health probes of an engine."""
    hung_after_s: float = Field(default=60.0, gt=0)
    """Seconds without an answer to a probe after which an engine counts as hung and its requests move to others. Larger
    than heartbeat_s."""

    @field_validator("urls", mode="before")
    @classmethod
    def _split(cls, urls: Any) -> Any:
        given = urls.split(",") if isinstance(urls, str) else urls
        return [str(url).strip().rstrip("/") for url in given] if isinstance(given, list | tuple) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("rollout.fleet.urls names an engine twice; name each once")
        if "@" in (self.rendezvous or ""):
            raise ValueError(
                "rollout.fleet.rendezvous has a name or password before the host; give host:port, and the key as "
                "rollout.fleet.api_key_env"
            )
        for number, url in enumerate(self.urls):
            if problem := url_problem(url, "rollout.fleet.api_key_env", "http://10.0.0.7:30000"):
                raise ValueError(f"URL {number} of rollout.fleet.urls {problem}")
        if self.hung_after_s <= self.heartbeat_s:
            raise ValueError(
                f"rollout.fleet.hung_after_s={self.hung_after_s:g} must be larger than rollout.fleet.heartbeat_s="
                f"{self.heartbeat_s:g}"
            )
        return self


def require_api_key(env_name: str) -> str:
    """The API key in the environment variable. Raises InputError if it is missing or too weak."""
    key = os.environ.get(env_name, "")
    if len(key) < _MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        given = "is not set; it" if not key else "cannot be used; it"
        raise InputError(
            f"{env_name} {given} must have at least {_MIN_KEY_LENGTH} printable ASCII characters and no space, for "
            f"whoever knows it can overwrite the engines' weights; give the trainer and all engines the same secret: "
            f'export {env_name}=$(python3 -c "import secrets; print(secrets.token_hex(32))")'
        )
    return key


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port`. Raises InputError."""
    if "@" in address:  # Not repeated here.
        raise InputError("the address has a name or password before the host; give host:port, such as 10.0.0.1:21600")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"{address!r} is not an address; give host:port, such as 10.0.0.1:21600")
    return host, int(port)
