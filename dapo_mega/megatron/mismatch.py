"""Measures the mismatch between the engines' and the trainer's log-probs, masks sequences, and checks limits.

A token's importance weight is pi_old / pi_rollout: the trainer's probability under the weights that the step starts
from, over the engine's probability at sampling. It is 1 up to rounding if the engine had the same weights. Tokens of
older weights (surplus, partial rollouts) are off-policy by design and count as not fresh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.algorithms.ratios import effective_share, importance_weights, kl_estimate, within_bounds
from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.config import AlgorithmConfig, RunConfig
from dapo_mega.errors import FleetError
from dapo_mega.megatron.segments import sums_by_trajectory

ScoredBatch = tuple[MicroBatch, Tensor]
"""A micro-batch with the trainer's log-probs [N] of its response tokens under the weights the step starts from."""

_TURNS = ("1", "2", "3", "4", "5_and_later")
"""By `Sample.turns`."""
_SUMS = (
    "tokens",
    "abs_diff",
    "kl",
    "weight",
    "squared_weight",
    "truncated",
    "fresh_tokens",
    "fresh_abs_diff",
    "fresh_kl",
    *(f"fresh_tokens_{turn}" for turn in _TURNS),
    *(f"fresh_abs_diff_{turn}" for turn in _TURNS),
    "responses",
    "masked",
)
_NUM_NAMED = 4
_MAXIMA = ("abs_diff", "weight", "fresh_abs_diff")


def sum_engine_ratios(
    micro_batch: MicroBatch, old_logprobs: Tensor, context_group: dist.ProcessGroup | None = None
) -> Tensor:
    """`sums_by_trajectory` of log(trainer's / engine's probability); `old_logprobs` [N] of response tokens."""
    rollout_logprobs = micro_batch.rollout_logprobs.to(old_logprobs.device)
    return sums_by_trajectory(micro_batch, old_logprobs - rollout_logprobs, context_group)


