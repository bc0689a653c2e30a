"""The policy-gradient objective and its presets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dapo_mega.config.base import Section
from dapo_mega.config.own_code import BY_NAME_OR_CODE, ByCode, ByName, OwnCode, OwnLoss, shown

PolicyLossKind = Literal["clip", "gspo", "reinforce", "cispo", "sapo", "topr", "mirror_descent", "clip_cov", "kl_cov"]
AdvantageKind = Literal["group_norm", "group_mean", "leave_one_out", "reward", "greedy_baseline", "gae"]
AggregationKind = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_constant"]
KlKind = Literal["k1", "k2", "k3"]
KlPlacement = Literal["loss", "reward"]
Preset = Literal[
    "dapo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "remax",
    "kimi",
    "gspo",
    "cispo",
    "sapo",
    "topr",
    "clip_cov",
    "kl_cov",
    "decoupled",
]
DynamicSamplingOn = Literal["correctness", "score_threshold", "unequal_scores"]
OldPolicy = Literal["step_start", "engine"]
ImportanceLevel = Literal["token", "sequence"]
PolicyLossChoice = Annotated[Annotated[PolicyLossKind, ByName] | Annotated[OwnLoss, ByCode], BY_NAME_OR_CODE]
AdvantageChoice = Annotated[Annotated[AdvantageKind, ByName] | Annotated[OwnCode, ByCode], BY_NAME_OR_CODE]
FilterChoice = Annotated[Annotated[DynamicSamplingOn, ByName] | Annotated[OwnCode, ByCode], BY_NAME_OR_CODE]
"""One of the built-in ones, or code of the user's own."""
GROUP_BASELINES: tuple[AdvantageKind, ...] = ("group_norm", "group_mean", "leave_one_out")
"""The advantages that compare the responses of a group."""
OTHER_FILTERS = (
    "set algorithm.dynamic_sampling_on=unequal_scores (or score_threshold, with algorithm.score_threshold), or "
    "algorithm.dynamic_sampling=false"
)
"""What to do where a reward does not say what is correct."""


@dataclass(frozen=True)
class LossSettings:
    """The settings of the objective: those of `AlgorithmConfig` with these names, and some of others, with every "auto"
    resolved.

    The defaults are DAPO's. None switches `importance_cap`, `token_mask` and `sequence_mask` off.
    """

    kind: PolicyLossKind | OwnLoss = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    soft_gate: tuple[float, float] = (1.0, 1.05)
    mirror_temperature: float = 0.1
    covariance_share: float = 2e-4
    covariance_bounds: tuple[float, float] = (1.0, 5.0)
    covariance_kl: float = 1.0
    old_policy: OldPolicy = "step_start"
    importance_cap: float | None = None
    importance_level: ImportanceLevel = "token"
    token_mask: tuple[float, float] | None = None
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
        description="Weight of the KL penalty. 0: no penalty, and no reference model in memory. Raise it "
        "(GRPO uses 0.04) where the policy must stay close to the starting model.",
    )
    estimator: KlKind = Field(
        default="k3",
        description="Formula of the KL per token, from the difference d = log p_reference - log p_policy. k1: -d; k2: "
        "d^2 / 2; k3: exp(d) - d - 1. In a loss k1 has no gradient on average, so use k2 or k3; in the reward use k1.",
    )
    placement: KlPlacement = Field(
        default="loss",
        description="Where the penalty stands. loss: coefficient x KL is added to each token's loss; reward: it is "
        "taken off each token's reward, measured with the weights that the step starts from.",
    )


