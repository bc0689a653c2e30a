"""What one micro-batch contributes to an update: the policy-gradient objective, and imitation for cold starts.

An objective turns log-probs into (sum of weighted token losses, denominator, report). Megatron divides the sum by
the denominator over all micro-batches and ranks; reports are vectors of sums that are added up likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.algorithms import kl_estimate, policy_loss
from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.config import AlgorithmConfig
from dapo_mega.megatron.mismatch import kept_segments


@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch with what the update needs beside it, per response token [N], on the last stage only.

    Without `old_logprobs` the weights that are updated are the old ones, and their log-probs those of the update
    itself, without gradient.
    """

    micro_batch: MicroBatch
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None


class Objective(Protocol):
    """A loss over packed micro-batches."""

    @property
    def report_size(self) -> int:
        """Length of the report vectors."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `evaluate` uses the entropies; else they may be zeros."""

    def evaluate(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of weighted token losses, denominator (int32 scalar), report vector (detached), from the log-probs and
        entropies [N] of the micro-batch's response tokens."""

    def denominator(self, totals: Tensor) -> float:
        """The mini-batch's denominator, from the summed report vectors."""

    def summarise(self, totals: Tensor) -> dict[str, float]:
        """Metrics from the summed report vectors."""


def _share(numerator: Tensor, denominator: Tensor) -> float:
    return float(numerator / denominator) if denominator else 0.0


_POLICY_REPORT = (
    "loss",
    "denominator",
    "loss_tokens",
    "clipped_low",
    "clipped_high",
    "clipped_dual",
    "ratio",
    "kl_to_old",
    "up_clipped_probability",
    "entropy",
    "kl_to_reference",
)


@dataclass(frozen=True)
class PolicyGradient:
    """The clipped objective of `AlgorithmConfig` (DAPO eq. 8 by default) with optional KL and entropy terms.

    What `RunConfig.objective` fills in automatically is off where it was not filled in. Responses that
    `sequence_mask` leaves out have weight 0 in every term and stay in the denominator, as tokens of weight 0 under an
    importance cap would: masking a bad response must not raise the weight of the others. `context_group` are the
    processes that share a micro-batch's tokens under context parallelism.
    """

    algorithm: AlgorithmConfig
    context_group: dist.ProcessGroup | None = None

    @property
    def report_size(self) -> int:
        return len(_POLICY_REPORT)

    @property
    def needs_entropy(self) -> bool:
        return self.algorithm.entropy_coefficient > 0

    def evaluate(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        config = self.algorithm
        micro = batch.micro_batch
        targets = micro.targets
        chosen = targets.response_mask
        in_loss = targets.loss_mask[chosen].to(logprobs.device)
        weights = micro.token_weights[chosen].to(logprobs.device)
        old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        if isinstance(config.sequence_mask, tuple):
            kept = kept_segments(micro, old_logprobs, config.sequence_mask, self.context_group)
            weights = weights * kept[micro.segment_ids[chosen].to(kept.device)]
        terms = policy_loss(
            logprobs,
            old_logprobs,
            targets.advantages[chosen].to(logprobs.device),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            rollout_logprobs=targets.rollout_logprobs[chosen].to(logprobs.device),
            importance_cap=None if config.importance_cap == "auto" else config.importance_cap,
        )
        token_loss = terms.loss
        kl = torch.zeros_like(logprobs)
        if config.kl.coefficient > 0:
            assert batch.reference_logprobs is not None
            kl = kl_estimate(logprobs, batch.reference_logprobs, config.kl.estimator)
            token_loss = token_loss + config.kl.coefficient * kl
        if config.entropy_coefficient > 0:
            token_loss = token_loss - config.entropy_coefficient * entropy
        loss = (token_loss * weights).sum()
        with torch.no_grad():
            up_clipped = terms.clipped_high & in_loss
            report = torch.stack(
                [
                    loss.detach(),
                    torch.tensor(float(micro.denominator), device=loss.device),
                    in_loss.sum(),
                    (terms.clipped_low & in_loss).sum(),
                    up_clipped.sum(),
                    (terms.clipped_dual & in_loss).sum(),
                    (terms.ratio * in_loss).sum(),
                    (kl_estimate(logprobs, old_logprobs, "k3") * in_loss).sum(),
                    (logprobs.exp() * up_clipped).sum(),
                    (entropy * in_loss).sum(),
                    (kl * in_loss).sum(),
                ]
            )
        return loss, _denominator(micro, loss), report

    def denominator(self, totals: Tensor) -> float:
        return float(totals[_POLICY_REPORT.index("denominator")])

    def summarise(self, totals: Tensor) -> dict[str, float]:
        total = dict(zip(_POLICY_REPORT, totals, strict=True))
        tokens = total["loss_tokens"]
        metrics = {
            "policy/loss": _share(total["loss"], total["denominator"]),
            "policy/clip_low_share": _share(total["clipped_low"], tokens),
            "policy/clip_high_share": _share(total["clipped_high"], tokens),
            "policy/dual_clip_share": _share(total["clipped_dual"], tokens),
            "policy/ratio_mean": _share(total["ratio"], tokens),
            "policy/kl_to_old": _share(total["kl_to_old"], tokens),
            "policy/up_clipped_probability": _share(total["up_clipped_probability"], total["clipped_high"]),
            "policy/loss_tokens": float(tokens),
        }
        if self.algorithm.kl.coefficient > 0:
            metrics["policy/kl_to_reference"] = _share(total["kl_to_reference"], tokens)
        return metrics


@dataclass(frozen=True)
class SupervisedLoss:
    """Negative log-likelihood of demonstrated response tokens, mean over the tokens of the batch."""

    @property
    def report_size(self) -> int:
        return 2

    @property
    def needs_entropy(self) -> bool:
        return False

    def evaluate(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        micro = batch.micro_batch
        loss = -(logprobs * micro.token_weights[micro.targets.response_mask].to(logprobs.device)).sum()
        report = torch.stack([loss.detach(), torch.tensor(float(micro.denominator), device=loss.device)])
        return loss, _denominator(micro, loss), report

    def denominator(self, totals: Tensor) -> float:
        return float(totals[1])

    def summarise(self, totals: Tensor) -> dict[str, float]:
        return {"policy/loss": _share(totals[0], totals[1])}


def _denominator(micro_batch: MicroBatch, loss: Tensor) -> Tensor:
    return torch.tensor(micro_batch.denominator, dtype=torch.int32, device=loss.device)
