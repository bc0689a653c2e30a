"""The policy-gradient objective and its presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from dapo_mega.config.base import Section

PolicyLossKind = Literal["clip"]
AdvantageKind = Literal["group_norm", "group_mean", "leave_one_out", "gae"]
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

    coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL penalty in the loss. 0: no penalty, and no reference model in memory. Raise it "
        "(GRPO uses 0.04) where the policy must stay close to the starting model.",
    )
    estimator: KlKind = Field(
        default="k3",
        description="Formula of the KL per token, from the difference d = log p_reference - log p_policy. k1: -d; k2: "
        "d^2 / 2; k3: exp(d) - d - 1. In a loss k1 has no gradient on average, so use k2 or k3.",
    )


class AlgorithmConfig(Section):
    """The policy-gradient objective. `preset` sets the defaults of the other keys."""

    preset: Literal["dapo", "grpo", "dr_grpo", "rloo"] = Field(
        default="dapo",
        description="Published algorithm whose settings fill in the keys of this section that the file leaves out. "
        "Keys that the file gives win.",
    )
    advantage: AdvantageKind = Field(
        default="group_norm",
        description="Advantage of a response from the rewards of its group. group_norm: (R - mean) / (std + 1e-6); "
        "group_mean: R - mean; leave_one_out: R - mean of the other responses.",
    )
    aggregation: AggregationKind = Field(
        default="token_mean",
        description="How token losses become one number. token_mean: every token of an update weighs the same; "
        "sequence_mean_token_mean: mean of each response, then over responses; sequence_mean_constant: sum of each "
        "response / rollout.max_response_tokens, then mean over responses.",
    )
    policy_loss: PolicyLossKind = Field(
        default="clip", description="The policy loss. clip: the clipped surrogate of PPO with two bounds (DAPO)."
    )
    clip_low: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="The loss stops pushing a token's probability down below (1 - clip_low) times its old value.",
    )
    clip_high: float = Field(
        default=0.28,
        gt=0,
        description="The loss stops pushing a token's probability up above (1 + clip_high) times its old value. Raise "
        "it if entropy falls too fast, lower it if training is unstable.",
    )
    dual_clip: float | None = Field(
        default=10.0,
        gt=1,
        description="Bounds the loss of a token with negative advantage A at -dual_clip x A. null: no bound.",
    )
    dynamic_sampling: bool = Field(
        default=True,
        description="Train only on groups with right and wrong responses, and generate more until a step is full. "
        "Switch it off for smoke tests with a model that is always wrong: such a run would end as starved.",
    )
    max_generation_rounds: int = Field(
        default=10,
        ge=1,
        description="Generation rounds a step may take. If they leave too few usable groups, the run ends with exit "
        "status 3. Raise it if few prompts are neither always right nor always wrong.",
    )
    max_staleness: int = Field(
        default=1,
        ge=0,
        description="Steps a surplus group may wait in the buffer. 0 drops surplus at once. Higher wastes fewer "
        "responses but trains on older ones.",
    )
    entropy_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Weight of an entropy bonus in the loss. The paper uses none; try 0.001 if entropy collapses.",
    )
    importance_cap: float | Literal["auto"] | None = Field(
        default="auto",
        description="Truncated importance sampling: each token's loss is weighted by its trainer / engine "
        "probability, at most this. Corrects engines that compute a little differently. A number above 0; null: off; "
        "auto: 2 if engine and trainer compute in different dtypes or the trainer in FP8, else off.",
    )
    sequence_mask: tuple[float, float] | Literal["auto"] | None = Field(
        default="auto",
        description="[low, high] with 0 <= low < 1 < high. A response whose geometric mean of trainer / engine "
        "probability is outside is left out of the loss. null: off; auto: [0.5, 2] where importance_cap's auto is 2, "
        "else off.",
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
            kind=self.policy_loss,
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