class AlgorithmConfig(Section):
    """The policy-gradient objective. `preset` sets the defaults of the other keys."""

    preset: Preset = Field(
        default="dapo",
        description="Published algorithm whose settings fill in the keys of this section that the file leaves out. "
        "Keys that the file gives win.",
    )
    advantage: AdvantageChoice = Field(
        default="group_norm",
        description="Advantage of a response from the rewards of its group. group_norm: (R - mean) / (std + 1e-6); "
        "group_mean: R - mean; leave_one_out: R - mean of the other responses; reward: R itself; greedy_baseline: R - "
        "the reward of one more response, which is sampled greedily and never trained on (ReMax); gae: generalized "
        "advantage estimates of a critic (PPO; see the section critic). A mapping with kind: function: your own.",
    )
    gae_discount: float = Field(
        default=1.0, gt=0, le=1, description="gamma of gae: how much less a reward counts a token later."
    )
    gae_decay: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="lambda of gae: 1 takes the rewards that follow as they are, less trusts the critic's values more.",
    )
    normalize_advantages: bool = Field(
        default=False,
        description="Subtract the mean of the advantages of all tokens of a step and divide by their standard "
        "deviation (REINFORCE++). Equal advantages become 0.",
    )
    aggregation: AggregationKind = Field(
        default="token_mean",
        description="How token losses become one number. token_mean: every token of an update weighs the same; "
        "sequence_mean_token_mean: mean of each response, then over responses; sequence_mean_token_sum: sum of each "
        "response, then mean over responses; sequence_mean_constant: the same / rollout.max_response_tokens.",
    )
    policy_loss: PolicyLossChoice = Field(
        default="clip",
        description="The policy loss, with r = new / old probability of a token and s that of its response. clip: r A "
        "within two bounds (PPO, DAPO); gspo: the geometric mean of s in place of r; cispo: bounded r, a fixed weight "
        "of A log p; sapo: a smooth gate in place of bounds; reinforce: A log p without a ratio; topr: A log p, for "
        "A < 0 times min(s, 1); mirror_descent: A log s - mirror_temperature / 2 (log s)^2 (Kimi); "
        "clip_cov and kl_cov: clip and r A that hold back the tokens of highest covariance. A mapping with kind: "
        "function: your own.",
    )
    clip_low: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="The loss stops pushing a token's probability down below (1 - clip_low) times its old value; 1: no "
        "lower bound. Of clip, gspo and cispo.",
    )
    clip_high: float = Field(
        default=0.28,
        gt=0,
        description="The loss stops pushing a token's probability up above (1 + clip_high) times its old value. Raise "
        "it if entropy falls too fast, lower it if training is unstable. Of clip, gspo and cispo.",
    )
    dual_clip: float | None = Field(
        default=10.0,
        gt=1,
        description="Bounds the loss of a token with negative advantage A at -dual_clip x A. null: no bound. Of clip "
        "and gspo.",
    )
    soft_gate: tuple[float, float] = Field(
        default=(1.0, 1.05),
        description="Steepness of sapo's gate for tokens with A > 0, and for others. Higher attenuates tokens whose "
        "probability has changed more.",
    )
    mirror_temperature: float = Field(
        default=0.1,
        gt=0,
        description="tau of mirror_descent: how strongly a response's probability is held at its old value.",
    )
    covariance_share: float = Field(
        default=2e-4,
        gt=0,
        le=1,
        description="Share of an update's tokens that clip_cov and kl_cov hold back, at least one token. Published for "
        "kl_cov: 0.002 for 7B (the preset's), 0.0002 for 32B; for clip_cov 0.0002.",
    )
    covariance_bounds: tuple[float, float] = Field(
        default=(1.0, 5.0),
        description="[low, high]: clip_cov draws its tokens from those whose covariance of log-prob and advantage is "
        "within.",
    )
    covariance_kl: float = Field(
        default=1.0, ge=0, description="Weight of |log r| in the loss of the tokens that kl_cov holds back."
    )
    old_policy: OldPolicy = Field(
        default="step_start",
        description="Whose probabilities are the old ones. step_start: the trainer's with the weights that the step "
        "starts from, so that clipping starts at 1 also for stale tokens; engine: the engine's at sampling (no "
        "correction by importance_cap is possible then).",
    )
    dynamic_sampling: bool = Field(
        default=True,
        description="Train only on groups with right and wrong responses (or what dynamic_sampling_on says), and "
        "generate more until a step is full. Switch it off for smoke tests with a model that is always wrong: such a "
        "run would end as starved.",
    )
    dynamic_sampling_on: FilterChoice = Field(
        default="correctness",
        description="What must differ between the responses of a group that is kept. correctness: some are right and "
        "some wrong; score_threshold: some score at least score_threshold and some less; unequal_scores: not all score "
        "the same. Scores are rewards without length rewards. The last two are for rewards that judge nothing right or "
        "wrong. A mapping with kind: function: your own.",
    )
    score_threshold: float | None = Field(
        default=None, description="The threshold of dynamic_sampling_on=score_threshold, which needs it."
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
        description="Steps a surplus group may wait in the buffer, and with rollout.schedule=asynchronous how far "
        "engines may run ahead. 0 drops surplus at once. Higher wastes fewer "
        "responses but trains on older ones.",
    )
    entropy_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Weight of an entropy bonus in the loss. The paper uses none; try 0.001 if entropy collapses. With "
        "entropy_target it is the value at the start.",
    )
    entropy_target: float | None = Field(
        default=None,
        gt=0,
        description="Entropy per token, in nats, that the bonus aims at: its weight rises by entropy_step after a step "
        "below the target, falls after one above, and is 0 while the entropy is above. null: a constant weight.",
    )
    entropy_step: float = Field(
        default=1e-4, gt=0, description="Change of the entropy bonus's weight per step, with entropy_target."
    )
    entropy_max: float | None = Field(
        default=0.005,
        gt=0,
        description="The entropy bonus's weight rises no further than this, with entropy_target. null: no bound, as "
        "before the key existed; a run from then that resumes is told.",
    )
    importance_cap: float | Literal["auto"] | None = Field(
        default="auto",
        description="Truncated importance sampling: each token's loss is weighted by its trainer / engine "
        "probability, at most this. Corrects engines that compute a little differently. A number above 0; null: off; "
        "auto: 2 if engine and trainer compute in different dtypes or the trainer in FP8, else off.",
    )
    importance_level: ImportanceLevel = Field(
        default="token",
        description="What importance_cap weighs. token: each token by its ratio; sequence: all tokens of a response "
        "by the product of their ratios.",
    )
    token_mask: tuple[float, float] | None = Field(
        default=None,
        description="[low, high] with 0 <= low < 1 < high. A token whose trainer / engine probability is outside is "
        "left out of the loss. null: off.",
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
        for name, bounds in (("sequence_mask", self.sequence_mask), ("token_mask", self.token_mask)):
            if isinstance(bounds, tuple) and not 0 <= bounds[0] < 1 < bounds[1]:
                raise ValueError(
                    f"algorithm.{name}={list(bounds)} must be [low, high] with 0 <= low < 1 < high, such as [0.5, 2]"
                )
        if self.covariance_bounds[0] >= self.covariance_bounds[1]:
            raise ValueError(
                f"algorithm.covariance_bounds={list(self.covariance_bounds)} must be [low, high] with low < high"
            )
        if min(self.soft_gate) <= 0:
            raise ValueError(f"algorithm.soft_gate={list(self.soft_gate)} must be two positive numbers")
        if (self.dynamic_sampling_on == "score_threshold") != (self.score_threshold is not None):
            raise ValueError(
                f"algorithm.dynamic_sampling_on={shown(self.dynamic_sampling_on)} with algorithm.score_threshold="
                f"{'null' if self.score_threshold is None else self.score_threshold}; give a threshold with "
                f"dynamic_sampling_on=score_threshold, and with nothing else"
            )
        bound = math.inf if self.entropy_max is None else self.entropy_max
        if self.entropy_target is not None and self.entropy_coefficient > bound:
            raise ValueError(
                f"algorithm.entropy_coefficient={self.entropy_coefficient:g} is above algorithm.entropy_max="
                f"{bound:g}, which bounds it with entropy_target; lower the first or raise the second"
            )
        if self.old_policy == "engine" and not (isinstance(self.importance_cap, str) or self.importance_cap is None):
            raise ValueError(
                f"algorithm.old_policy=engine and algorithm.importance_cap={self.importance_cap:g} would count the "
                f"engine's probabilities twice; set importance_cap=null or old_policy=step_start"
            )
        return self

    @property
    def filters_on_correctness(self) -> bool:
        """Whether a group is kept for having right and wrong responses."""
        return self.dynamic_sampling and self.dynamic_sampling_on == "correctness"

    @property
    def compares_group(self) -> bool:
        """Whether advantages compare the responses of a group."""
        return isinstance(self.advantage, OwnCode) or self.advantage in GROUP_BASELINES

    @property
    def own_code(self) -> Mapping[str, OwnCode]:
        """The code of the user's own by its key."""
        choices = {name: getattr(self, name) for name in ("policy_loss", "advantage", "dynamic_sampling_on")}
        return {name: choice for name, choice in choices.items() if isinstance(choice, OwnCode)}

    @property
    def chooses_tokens(self) -> bool:
        """Whether tokens are chosen by their covariance, before the updates."""
        return self.policy_loss in ("clip_cov", "kl_cov")

    @property
    def has_token_rewards(self) -> bool:
        """Whether a token's reward or advantage depends on the trainer's models, beside the response's reward."""
        return self.advantage == "gae" or self.penalizes_rewards

    @property
    def penalizes_rewards(self) -> bool:
        """Whether the KL penalty stands in the reward."""
        return self.kl.coefficient > 0 and self.kl.placement == "reward"

    def loss_settings(self, *, engine_differs: bool) -> LossSettings:
        """The loss's settings. `engine_differs`: the engine computes in another precision than the trainer, which turns
        on what is "auto"."""
        cap, bounds = self.importance_cap, self.sequence_mask
        auto_cap = 2.0 if engine_differs and self.old_policy == "step_start" else None
        resolved: dict[str, Any] = {
            "kind": self.policy_loss,
            "importance_cap": auto_cap if isinstance(cap, str) else cap,
            "sequence_mask": ((0.5, 2.0) if engine_differs else None) if isinstance(bounds, str) else bounds,
            "kl_coefficient": self.kl.coefficient if self.kl.placement == "loss" else 0.0,
            "kl_estimator": self.kl.estimator,
        }
        same = {field.name: getattr(self, field.name) for field in fields(LossSettings) if field.name not in resolved}
        return LossSettings(**same, **resolved)
