"""Log-probabilities and entropy of chosen tokens from vocabulary-parallel logits, a chunk of positions at a time.

Logits stay in the model's dtype; float32 copies exist for a few rows only, forward and backward. The arithmetic of
one chunk (`chunk_statistics_`, `chunk_gradient_`) serves both `vocab_parallel_logprobs`, which is given all logits,
and `fused_logprobs.output_logprobs`, which computes them chunk by chunk. On a GPU with Triton the kernels of
`logprob_kernels` do it; the implementation here is their reference and serves all other devices.

Each rank of the tensor-parallel group has four statistics of its vocabulary slice per position: the `peak` logit, and
relative to it the `total` = sum of exp, `weighted` = sum of exp * logit, and the `target` logit (0 on ranks that do not
own it). `combined_statistics` turns them into log-probs and entropies with two collectives. `MoreTokens` adds the
log-probs of other tokens at the same positions, from the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_POSITIONS = 1024
# float32 copies of this many bytes at a time: within a core's L2 cache on the CPU (each pass over the copy then
# runs at cache speed), enough to fill a GPU that lacks Triton.
BLOCK_BYTES = {"cpu": 1 << 18, "cuda": 1 << 26}
NUM_STATISTICS = 4
# Below any logit, yet its product with a sum over the vocabulary is finite.
LOWEST = -1e30


class VocabSlice(NamedTuple):
    """The entries of one tensor-parallel rank in a vocabulary of `size`: `num_valid` from token `first` on, then only
    padding."""

    first: int
    num_valid: int
    size: int

    @classmethod
    def of_rank(cls, width: int, vocab_size: int, group: dist.ProcessGroup) -> VocabSlice:
        """This rank's slice, `width` columns including padding, of a vocabulary of `vocab_size`."""
        first = dist.get_rank(group) * width
        return cls(first, max(0, min(width, vocab_size - first)), vocab_size)

    def local(self, targets: Tensor) -> Tensor:
        """Column of each target [N] in this slice, or -1 where another rank owns it."""
        local = targets - self.first
        return local.masked_fill_((local < 0) | (local >= self.num_valid), -1)


class TokenDistributions(NamedTuple):
    """Per position [N]: log-prob of the target and entropy in nats, and the log of the sum of exp(logits)."""

    logprobs: Tensor
    entropy: Tensor
    normaliser: Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and results: float32, or float64 for float64 logits."""
    return torch.promote_types(dtype, torch.float32)


def vocab_parallel_logprobs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    with_entropy: bool = True,
    others: Tensor | None = None,
    top_k: int = 0,
) -> tuple[Tensor, ...]:
    """Log-probs and entropies [N] float32, in nats, of `targets` [N] at positions `rows` [N] of `logits`.

    `logits` [T, V / tp] are this rank's slice of the padded vocabulary; columns from `vocab_size` on are padding
    and have probability 0. The distribution is softmax(logits / temperature). Both results carry gradients;
    without `with_entropy` the entropies are zeros. `others` [N, k] or `top_k` add what `MoreTokens.logprobs` returns.
    """
    if rows.shape != targets.shape:
        raise ValueError(f"rows {tuple(rows.shape)} and targets {tuple(targets.shape)} must have one shape [N]")
    outputs: tuple[Tensor, ...] = _VocabParallelLogProbs.apply(
        logits, rows, targets, 1.0 / temperature, vocab_size, group, with_entropy, others, top_k
    )
    return outputs


def empty_statistics(num_positions: int, like: Tensor) -> Tensor:
    """[4, N]: peak, total, weighted and target logit of a slice without any valid column."""
    statistics = torch.zeros(NUM_STATISTICS, num_positions, dtype=compute_dtype(like.dtype), device=like.device)
    statistics[0] = -torch.inf
    return statistics


def chunk_statistics_(
    logits: Tensor, targets: Tensor, inverse_temperature: float, statistics: Tensor, with_entropy: bool
) -> None:
    """Write the statistics [4, n] of softmax(logits * inverse_temperature); `logits` [n, v] may be destroyed.

    `targets` [n] are columns, or -1 where another rank owns the target. v is at least 1, all columns are valid.
    """
    kernels = _kernels_for(logits)
    if kernels is not None:
        kernels.chunk_statistics(logits, targets, inverse_temperature, statistics, with_entropy)
        return
    peak, total, weighted, target = statistics
    target.copy_(logits.gather(1, targets.clamp(min=0)[:, None])[:, 0])
    for block in _blocks(logits):
        scaled = _scaled_(logits[block], inverse_temperature)
        torch.amax(scaled, -1, out=peak[block])
        scaled.sub_(peak[block, None])
        exponentials = torch.exp(scaled, out=None if with_entropy else scaled)
        torch.sum(exponentials, -1, out=total[block])
        if with_entropy:
            torch.sum(exponentials.mul_(scaled), -1, out=weighted[block])
    target.mul_(inverse_temperature).sub_(peak).masked_fill_(targets < 0, 0.0)


def combined_statistics(
    statistics: Tensor, targets: Tensor, group: dist.ProcessGroup, with_entropy: bool
) -> TokenDistributions:
    """Log-probs, entropies and normalisers [N] from every rank's statistics [4, N] and local targets [N]."""
    peak, total, weighted, target = statistics
    # N is the same on all ranks of the group, so that they agree on whether there is anything to exchange.
    if dist.get_world_size(group) > 1 and len(targets) > 0:
        maximum = peak.clone()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        shift = peak - maximum
        sums = [total, target.add(shift).masked_fill_(targets < 0, 0.0)]
        shift.clamp_(min=LOWEST)
        if with_entropy:
            sums.append(weighted.addcmul(total, shift).mul_(shift.exp()))
        sums[0] = total * shift.exp()
        reduced = torch.stack(sums)
        dist.all_reduce(reduced, group=group)
        peak, total, target = maximum, reduced[0], reduced[1]
        weighted = reduced[2] if with_entropy else weighted
    log_total = total.log()
    entropy = log_total - weighted / total if with_entropy else torch.zeros_like(log_total)
    return TokenDistributions(target - log_total, entropy, peak + log_total)


