"""How weights reach the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dapo_mega.config.base import Section


class WeightSyncConfig(Section):
    """How weights reach the engines."""

    bucket_mib: float = Field(
        default=512.0, gt=0, description="Size of a bucket; at most two buckets are in memory at a time."
    )
    transport: Literal["auto", "distributed", "disk", "tensor"] = Field(
        default="auto",
        description="Fleet: distributed broadcasts (NCCL on GPUs, gloo on the CPU), disk writes a checkpoint that all "
        "machines see, tensor shares memory on one machine (CUDA IPC). auto: tensor if engines are colocated, else "
        "distributed.",
    )
    in_flight: Literal["finish", "continue"] = Field(
        default="finish",
        description="Unfinished responses at an update: finish waits for them, continue goes on with the new weights "
        "(partial rollouts).",
    )
    pause: Literal["abort", "retract", "in_place"] = Field(
        default="abort",
        description="How engines pause responses that continue: abort ends the calls and requests the rest later, "
        "retract recomputes keys and values with the new weights, in_place keeps the old keys and values.",
    )
    full_every: int = Field(
        default=1,
        ge=1,
        description="Delta sync: send all weights every this many updates and when an engine joins, otherwise only the "
        "values that have changed in bf16. Needs dapo_mega in the engines' environments.",
    )
    timeout_s: float = Field(
        default=600.0, gt=0, description="Time limit of each step of an update, such as one bucket."
    )
    folder: str | None = Field(
        default=None, description="Folder of transport=disk, which engines must see; null: output_dir/weight_sync."
    )

    @property
    def bucket_bytes(self) -> int:
        """The size limit of a bucket in bytes."""
        return int(self.bucket_mib * 2**20)
