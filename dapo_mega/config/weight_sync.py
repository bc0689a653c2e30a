"""How weights reach the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dapo_mega.config.base import Section


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
        """The size limit of a bucket in bytes."""
        return int(self.bucket_mib * 2**20)
