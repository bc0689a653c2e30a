"""The reward of a response."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE, Section


class RewardConfig(Section):
    """Rule reward and overlong shaping (DAPO section 2.4, 3.4)."""

    source: Literal["verifier", "random"] = Field(
        default="verifier", description="random: a fair coin, as a control experiment that must not learn."
    )
    extraction: Literal["dapo", "boxed", "none"] = "dapo"
    correct: float = 1.0
    incorrect: float = -1.0
    overlong_punishment: bool = True
    overlong_cache_tokens: int = Field(default=4096, ge=1)
    overlong_filtering: bool = False
    num_workers: int = Field(json_schema_extra=FREE, default=2, ge=1)
    time_limit_s: float = Field(default=5.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> RewardConfig:
        if self.correct <= self.incorrect:
            raise ValueError(f"reward.correct={self.correct} must be larger than reward.incorrect={self.incorrect}")
        return self