def gradient_coefficients(
    targets: Tensor,
    inverse_temperature: float,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """[4, N]: normaliser z, constant a, slope b and target's share t of the gradient with respect to logits.

    With log p = logits * inverse_temperature - z, the gradient is p (a + b log p) + t at the target, which is
    inverse_temperature * (grad_logprobs (onehot - p) - grad_entropy p (log p + entropy)).
    """
    coefficients = torch.zeros(NUM_STATISTICS, len(targets), dtype=normaliser.dtype, device=normaliser.device)
    coefficients[0] = normaliser
    if grad_logprobs is not None:
        coefficients[1] = grad_logprobs * -inverse_temperature
        coefficients[3] = (grad_logprobs * inverse_temperature).masked_fill_(targets < 0, 0.0)
    if grad_entropy is not None:
        coefficients[2] = grad_entropy * -inverse_temperature
        coefficients[1].addcmul_(coefficients[2], entropy)
    return coefficients


def chunk_gradient_(
    logits: Tensor, targets: Tensor, inverse_temperature: float, coefficients: Tensor, with_entropy: bool
) -> None:
    """Overwrite `logits` [n, v] by their gradient, given `gradient_coefficients` [4, n].

    `targets` [n] are columns, or -1. Without `with_entropy` the slope is taken as 0.
    """
    kernels = _kernels_for(logits)
    if kernels is not None:
        kernels.chunk_gradient_(logits, targets, inverse_temperature, coefficients, with_entropy)
        return
    columns = targets.clamp(min=0)[:, None]
    normaliser, constant, slope, on_target = coefficients[:, :, None]
    for block in _blocks(logits):
        gradient = _scaled_(logits[block], inverse_temperature).sub_(normaliser[block])
        if with_entropy:
            probabilities = gradient.exp()
            gradient.mul_(slope[block]).add_(constant[block]).mul_(probabilities)
        else:
            gradient.exp_().mul_(constant[block])
        gradient.scatter_add_(1, columns[block], on_target[block])
        if gradient.dtype is not logits.dtype:
            logits[block] = gradient


class MoreTokens:
    """Of N positions the logits of k more tokens, kept before a chunk's arithmetic destroys them: of given ones,
    `others` [N, k], or else of the `top_k` most probable ones. Without both k is 0.

    Given ids that no rank has, -1 or beyond the vocabulary, have probability 0: log-prob LOWEST, without a gradient.
    """

    def __init__(self, others: Tensor | None, top_k: int, vocab: VocabSlice, statistics: Tensor) -> None:
        num_positions = statistics.shape[1]
        if others is not None and (others.dim() != 2 or len(others) != num_positions):
            raise ValueError(f"others {tuple(others.shape)} must be [N, k] with N = {num_positions}")
        if top_k > vocab.size:
            raise ValueError(f"top_k={top_k} is more than the {vocab.size} tokens of the vocabulary")
        self._vocab, self._is_given = vocab, others is not None
        ids = statistics.new_full((num_positions, top_k), -1, dtype=torch.int64) if others is None else others
        self.columns = vocab.local(ids)
        self._is_nowhere = (ids < 0) | (ids >= vocab.size)
        self._logits = statistics.new_full(ids.shape, 0.0 if self._is_given else -torch.inf)
        self._size = ids.shape[1]

    def take(self, logits: Tensor, chunk: slice, inverse_temperature: float) -> None:
        """Keep those of the positions `chunk`, whose `logits` [n, v] are given."""
        if self._is_given and self._size:
            columns = self.columns[chunk]
            found = logits.gather(1, columns.clamp(min=0)).to(self._logits.dtype)
            self._logits[chunk] = found.mul_(inverse_temperature).masked_fill_(columns < 0, 0.0)
        elif self._size:
            highest, columns = logits.topk(min(self._size, logits.shape[1]), -1)
            self._logits[chunk, : highest.shape[1]] = highest.to(self._logits.dtype) * inverse_temperature
            self.columns[chunk, : highest.shape[1]] = columns

    def logprobs(self, normaliser: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        """Log-probs [N, k] in nats, of the most probable tokens from the highest on and with their ids [N, k] as
        numbers of the same dtype; nothing where k is 0. Collective over the tensor-parallel group, once."""
        if not self._size:
            return ()
        logits, self._logits = self._logits, self._logits[:0]
        has_others = dist.get_world_size(group) > 1 and len(normaliser) > 0
        if self._is_given:
            if has_others:
                dist.all_reduce(logits, group=group)
            return ((logits - normaliser[:, None]).masked_fill_(self._is_nowhere, LOWEST),)
        ids = (self.columns + self._vocab.first).to(logits.dtype)
        if has_others:
            own = torch.stack([logits, ids])
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own, group=group)
            candidates, of_candidates = torch.cat(parts, -1)
            logits, places = candidates.topk(self._size, -1)
            ids = of_candidates.gather(1, places)
        return logits - normaliser[:, None], ids

    def shares(self, grad_logprobs: Tensor | None, inverse_temperature: float) -> Tensor | None:
        """What given tokens' columns get of the gradient of their log-probs [N, k]; minus their sum is what the
        constant of `gradient_coefficients` gets."""
        if grad_logprobs is None or not self._is_given:
            return None
        return (grad_logprobs * inverse_temperature).masked_fill_(self._is_nowhere, 0.0)


def add_at_columns_(gradient: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add values [n, k] to a chunk's gradient [n, v] at columns [n, k], or -1 where another rank owns them."""
    gradient.scatter_add_(1, columns.clamp(min=0), values.masked_fill(columns < 0, 0.0).to(gradient.dtype))


def _kernels_for(logits: Tensor) -> ModuleType | None:
    if not logits.is_cuda or logits.dtype is torch.float64:
        return None
    # Imported where it is used, because importing Triton takes time that a CPU process need not spend.
    from dapo_mega.megatron import logprob_kernels

    return logprob_kernels if logprob_kernels.IS_AVAILABLE else None


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows whose float32 copy is within BLOCK_BYTES."""
    num_rows = max(1, BLOCK_BYTES[logits.device.type] // (4 * logits.shape[1]))
    return (slice(i, i + num_rows) for i in range(0, logits.shape[0], num_rows))


def _scaled_(logits: Tensor, inverse_temperature: float) -> Tensor:
    """logits * inverse_temperature in the compute dtype; in place when that is the dtype of `logits`."""
    scaled = logits.to(compute_dtype(logits.dtype))
    return scaled if inverse_temperature == 1.0 else scaled.mul_(inverse_temperature)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        inverse_temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup,
        with_entropy: bool,
        others: Tensor | None,
        top_k: int,
    ) -> tuple[Tensor, ...]:
        vocab = VocabSlice.of_rank(logits.shape[-1], vocab_size, group)
        local = vocab.local(targets)
        statistics = empty_statistics(len(rows), logits)
        more = MoreTokens(others, top_k, vocab, statistics)
        for chunk in _chunks(rows, vocab):
            chosen = logits.index_select(0, rows[chunk])[:, : vocab.num_valid]
            more.take(chosen, chunk, inverse_temperature)
            chunk_statistics_(chosen, local[chunk], inverse_temperature, statistics[:, chunk], with_entropy)
        logprobs, entropy, normaliser = combined_statistics(statistics, local, group, with_entropy)
        ctx.save_for_backward(logits, rows, local, normaliser, entropy)
        ctx.settings, ctx.more = (vocab, inverse_temperature, with_entropy), more
        ctx.set_materialize_grads(False)
        return logprobs, entropy, *more.logprobs(normaliser, group)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *grads_of_more: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, rows, local, normaliser, entropy = ctx.saved_tensors
        vocab, inverse_temperature, with_entropy = ctx.settings
        has_slope = with_entropy and grad_entropy is not None
        coefficients = gradient_coefficients(
            local, inverse_temperature, normaliser, entropy, grad_logprobs, grad_entropy if has_slope else None
        )
        shares = ctx.more.shares(next(iter(grads_of_more), None), inverse_temperature)
        if shares is not None:
            coefficients[1] -= shares.sum(-1)
        grad_logits = torch.zeros_like(logits)
        for chunk in _chunks(rows, vocab):
            chosen = logits.index_select(0, rows[chunk])[:, : vocab.num_valid]
            chunk_gradient_(chosen, local[chunk], inverse_temperature, coefficients[:, chunk], has_slope)
            if shares is not None:
                add_at_columns_(chosen, ctx.more.columns[chunk], shares[chunk])
            grad_logits[:, : vocab.num_valid].index_copy_(0, rows[chunk], chosen)
        return grad_logits, *[None] * 8


def _chunks(rows: Tensor, vocab: VocabSlice) -> list[slice]:
    """Slices of CHUNK_POSITIONS positions; none when this rank's slice is padding only."""
    starts = range(0, len(rows), CHUNK_POSITIONS) if vocab.num_valid > 0 else ()
    return [slice(i, i + CHUNK_POSITIONS) for i in starts]
