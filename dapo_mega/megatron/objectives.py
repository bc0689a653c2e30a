"""The losses of one micro-batch: the policy-gradient objective, and supervised fine-tuning for cold starts.

An objective turns log-probs into a `LossTerm`. Megatron divides the sum of the losses by that of the denominators over
all micro-batches and ranks; the named sums are added up in the same way, and metrics are computed from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.algorithms.policy_losses import LossInputs, LossNeed
from dapo_mega.algorithms.ratios import (
    importance_weights,
    kl_estimate,
    kl_with_rest,
    means_over,
    sequence_importance_weights,
    within_bounds,
)
from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.config import AlgorithmConfig, RunConfig
from dapo_mega.megatron.mismatch import sum_engine_ratios
from dapo_mega.megatron.ratio_counts import RatioCounts
from dapo_mega.megatron.segments import sums_by_trajectory


@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch and the old and reference log-probs per response token [N], on the last stage only.

    `old_logprobs=None`: the step makes one update, so the old policy is the current one and its log-probs are those of
    this forward pass, detached. `chosen` [N] bool are the tokens that `covariance.py` chose, where the loss needs them.
    """

    micro_batch: MicroBatch
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    chosen: Tensor | None = None


@dataclass(frozen=True)
class TokenScores:
    """Log-probs in nats and entropies [N] float32 of the response tokens of one micro-batch; empty off the last stage.
    Where a loss is computed of them they have gradients, and entropies that the objective does not need are zeros.
    `others` [N, k] are the log-probs of the teacher's most probable tokens, or of the model's own with their ids
    `other_ids` [N, k]; k is 0 where none were asked for."""

    logprobs: Tensor
    entropy: Tensor
    others: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    other_ids: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    @classmethod
    def of(cls, rows: Tensor, top_k: int = 0) -> TokenScores:
        """From what `PolicyStage` returns, [2 or more, N]; given `top_k` it had been asked for these."""
        others = rows[2:].t()
        if not top_k:
            return cls(rows[0], rows[1], others)
        return cls(rows[0], rows[1], others[:, :top_k], others[:, top_k:].long())


@dataclass(frozen=True)
class LossTerm:
    """A micro-batch's part of the loss: `total`, the weighted sum of token losses; `denominator`, an int32 scalar; and
    detached scalars under the objective's `sum_names`."""

    total: Tensor
    denominator: Tensor
    sums: Mapping[str, Tensor]


