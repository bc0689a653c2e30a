"""The reward of a response."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE, Section


class RewardConfig(Section):
    """Rule reward and overlong shaping (DAPO section 2.4, 3.4)."""

    source: Literal["verifier", "random"] = Field(
        default="verifier",
        description="What judges a response. verifier: compares its answer with the ground truth; random: a fair "
        "coin, a control experiment that must not learn.",
    )
    extraction: Literal["dapo", "boxed", "none"] = Field(
        default="dapo",
        description="Where a response's answer is. dapo: last 'Answer: ...' of its last 300 characters; boxed: last "
        "\\boxed{}; none: the whole response. It must be what data.*.template asks for.",
    )
    correct: float = Field(default=1.0, description="Reward of a right answer; larger than incorrect.")
    incorrect: float = Field(default=-1.0, description="Reward of a wrong or missing answer.")
    overlong_punishment: bool = Field(
        default=True,
        description="Take up to 1 off the reward of a response that comes close to rollout.max_response_tokens. "
        "Switch it off for plain GRPO.",
    )
    overlong_cache_tokens: int = Field(
        default=4096,
        ge=1,
        description="The punishment grows from 0 to 1 over the last this many tokens before max_response_tokens, which "
        "it must not exceed. A fifth of max_response_tokens is usual.",
    )
    overlong_filtering: bool = Field(
        default=False, description="Leave truncated responses out of the loss. They still count in their group."
    )
    length_weight: float = Field(
        default=0.0,
        ge=0,
        description="Weight of Kimi k1.5's length reward, which compares the responses of a group: up to half of it "
        "more for short right answers, up to half of it less for long ones. 0: off.",
    )
    length_phase_in: tuple[int, int] = Field(
        default=(0, 0),
        description="[first, last]: the length reward's weight grows from 0 at the first of these steps to "
        "length_weight at the last. Right answers first, then short ones.",
    )
    num_workers: int = Field(
        json_schema_extra=FREE,
        default=2,
        ge=1,
        description="Processes that compare answers by computer algebra. Raise it if reward/num_timeout grows.",
    )
    time_limit_s: float = Field(
        default=5.0, gt=0, description="Seconds one comparison may take; the answer counts as wrong after that."
    )

    @model_validator(mode="after")
    def _check(self) -> RewardConfig:
        if self.correct <= self.incorrect:
            raise ValueError(f"reward.correct={self.correct} must be larger than reward.incorrect={self.incorrect}")
        first, last = self.length_phase_in
        if not 0 <= first <= last:
            raise ValueError(f"reward.length_phase_in={[first, last]} must be [first, last] with 0 <= first <= last")
        return self

    def length_weight_at(self, step: int) -> float:
        """The length reward's weight at a step, counted from 1."""
        first, last = self.length_phase_in
        if step >= last:
            return self.length_weight
        return self.length_weight * max(step - first, 0) / (last - first)