def measure_mismatch(
    scored: Sequence[ScoredBatch],
    settings: AlgorithmConfig,
    *,
    control: dist.ProcessGroup,
    context_group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Metrics over all ranks of `control`, the same on each; `scored` is this rank's part of the step.

    `mismatch/...` cover all response tokens. `rollout/logprob_abs_diff_mean|max` and `rollout/kl_to_policy` cover fresh
    tokens, and are left out if there are none; means by turn, if all of them are of first turns.
    """
    totals = torch.zeros(len(_SUMS), dtype=torch.float64)
    maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64)
    for micro_batch, logprobs in scored:
        sums, largest = _measure_tokens(micro_batch, logprobs, settings)
        totals += torch.cat([sums, _count_responses(micro_batch, logprobs, settings, context_group)])
        maxima = torch.maximum(maxima, largest)
    dist.all_reduce(totals, group=control)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=control)
    return _metrics(dict(zip(_SUMS, totals.tolist(), strict=True)), dict(zip(_MAXIMA, maxima.tolist(), strict=True)))


def _measure_tokens(micro_batch: MicroBatch, logprobs: Tensor, settings: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The token-level entries of `_SUMS`, and `_MAXIMA`."""
    own, rollout = logprobs.double().cpu(), micro_batch.rollout_logprobs.double().cpu()
    fresh = micro_batch.of_responses(micro_batch.targets.fresh_mask).cpu()
    turns = micro_batch.of_responses(micro_batch.targets.turns).long().cpu()[fresh]
    differences = (own - rollout).abs()
    weights = importance_weights(own, rollout, math.inf)
    cap = math.inf if settings.weight_cap is None else settings.weight_cap
    kl = kl_estimate(rollout, own, "k3")
    sums = torch.stack(
        [
            torch.tensor(float(len(own))).double(),
            differences.sum(),
            kl.sum(),
            weights.sum(),
            weights.square().sum(),
            (weights > cap).sum(),
            fresh.sum(),
            differences[fresh].sum(),
            kl[fresh].sum(),
        ]
    )
    of_turns = torch.bincount(turns, minlength=len(_TURNS)), torch.bincount(turns, differences[fresh], len(_TURNS))
    measured = (differences, weights, differences[fresh])
    largest = [values.max() if len(values) else torch.zeros(()) for values in measured]
    return torch.cat([sums, *of_turns]), torch.stack(largest).double()


def _count_responses(
    micro_batch: MicroBatch, logprobs: Tensor, settings: AlgorithmConfig, context_group: dist.ProcessGroup | None
) -> Tensor:
    """The numbers of responses and of responses that `algorithm.sequence_mask` masks; counted on context rank 0."""
    sums = sum_engine_ratios(micro_batch, logprobs, context_group)
    if context_group is not None and dist.get_rank(context_group) != 0:
        return torch.zeros(2, dtype=torch.float64)
    sums, bounds = sums.cpu(), settings.response_bounds
    masked = ~within_bounds(sums, bounds) if bounds is not None else torch.zeros(())
    return torch.stack([(sums[1] > 0).sum(), masked.sum()]).double()


def measure_engines(
    scored: Sequence[ScoredBatch], engines: Sequence[str], *, control: dist.ProcessGroup
) -> dict[str, float]:
    """Mean |log-prob difference| of each engine's fresh tokens by URL, over all ranks of `control` and the same on
    each. Engines without fresh tokens are left out. `engines[i]` is the URL of engine i."""
    sums = torch.zeros(2, len(engines), dtype=torch.float64)
    for micro_batch, logprobs in scored:
        differences = (logprobs.double().cpu() - micro_batch.rollout_logprobs.double().cpu()).abs()
        ids = micro_batch.of_responses(micro_batch.targets.engine_ids).long().cpu()
        counted = micro_batch.of_responses(micro_batch.targets.fresh_mask).cpu() & (ids >= 0)
        sums[0].index_add_(0, ids[counted], differences[counted])
        sums[1].index_add_(0, ids[counted], torch.ones_like(differences[counted]))
    dist.all_reduce(sums, group=control)
    return {url: float(total / count) for url, total, count in zip(engines, *sums, strict=True) if count}


def worst_engines(engines: Mapping[str, float]) -> str:
    """Text on the engines with the largest mismatch, the worst first; empty if `engines` is."""
    if not engines:
        return ""
    ranked = sorted(engines, key=lambda url: -math.inf if math.isnan(engines[url]) else -engines[url])
    others = ", ".join(f"{url} {engines[url]:.4g}" for url in ranked[1:_NUM_NAMED])
    left_out = f" and {len(ranked) - _NUM_NAMED} more" if len(ranked) > _NUM_NAMED else ""
    return f"; the worst engine is {ranked[0]} with {engines[ranked[0]]:.4g}" + (
        f" ({others}{left_out})" if others else ""
    )


def starvation_cause(metrics: Mapping[str, float], config: RunConfig, engines: Mapping[str, float]) -> str | None:
    """The error if a mismatch explains groups without a signal; None if the engines agree with the trainer."""
    mean = metrics.get("rollout/logprob_abs_diff_mean", 0.0)
    if mean <= config.mismatch_warning:
        return None
    return (
        f"the engines' log-probs are not the trainer's, so the responses cannot be trained on: the mean "
        f"|log-prob difference| of the responses just sampled is {mean:.4g} nats, over {config.mismatch_warning:g} "
        f"(rollout.mismatch_warning){worst_engines(engines)}. Restart these engines with model.path's checkpoint "
        f"and run the same command: training resumes from the last checkpoint"
    )


def _metrics(total: Mapping[str, float], largest: Mapping[str, float]) -> dict[str, float]:
    tokens, fresh = total["tokens"], total["fresh_tokens"]
    metrics = {
        "mismatch/logprob_abs_diff_mean": total["abs_diff"] / tokens,
        "mismatch/logprob_abs_diff_max": largest["abs_diff"],
        "mismatch/kl": total["kl"] / tokens,
        "mismatch/importance_weight_mean": total["weight"] / tokens,
        "mismatch/importance_weight_max": largest["weight"],
        "mismatch/effective_sample_share": effective_share(total["weight"], total["squared_weight"], tokens),
        "mismatch/truncated_share": total["truncated"] / tokens,
        "mismatch/masked_response_share": total["masked"] / total["responses"],
        "mismatch/fresh_token_share": fresh / tokens,
    }
    if fresh:
        metrics["rollout/logprob_abs_diff_mean"] = total["fresh_abs_diff"] / fresh
        metrics["rollout/logprob_abs_diff_max"] = largest["fresh_abs_diff"]
        metrics["rollout/kl_to_policy"] = total["fresh_kl"] / fresh
    if total["fresh_tokens_1"] < fresh:
        for turn in _TURNS:
            if count := total[f"fresh_tokens_{turn}"]:
                metrics[f"rollout/logprob_abs_diff_mean_turn_{turn}"] = total[f"fresh_abs_diff_{turn}"] / count
    return metrics


def mismatch_warning(
    metrics: Mapping[str, float], config: RunConfig, step: int, engines: Mapping[str, float] | None = None
) -> str | None:
    """The warning about step `step` if there is one, with the worst of `engines` (see `measure_engines`). Raises
    FleetError above `rollout.mismatch_stop` or for NaN.

    Limits apply to fresh tokens; any NaN is above every limit.
    """
    name = "rollout/logprob_abs_diff_mean"
    mean = metrics.get(name, 0.0)
    if math.isnan(metrics["mismatch/logprob_abs_diff_mean"]):
        mean = math.nan
    stop = config.rollout.mismatch_stop
    if stop is not None and not mean <= stop:
        raise FleetError(
            f"engines and trainer disagree: mean |log-prob difference| {mean:.4g} nats at step {step} ({name}) is not "
            f"within rollout.mismatch_stop={stop:g}; the engines compute with other weights, or in a precision "
            f"(rollout.dtype) that is too low for this model{worst_engines(engines or {})}. Restart "
            f"the engines and run the same command: training resumes from the last checkpoint; or raise the limit"
        )
    if mean <= config.mismatch_warning:
        return None
    return (
        f"engine and trainer disagree: mean |log-prob difference| {mean:.4g} nats at step {step} is over "
        f"{config.mismatch_warning:g} (rollout.mismatch_warning); the engine does not compute with the policy's "
        f"weights or in its precision{worst_engines(engines or {})}"
    )
