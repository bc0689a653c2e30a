"""What every policy loss is: a section of the configuration that computes the losses of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dapo_mega.algorithms.ratios import MAX_LOG_RATIO, means_over
from dapo_mega.declared import Metric, Section

if TYPE_CHECKING:  # The configuration is read without torch.
    from torch import Tensor

LossNeed = Literal["entropy", "reference", "engine"]
"""What a loss may ask for beside log-probs and advantages."""


@dataclass(frozen=True)
class LossInputs:
    """Response tokens of one micro-batch, each field [T]: log-probs in nats under the current weights (with gradient)
    and under the old ones, advantages, and which tokens count in the loss.

    `of_responses` [2, T] has, for every token, the sum of log(pi_theta / pi_old) over the tokens in the loss of its
    whole response, and their number; detached, and given to losses that are `is_sequence_level`. `chosen` [T] are the
    tokens that `megatron/covariance.py` chose. A loss that `needs` them is given entropies in nats (with gradient), the
    log-probs of the reference model, and those of the engine at sampling.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    in_loss: Tensor
    of_responses: Tensor | None = None
    chosen: Tensor | None = None
    entropy: Tensor | None = None
    reference_logprobs: Tensor | None = None
    engine_logprobs: Tensor | None = None

    def log_ratios(self) -> Tensor:
        """log(pi_theta / pi_old) per token [T] in nats, bounded so that its exponential is finite."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def ratios(self) -> Tensor:
        """pi_theta / pi_old per token [T]."""
        return self.log_ratios().exp()

    def response_log_ratios(self) -> Tensor:
        """log(pi_theta / pi_old) of the token's whole response [T], detached."""
        assert self.of_responses is not None, "a loss that looks at whole responses must be is_sequence_level"
        return self.of_responses[0]

    def chosen_tokens(self) -> Tensor:
        """Which tokens were chosen for their covariance [T] bool."""
        assert self.chosen is not None, "the tokens must be chosen before the update"
        return self.chosen

    def response_lengths(self) -> Tensor:
        """Tokens in the loss of the token's response [T], at least 1."""
        assert self.of_responses is not None, "a loss that looks at whole responses must be is_sequence_level"
        return self.of_responses[1].clamp(min=1)


@dataclass(frozen=True)
class TokenLosses:
    """`loss` [T] carries the gradient; `sums` are detached scalars over the tokens in the loss, under the loss's
    `sum_names`."""

    loss: Tensor
    sums: Mapping[str, Tensor]


class PolicyLoss(Section):
    """One kind of loss with its parameters: per-token losses, and metrics from the sums that it declares.

    The objective adds weighting and averaging over tokens, importance weights, KL and entropy terms for all kinds.
    Nothing here imports torch: a loss uses the methods of the tensors that it is given.
    """

    kind: str

    described_metrics: ClassVar[tuple[Metric, ...]] = ()
    """The catalogue's entries of what `metrics` returns, by whose names `token_losses` returns sums."""
    chooses_tokens: ClassVar[bool] = False
    """Whether tokens of the whole step are chosen for it by their covariance, before the updates."""

    @property
    def is_sequence_level(self) -> bool:
        """Whether `token_losses` needs `of_responses`."""
        return False

    @property
    def needs(self) -> frozenset[LossNeed]:
        """What `token_losses` is to be given. A reference model is loaded for a loss that needs it."""
        return frozenset()

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums that `token_losses` returns."""
        return tuple(metric.name for metric in self.described_metrics)

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        """The loss of every token. Raises ValueError for inputs of different shapes."""
        raise NotImplementedError

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a mini-batch from the sums over all its tokens and from `loss_tokens`, their number: by default
        the means of all sums. A mean over nothing is left out."""
        return means_over(sums["loss_tokens"], {name: sums[name] for name in self.sum_names})


RATIO_MEAN = Metric(
    "policy/ratio_mean",
    "ratio",
    "Mean of policy's probability over that at the step's start.",
    "near 1; exactly 1 with one update per step",
    "drifts away from 1",
    "as for `policy/kl_to_old`",
)
CLIP_LOW_SHARE = Metric(
    "policy/clip_low_share",
    "share",
    "Share of tokens whose gradient the lower clipping bound removes.",
    "no general value; exactly 0 with one update per step",
    "much larger in later steps",
    "lower `optimizer.learning_rate`",
)
CLIP_HIGH_SHARE = Metric(
    "policy/clip_high_share",
    "share",
    "Share of tokens whose gradient the upper clipping bound removes.",
    "no general value; exactly 0 with one update per step",
    "much larger in later steps",
    "lower `optimizer.learning_rate`",
)
"""Metrics of several losses."""
