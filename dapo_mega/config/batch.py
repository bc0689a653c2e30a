"""Sizes of one rollout step."""

from __future__ import annotations

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE, Section


class BatchConfig(Section):
    """Sizes of one rollout step, in groups (one prompt and its responses)."""

    groups_per_step: int = Field(default=512, ge=1, description="N of the paper's Algorithm 1.")
    group_size: int = Field(default=16, ge=2, description="G: responses per prompt.")
    generation_groups: int | None = Field(
        default=None, ge=1, description="Prompts per generation round; null: groups_per_step."
    )
    mini_batch_groups: int = Field(default=32, ge=1, description="Groups per optimizer update.")
    epochs: int = Field(default=1, ge=1, description="mu: passes over the step's groups.")
    tokens_per_microbatch: int = Field(json_schema_extra=FREE, default=32768, ge=1)

    @model_validator(mode="after")
    def _check(self) -> BatchConfig:
        if self.groups_per_step % self.mini_batch_groups:
            n = self.groups_per_step
            nearest = min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - self.mini_batch_groups))
            raise ValueError(
                f"batch.mini_batch_groups={self.mini_batch_groups} does not divide batch.groups_per_step={n}; "
                f"the nearest size that does is {nearest}"
            )
        return self

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.groups_per_step // self.mini_batch_groups
