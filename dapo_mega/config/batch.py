"""Sizes of one rollout step."""

from typing import Self

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE, Section


class BatchConfig(Section):
    """Sizes of one rollout step, in groups (one prompt and its responses)."""

    groups_per_step: int = Field(default=512, ge=1)
    """Groups that a step trains on: one prompt with its responses each."""
    group_size: int = Field(default=16, ge=1)
    """Responses per prompt; at least 2 where they are compared with each other. More give better advantages and fewer
    groups that are all wrong, and cost generation time."""
    generation_groups: int | None = Field(default=None, ge=1)
    """Prompts asked in a generation round; null: groups_per_step. Set it higher, up to 3 x groups_per_step, if dynamic
    sampling needs several rounds a step."""
    mini_batch_groups: int = Field(default=32, ge=1)
    """Groups per optimizer update; must divide groups_per_step. Smaller means more updates per step, the later ones on
    older responses."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the groups of a step."""
    tokens_per_microbatch: int = Field(default=32768, ge=1, json_schema_extra=FREE)
    """Tokens of a micro-batch at most; at least data.max_prompt_tokens + rollout.max_response_tokens. Lower it when out
    of memory, raise it for speed. The training result does not depend on it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
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