@dataclass(frozen=True)
class PolicyGradient:
    """The policy loss of the settings (DAPO eq. 8 by default) with optional importance weights, KL and entropy.

    Tokens and responses that `token_mask` and `sequence_mask` leave out have weight 0 in every term but stay in the
    denominator: masking a bad response must not raise the weight of the others. `context_group` has the ranks that
    share a micro-batch's tokens under context parallelism. `ratios`, if given, counts pi_theta / pi_old of the tokens
    in the loss. With a `teacher_weight` above 0 the loss has that times each token's KL to its teacher, as
    `kl_with_rest` gives it.
    """

    settings: AlgorithmConfig
    context_group: dist.ProcessGroup | None = None
    ratios: RatioCounts | None = None
    teacher_weight: float = 0.0

    @property
    def needs(self) -> frozenset[LossNeed]:
        """What `evaluate` needs: entropies, log-probs of the reference model or of the engine."""
        entropy: set[LossNeed] = {"entropy"} if self.settings.entropy_coefficient > 0 else set()
        reference: set[LossNeed] = {"reference"} if self.settings.kl_in_loss > 0 else set()
        return frozenset(entropy | reference | self.settings.policy_loss.needs)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums in every `LossTerm`, including `denominator`."""
        own = ("loss", "denominator", "loss_tokens", "kl_to_old", "kl_to_reference")
        of_teachers = ("kl_to_teacher", "taught_tokens") if self.teacher_weight else ()
        return (*own, *of_teachers, *self.settings.policy_loss.sum_names)

    def evaluate(self, outputs: TokenScores, batch: TokenBatch) -> LossTerm:
        """The micro-batch's part of the loss."""
        settings, micro = self.settings, batch.micro_batch
        in_loss = micro.in_loss.to(outputs.logprobs.device)
        start_logprobs = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        importance, weights = self._corrections(micro, start_logprobs)

        def used(values: Tensor) -> Tensor:
            """0 for what is no number and has no weight, because 0 times it would be none either."""
            return torch.where((weights != 0) | values.isfinite(), values, 0)

        logprobs = used(outputs.logprobs)
        of_engines = settings.old_policy != "step_start"
        old_logprobs = used(micro.rollout_logprobs.to(logprobs.device) if of_engines else start_logprobs)
        own = settings.policy_loss
        advantages = used(micro.advantages.to(in_loss.device))
        tokens = LossInputs(logprobs, old_logprobs, advantages, in_loss, chosen=batch.chosen)
        if own.is_sequence_level:
            tokens = replace(tokens, of_responses=self._of_responses(micro, tokens.log_ratios(), in_loss))
        if "entropy" in own.needs:
            tokens = replace(tokens, entropy=used(outputs.entropy))
        if "reference" in own.needs:
            assert batch.reference_logprobs is not None
            tokens = replace(tokens, reference_logprobs=used(batch.reference_logprobs))
        if "engine" in own.needs:
            tokens = replace(tokens, engine_logprobs=used(micro.rollout_logprobs.to(logprobs.device)))
        losses = own.token_losses(tokens)
        token_loss = losses.loss if importance is None else losses.loss * used(importance)
        kl = torch.zeros_like(logprobs)
        if settings.kl_in_loss > 0:
            assert batch.reference_logprobs is not None
            kl = kl_estimate(logprobs, used(batch.reference_logprobs), settings.kl.estimator)
            token_loss = token_loss + settings.kl_in_loss * kl
        if settings.entropy_coefficient > 0:
            token_loss = token_loss - settings.entropy_coefficient * used(outputs.entropy)
        of_teachers = {}
        if self.teacher_weight:
            to_teacher = kl_with_rest(used(outputs.others.t()).t(), micro.teacher_top[1].to(logprobs.device))
            token_loss = token_loss + self.teacher_weight * to_teacher
            is_taught = in_loss & (micro.of_responses(micro.targets.teachers).to(in_loss.device) >= 0)
            of_teachers = {"kl_to_teacher": (to_teacher.detach() * is_taught).sum(), "taught_tokens": is_taught.sum()}
        total = (token_loss * weights).sum()
        if self.ratios is not None:
            self.ratios.add(logprobs - old_logprobs, in_loss)
        with torch.no_grad():
            sums = {
                "loss": total.detach(),
                "denominator": torch.tensor(float(micro.denominator), device=total.device),
                "loss_tokens": in_loss.sum(),
                "kl_to_old": (kl_estimate(logprobs, old_logprobs, "k3") * in_loss).sum(),
                "kl_to_reference": (kl * in_loss).sum(),
                **of_teachers,
                **losses.sums,
            }
        return LossTerm(total, _denominator(micro, total), sums)

    def _of_responses(self, micro: MicroBatch, log_ratios: Tensor, in_loss: Tensor) -> Tensor:
        """`LossInputs.of_responses`."""
        sums = sums_by_trajectory(micro, log_ratios, self.context_group, counted=in_loss)
        return sums[:, micro.of_responses(micro.first_segments).to(sums.device)].to(log_ratios.dtype)

    def _corrections(self, micro: MicroBatch, start_logprobs: Tensor) -> tuple[Tensor | None, Tensor]:
        """What corrects for the engine: importance weights of the policy loss [N], None if there are none, and the
        weight of every response token in the loss [N], 0 where a mask leaves it out."""
        settings, importance = self.settings, None
        cap, bounds = settings.weight_cap, settings.response_bounds
        weights = micro.of_responses(micro.token_weights).to(start_logprobs.device)
        weighs_responses = cap is not None and settings.importance_level == "sequence"
        if bounds is not None or weighs_responses:
            sums = sum_engine_ratios(micro, start_logprobs, self.context_group)
            segments = micro.of_responses(micro.first_segments).to(sums.device)
            if bounds is not None:
                weights = weights * within_bounds(sums, bounds)[segments]
            if cap is not None and weighs_responses:
                importance = sequence_importance_weights(sums, cap)[segments].to(weights.dtype)
        if cap is not None and not weighs_responses:
            importance = importance_weights(start_logprobs, micro.rollout_logprobs.to(weights.device), cap)
        if settings.token_mask is not None:
            low, high = settings.token_mask
            ratios = importance_weights(start_logprobs, micro.rollout_logprobs.to(weights.device), math.inf)
            weights = weights * ((ratios >= low) & (ratios <= high))
        return importance, weights

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a mini-batch, from the sums over all its micro-batches and ranks. A mean over nothing is left
        out."""
        tokens = sums["loss_tokens"]
        of_tokens = {"policy/kl_to_old": sums["kl_to_old"]}
        if self.settings.kl_in_loss > 0:
            of_tokens["policy/kl_to_reference"] = sums["kl_to_reference"]
        return {
            **means_over(sums["denominator"], {"policy/loss": sums["loss"]}),
            **means_over(tokens, of_tokens),
            **means_over(sums.get("taught_tokens", 0), {"policy/kl_to_teacher": sums.get("kl_to_teacher", 0.0)}),
            "policy/loss_tokens": tokens,
            **self.settings.policy_loss.metrics(sums),
        }


@dataclass(frozen=True)
class SupervisedLoss:
    """Negative log-likelihood of demonstrated response tokens, mean over the tokens of the batch; each times its
    advantage if `is_weighted`."""

    is_weighted: bool = False
    needs: frozenset[LossNeed] = frozenset()
    sum_names: tuple[str, ...] = ("loss", "denominator")

    def evaluate(self, outputs: TokenScores, batch: TokenBatch) -> LossTerm:
        micro, logprobs = batch.micro_batch, outputs.logprobs
        weights = micro.of_responses(micro.token_weights)
        if self.is_weighted:
            weights = weights * micro.advantages
        total = -(logprobs * weights.to(logprobs.device)).sum()
        denominator = torch.tensor(float(micro.denominator), device=total.device)
        return LossTerm(total, _denominator(micro, total), {"loss": total.detach(), "denominator": denominator})

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return means_over(sums["denominator"], {"policy/loss": sums["loss"]})


Objective = PolicyGradient | SupervisedLoss


def needs_whole_trajectories(config: RunConfig) -> bool:
    """Whether a step sums over whole trajectories, which it can only where their samples are in one micro-batch."""
    settings = config.objective
    weighs = settings.weight_cap is not None and settings.importance_level == "sequence"
    of_loss = settings.policy_loss.is_sequence_level or settings.response_bounds is not None or weighs
    return of_loss or (settings.has_token_rewards and not settings.advantage.compares_group)


def _denominator(micro_batch: MicroBatch, loss: Tensor) -> Tensor:
    return torch.tensor(micro_batch.denominator, dtype=torch.int32, device=loss.device)
