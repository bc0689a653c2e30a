"""How weights reach the engines."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from dapo_mega.config.base import Section
from dapo_mega.config.paths import OutputPathOrNone


class WeightSyncConfig(Section):
    """How weights reach the engines."""

    bucket_mib: float = Field(default=512.0, gt=0)
    """MiB of weights sent at once; at most two such buckets are in memory. Lower it when out of memory."""
    transport: Literal["auto", "distributed", "disk", "tensor"] = "auto"
    """How weights reach SGLang engines. distributed: broadcast (NCCL on GPUs, gloo on the CPU); disk: a checkpoint in a
    folder that all machines see; tensor: memory of one machine (CUDA IPC). auto: tensor if engines are colocated, else
    distributed."""
    in_flight: Literal["finish", "continue"] = "finish"
    """Unfinished responses at a weight update (rollout.schedule=synchronous leaves none). finish: wait for them;
    continue: go on with the new weights, which is the default of rollout.schedule=asynchronous."""
    pause: Literal["abort", "retract", "in_place"] = "abort"
    """How engines hold responses that continue. abort: end the calls and ask for the rest later; retract: compute keys
    and values again with the new weights; in_place: keep the old ones (fastest; the engine needs
    --disable-radix-cache)."""
    full_every: int = Field(default=1, ge=1)
    """Weight updates from one full one to the next. 1: all are full. Above 1 the updates between send only values that
    changed in bf16: less traffic between machines. Needs rollout.placement=fleet, bf16 engines and dapo_mega in their
    environments."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds each part of a weight update, such as a bucket, may take. Raise it for slow networks."""
    folder: OutputPathOrNone = None
    """Folder of transport=disk, which engines must see; null: output_dir/weight_sync."""

    @model_validator(mode="before")
    @classmethod
    def _without_relays(cls, raw: Any) -> Any:
        """Earlier versions had the key `relays`, whether engines pass weights on, which they do no more."""
        return {key: value for key, value in raw.items() if key != "relays"} if isinstance(raw, Mapping) else raw

    @property
    def bucket_bytes(self) -> int:
        """The size limit of a bucket in bytes."""
        return int(self.bucket_mib * 2**20)
