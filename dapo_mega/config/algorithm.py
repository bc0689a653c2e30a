"""The policy-gradient objective and its presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from dapo_mega.config.base import Section

PolicyLossKind = Literal["clip"]
AdvantageKind = Literal["group_norm", "group_mean", "leave_one_out"]
AggregationKind = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_constant"]
KlKind = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class LossSettings:
    """The settings of the objective: `AlgorithmConfig` with every "auto" resolved.

    The defaults are DAPO's. `importance_cap` None is off, as is `sequence_mask` None.
    """

    kind: PolicyLossKind = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    importance_cap: float | None = None
    sequence_mask: tuple[float, float] | None = None
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: KlKind = "k3"


class KlConfig(Section):
    """KL penalty against a frozen copy of the starting model; with coefficient 0 (DAPO) there is no reference model.

    As a loss term k1 has no gradient in expectation and only serves as a metric; k2 and k3 do have one.
    """

    coefficient: float = Field(default=0.0, ge=0)
    estimator: KlKind = "k3"


class AlgorithmConfig(Section):
    """The policy-gradient objective. `preset` sets the defaults of the other keys."""

    preset: Literal["dapo", "grpo", "dr_grpo", "rloo"] = "dapo"
    advantage: AdvantageKind = "group_norm"
    aggregation: AggregationKind = "token_mean"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float | None = Field(default=10.0, gt=1)
    dynamic_sampling: bool = True
    max_generation_rounds: int = Field(default=10, ge=1)
    max_staleness: int = Field(
        default=1, ge=0, description="Steps a surplus group may wait in the buffer; 0 drops surplus at once."
    )
    entropy_coefficient: float = Field(default=0.0, ge=0)
    importance_cap: float | Literal["auto"] | None = Field(
        default="auto",
        description="Truncated importance sampling: cap of trainer / rollout probability per token. null: off; "
        "auto: 2 if engine and trainer compute in different dtypes, else off.",
    )
    sequence_mask: tuple[float, float] | Literal["auto"] | None = Field(
        default="auto",
        description="Leave a response out of the loss if its geometric mean of trainer / rollout probability is "
        "outside of [low, high]. null: off; auto: [0.5, 2] if importance_cap's auto is on, else off.",
    )
    kl: KlConfig = KlConfig()

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        if not isinstance(self.importance_cap, str | None) and self.importance_cap <= 0:
            raise ValueError(f"algorithm.importance_cap={self.importance_cap:g} must be positive, auto or null")
        if isinstance(self.sequence_mask, tuple) and not 0 <= self.sequence_mask[0] < 1 < self.sequence_mask[1]:
            raise ValueError(
                f"algorithm.sequence_mask={list(self.sequence_mask)} must be [low, high] with 0 <= low < 1 < high, "
                f"such as [0.5, 2]"
            )
        return self

    def loss_settings(self, *, engine_differs: bool) -> LossSettings:
        """The loss's settings. `engine_differs`: the engine computes in another precision than the trainer, which turns
        on what is "auto"."""
        cap, bounds = self.importance_cap, self.sequence_mask
        return LossSettings(
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            importance_cap=(2.0 if engine_differs else None) if isinstance(cap, str) else cap,
            sequence_mask=((0.5, 2.0) if engine_differs else None) if isinstance(bounds, str) else bounds,
            entropy_coefficient=self.entropy_coefficient,
            kl_coefficient=self.kl.coefficient,
            kl_estimator=self.kl.estimator,
        )


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "dapo": {},
    "grpo": {
        "clip_high": 0.2,
        "dual_clip": None,
        "dynamic_sampling": False,
        "aggregation": "sequence_mean_token_mean",
        "kl": {"coefficient": 0.04, "estimator": "k3"},
    },
    "dr_grpo": {
        "clip_high": 0.2,
        "dual_clip": None,
        "dynamic_sampling": False,
        "advantage": "group_mean",
        "aggregation": "sequence_mean_constant",
    },
    "rloo": {"clip_high": 0.2, "dual_clip": None, "dynamic_sampling": False, "advantage": "leave_one_out"},
}
"""Each preset's changes to `AlgorithmConfig`'s defaults, which are DAPO."""
