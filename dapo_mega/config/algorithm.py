"""The policy-gradient objective and its presets."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from dapo_mega.algorithms.advantages import AdvantageChoice, GroupNormAdvantage
from dapo_mega.algorithms.aggregation import AggregationKind
from dapo_mega.algorithms.filters import CorrectnessFilter, FilterChoice
from dapo_mega.algorithms.policy_losses import ClipLoss, PolicyLossChoice
from dapo_mega.algorithms.ratios import KlKind
from dapo_mega.config.base import Section
from dapo_mega.config.choices import settled
from dapo_mega.config.presets import PRESETS

KlPlacement = Literal["loss", "reward"]
if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(PRESETS)]
OldPolicy = Literal["step_start", "engine"]
ImportanceLevel = Literal["token", "sequence"]


class KlConfig(Section):
    """KL penalty against a frozen copy of the starting model; with coefficient 0 (DAPO) there is no reference model.

    As a loss term k1 has no gradient in expectation and only serves as a metric; k2 and k3 do have one.
    """

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty. 0: no penalty, and no reference model in memory. Raise it (GRPO uses 0.04) where the
    policy must stay close to the starting model."""
    estimator: KlKind = "k3"
    """Formula of the KL per token, from the difference d = log p_reference - log p_policy. k1: -d; k2: d^2 / 2; k3:
    exp(d) - d - 1. In a loss k1 has no gradient on average, so use k2 or k3; in the reward use k1."""
    placement: KlPlacement = "loss"
    """Where the penalty stands. loss: coefficient x KL is added to each token's loss; reward: it is taken off each
    token's reward, measured with the weights that the step starts from."""


