"""Log-probabilities and entropy of chosen tokens from vocabulary-parallel logits, a chunk of positions at a time.

Logits stay in the model's dtype; float32 copies exist for one chunk only, forward and backward, so the extra
memory is chunk x vocabulary / tensor-parallel size instead of positions x vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_POSITIONS = 1024


def vocab_parallel_logprobs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N] float32, in nats, of `targets` [N] at positions `rows` [N] of `logits`.

    `logits` [T, V / tp] are this rank's slice of the padded vocabulary; columns from `vocab_size` on are padding
    and have probability 0. The distribution is softmax(logits / temperature). Both results carry gradients;
    without `with_entropy` the entropies are zeros.
    """
    if rows.shape != targets.shape:
        raise ValueError(f"rows {tuple(rows.shape)} and targets {tuple(targets.shape)} must have one shape [N]")
    outputs: tuple[Tensor, Tensor] = _VocabParallelLogProbs.apply(
        logits, rows, targets, 1.0 / temperature, vocab_size, group, with_entropy
    )
    return outputs


def _scaled_chunk(logits: Tensor, rows: Tensor, inverse_temperature: float, num_valid: int) -> Tensor:
    """float32 [n, V / tp]: chosen rows of logits / temperature with padding columns at -inf."""
    scaled = logits.index_select(0, rows).float().mul_(inverse_temperature)
    scaled[:, num_valid:] = -torch.inf
    return scaled


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
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        first = dist.get_rank(group) * width
        num_valid = max(0, min(width, vocab_size - first))
        local = targets - first
        is_mine = (local >= 0) & (local < num_valid)
        local = local.clamp(0, width - 1)
        # Per position: sum of exp, sum of exp * logit, target logit; relative to the maximum over all ranks.
        sums = torch.zeros(3, len(rows), dtype=torch.float32, device=logits.device)
        maximum = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
        chunks = [slice(i, i + CHUNK_POSITIONS) for i in range(0, len(rows), CHUNK_POSITIONS)]
        parallel = dist.get_world_size(group) > 1
        for chunk in chunks:
            scaled = _scaled_chunk(logits, rows[chunk], inverse_temperature, num_valid)
            peak = scaled.amax(-1)
            if parallel:
                dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
            maximum[chunk] = peak
            scaled.sub_(peak[:, None])
            sums[2, chunk] = torch.where(is_mine[chunk], scaled.gather(1, local[chunk, None])[:, 0], 0.0)
            weights = scaled.exp()
            sums[0, chunk] = weights.sum(-1)
            if with_entropy:
                # 0 * -inf of padding columns must count as 0.
                sums[1, chunk] = weights.mul_(scaled.clamp_(min=-1e30)).sum(-1)
        if parallel:
            dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        logprobs = sums[2] - log_total
        entropy = log_total - sums[1] / sums[0] if with_entropy else torch.zeros_like(logprobs)
        ctx.save_for_backward(logits, rows, local, is_mine, maximum + log_total, entropy)
        ctx.settings = (inverse_temperature, num_valid, with_entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = gradients
        logits, rows, local, is_mine, log_normaliser, entropy = ctx.saved_tensors
        inverse_temperature, num_valid, with_entropy = ctx.settings
        grad_logits = torch.zeros_like(logits)
        for i in range(0, len(rows), CHUNK_POSITIONS):
            chunk = slice(i, i + CHUNK_POSITIONS)
            # log p, then p; d logp_target = onehot - p; d entropy = -p (log p + entropy).
            logp = _scaled_chunk(logits, rows[chunk], inverse_temperature, num_valid).sub_(log_normaliser[chunk, None])
            probabilities = logp.exp()
            coefficient = grad_logprobs[chunk, None].expand_as(probabilities)
            if with_entropy:
                surprise = logp.clamp_(min=-1e30).add_(entropy[chunk, None])
                coefficient = surprise.mul_(grad_entropy[chunk, None]).add_(coefficient)
            gradient = probabilities.mul_(coefficient).neg_()
            gradient.scatter_add_(
                1, local[chunk, None], torch.where(is_mine[chunk], grad_logprobs[chunk], 0.0)[:, None]
            )
            grad_logits.index_copy_(0, rows[chunk], gradient.mul_(inverse_temperature).to(logits.dtype))
        return grad_logits, None, None, None, None, None, None