class AlgorithmConfig(Section):
    """The policy-gradient objective. `preset` sets the defaults of the other keys."""

    preset: Preset = "dapo"
    """Published algorithm whose settings fill in the keys of this section that the file leaves out. Keys that the file
    gives win."""
    advantage: AdvantageChoice = Field(default=GroupNormAdvantage(), discriminator="kind")
    """Advantage of a response from the rewards R of its group."""
    normalize_advantages: bool = False
    """Subtract the mean of the advantages of all tokens of a step and divide by their standard deviation (REINFORCE++).
    Equal advantages become 0."""
    aggregation: AggregationKind = "token_mean"
    """How token losses become one number. token_mean: every token of an update weighs the same;
    sequence_mean_token_mean: mean of each response, then over responses; sequence_mean_token_sum: sum of each response,
    then mean over responses; sequence_mean_constant: the same / rollout.max_response_tokens."""
    policy_loss: PolicyLossChoice = Field(default=ClipLoss(), discriminator="kind")
    """The policy loss, which is minus the mean over tokens of what the kinds below say: r is the new / old probability
    of a token, s that of its response, A the advantage and p the token's probability."""
    old_policy: OldPolicy = "step_start"
    """Whose probabilities are the old ones. step_start: the trainer's with the weights that the step starts from, so
    that clipping starts at 1 also for stale tokens; engine: the engine's at sampling (no correction by importance_cap
    is possible then)."""
    dynamic_sampling: bool = True
    """Train only on groups with right and wrong responses (or what dynamic_sampling_on says), and generate more until a
    step is full. Switch it off for smoke tests with a model that is always wrong: such a run would end as starved."""
    dynamic_sampling_on: FilterChoice = Field(default=CorrectnessFilter(), discriminator="kind")
    """What a group must have to be kept. Scores are rewards without length rewards."""
    max_generation_rounds: int = Field(default=10, ge=1)
    """Generation rounds a step may take. If they leave too few usable groups, the run ends with exit status 3. Raise it
    if few prompts are neither always right nor always wrong."""
    max_staleness: int = Field(default=1, ge=0)
    """Steps a surplus group may wait in the buffer, and with rollout.schedule=asynchronous how far engines may run
    ahead. 0 drops surplus at once. Higher wastes fewer responses but trains on older ones."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus in the loss. The paper uses none; try 0.001 if entropy collapses. With entropy_target
    it is the value at the start."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Entropy per token, in nats, that the bonus aims at: its weight rises by entropy_step after a step below the
    target, falls after one above, and is 0 while the entropy is above. null: a constant weight."""
    entropy_step: float = Field(default=1e-4, gt=0)
    """Change of the entropy bonus's weight per step, with entropy_target."""
    entropy_max: float | None = Field(default=0.005, gt=0)
    """The entropy bonus's weight rises no further than this, with entropy_target. null: no bound, as before the key
    existed; a run from then that resumes is told."""
    importance_cap: float | Literal["auto"] | None = "auto"
    """Truncated importance sampling: each token's loss is weighted by its trainer / engine probability, at most this.
    Corrects engines that compute a little differently. A number above 0; null: off; auto: 2 if engine and trainer
    compute in different dtypes or the trainer in FP8, else off."""
    importance_level: ImportanceLevel = "token"
    """What importance_cap weighs. token: each token by its ratio; sequence: all tokens of a response by the product of
    their ratios."""
    token_mask: tuple[float, float] | None = None
    """[low, high] with 0 <= low < 1 < high. A token whose trainer / engine probability is outside is left out of the
    loss. null: off."""
    sequence_mask: tuple[float, float] | Literal["auto"] | None = "auto"
    """[low, high] with 0 <= low < 1 < high. A response whose geometric mean of trainer / engine probability is outside
    is left out of the loss. null: off; auto: [0.5, 2] where importance_cap's auto is 2, else off."""
    kl: KlConfig = KlConfig()

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, raw: Any) -> Any:
        preset = PRESETS.get(str(raw.get("preset")), {}) if isinstance(raw, Mapping) else {}
        return settled(cls, raw, preset)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not isinstance(self.importance_cap, str | None) and self.importance_cap <= 0:
            raise ValueError(f"algorithm.importance_cap={self.importance_cap:g} must be positive, auto or null")
        for name, bounds in (("sequence_mask", self.sequence_mask), ("token_mask", self.token_mask)):
            if isinstance(bounds, tuple) and not 0 <= bounds[0] < 1 < bounds[1]:
                raise ValueError(
                    f"algorithm.{name}={list(bounds)} must be [low, high] with 0 <= low < 1 < high, such as [0.5, 2]"
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
        return self.dynamic_sampling and self.dynamic_sampling_on.needs_correctness

    @property
    def has_token_rewards(self) -> bool:
        """Whether a token's reward or advantage depends on the trainer's models, beside the response's reward."""
        return self.advantage.uses_critic or self.penalizes_rewards

    @property
    def penalizes_rewards(self) -> bool:
        """Whether the KL penalty stands in the reward."""
        return self.kl.coefficient > 0 and self.kl.placement == "reward"

    @property
    def uses_reference(self) -> bool:
        """Whether a frozen copy of the starting model is in memory."""
        return self.kl.coefficient > 0 or "reference" in self.policy_loss.needs

    @property
    def kl_in_loss(self) -> float:
        """The coefficient of the KL penalty that stands in the loss."""
        return self.kl.coefficient if self.kl.placement == "loss" else 0.0

    @property
    def weight_cap(self) -> float | None:
        """`importance_cap`; None for one that is off, and for an "auto" that nothing has resolved."""
        return None if isinstance(self.importance_cap, str) else self.importance_cap

    @property
    def response_bounds(self) -> tuple[float, float] | None:
        """`sequence_mask`; None for one that is off, and for an "auto" that nothing has resolved."""
        return None if isinstance(self.sequence_mask, str) else self.sequence_mask

    def resolved(self, *, engine_differs: bool) -> Self:
        """The section without "auto". `engine_differs`: the engine computes in another precision than the trainer."""
        auto = {
            "importance_cap": 2.0 if engine_differs and self.old_policy == "step_start" else None,
            "sequence_mask": (0.5, 2.0) if engine_differs else None,
        }
        return self.model_copy(update={key: value for key, value in auto.items() if getattr(self, key) == "auto"})
