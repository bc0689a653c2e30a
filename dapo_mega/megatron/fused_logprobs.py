"""Log-probabilities and entropy from hidden states: the output layer and its softmax, fused.

The logits of one chunk of positions at a time are computed and reduced to four numbers per position. The backward pass
computes the chunk's logits again and turns them into gradients in place. Memory is one chunk of logits and a few
vectors over positions; the price is one more matrix product. The idea is from Cut Cross-Entropy (Wijmans et al., 2024,
arXiv:2411.09009) and of Liger Kernel's fused linear cross-entropy, here vocabulary-parallel and with entropies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dapo_mega.megatron.logprobs import (
    MoreTokens,
    VocabSlice,
    add_at_columns_,
    chunk_gradient_,
    chunk_statistics_,
    combined_statistics,
    compute_dtype,
    empty_statistics,
    gradient_coefficients,
)

# A chunk's logits, counted as float32. Larger chunks make better matrix products and add to the weight's gradient
# less often: a GPU needs about a thousand positions of a vocabulary of 150 thousand, a CPU a hundred.
CHUNK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
MIN_CHUNK_POSITIONS = 16
# With more rows matrix products do not get faster, and a small vocabulary's chunk should stay in cache.
MAX_CHUNK_POSITIONS = 4096
# On a GPU rows of logits begin at multiples of this many elements, as matrix products need them.
CUDA_ROW_ALIGNMENT = 64
# Partial products in the model's dtype on their way into a float32 gradient, where no GPU adds them as it multiplies.
PARTIAL_BYTES = 1 << 26


class _Settings(NamedTuple):
    vocab: VocabSlice
    inverse_temperature: float
    with_entropy: bool
    chunk_positions: int
    accumulate_into_main_grad: bool
    top_k: int


def output_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    with_entropy: bool = True,
    chunk_positions: int | None = None,
    accumulate_into_main_grad: bool = False,
    others: Tensor | None = None,
    top_k: int = 0,
) -> tuple[Tensor, ...]:
    """Log-probs and entropies [N] float32, in nats, of `targets` [N] under softmax(hidden @ weight.T / temperature).

    `hidden` [N, h] is the same on all ranks of the tensor-parallel `group`; `weight` [V / tp, h], of the same dtype,
    is this rank's slice of the padded vocabulary, whose entries from `vocab_size` on have probability 0. Both
    results carry gradients; without `with_entropy` the entropies are zeros. (float64 inputs give float64 results.)
    `others` [N, k], ids of more tokens, or `top_k` add what `MoreTokens.logprobs` returns.

    The gradient of `hidden` is this rank's part only: the caller sums it over the group. That of `weight` is summed
    over chunks in float32; with `accumulate_into_main_grad` it is added to Megatron's `weight.main_grad` as
    Megatron's own fused linear layer does it. `chunk_positions` defaults to what CHUNK_BYTES allows.
    """
    _check_inputs(hidden, weight, targets)
    accumulate = accumulate_into_main_grad and weight.requires_grad and torch.is_grad_enabled()
    if accumulate:
        _check_main_grad(weight)
    vocab = VocabSlice.of_rank(weight.shape[0], vocab_size, group)
    positions = chunk_positions or _default_chunk_positions(vocab.num_valid, hidden.device)
    settings = _Settings(vocab, 1.0 / temperature, with_entropy, positions, accumulate, top_k)
    outputs: tuple[Tensor, ...] = _OutputLogProbs.apply(hidden, weight, targets, others, settings, group)
    return outputs


def _check_inputs(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} must be [N, h] and weight {tuple(weight.shape)} [V / tp, h]")
    if hidden.dtype is not weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight is {weight.dtype}; convert one of them")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {tuple(targets.shape)} must be [N] = {tuple(hidden.shape[:1])}")


def _check_main_grad(weight: Tensor) -> None:
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or main_grad.dtype is not compute_dtype(weight.dtype) or main_grad.shape != weight.shape:
        found = "none" if main_grad is None else f"{main_grad.dtype} {tuple(main_grad.shape)}"
        raise ValueError(
            f"accumulate_into_main_grad needs weight.main_grad {compute_dtype(weight.dtype)} {tuple(weight.shape)}, "
            f"found {found}; wrap the model in Megatron's DistributedDataParallel with grad_reduce_in_fp32"
        )


def _default_chunk_positions(num_valid: int, device: torch.device) -> int:
    affordable = CHUNK_BYTES[device.type] // (4 * max(1, num_valid))
    return min(max(MIN_CHUNK_POSITIONS, affordable), MAX_CHUNK_POSITIONS)


class _OutputLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        others: Tensor | None,
        settings: _Settings,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, ...]:
        scale = settings.inverse_temperature
        local = settings.vocab.local(targets)
        statistics = empty_statistics(len(targets), hidden)
        logits = _ChunkedLogits(hidden, weight, settings)
        more = MoreTokens(others, settings.top_k, settings.vocab, statistics)
        for chunk in logits.chunks:
            of_chunk = logits.compute(chunk)
            more.take(of_chunk, chunk, scale)
            chunk_statistics_(of_chunk, local[chunk], scale, statistics[:, chunk], settings.with_entropy)
        logprobs, entropy, normaliser = combined_statistics(statistics, local, group, settings.with_entropy)
        ctx.save_for_backward(hidden, weight, local, normaliser, entropy)
        ctx.settings, ctx.more = settings, more
        ctx.set_materialize_grads(False)
        return logprobs, entropy, *more.logprobs(normaliser, group)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *grads_of_more: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, local, normaliser, entropy = ctx.saved_tensors
        settings: _Settings = ctx.settings
        scale = settings.inverse_temperature
        if not settings.with_entropy:
            grad_entropy = None
        coefficients = gradient_coefficients(local, scale, normaliser, entropy, grad_logprobs, grad_entropy)
        shares = ctx.more.shares(next(iter(grads_of_more), None), scale)
        if shares is not None:
            coefficients[1] -= shares.sum(-1)
        logits = _ChunkedLogits(hidden, weight, settings)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        # A rank whose slice is padding only has no chunks to fill its gradient.
        new_like = torch.empty_like if logits.chunks else torch.zeros_like
        grad_hidden = new_like(hidden) if needs_hidden else None
        total = _weight_gradient_buffer(weight, settings, len(logits.chunks)) if needs_weight else None
        for chunk in logits.chunks:
            gradient = logits.compute(chunk)
            chunk_gradient_(gradient, local[chunk], scale, coefficients[:, chunk], grad_entropy is not None)
            if shares is not None:
                add_at_columns_(gradient, ctx.more.columns[chunk], shares[chunk])
            if grad_hidden is not None:
                torch.mm(gradient, logits.weight, out=grad_hidden[chunk])
            if total is not None:
                _add_product(total[: settings.vocab.num_valid], gradient, hidden[chunk])
        grad_weight = None if total is None else _returned_weight_gradient(weight, total, settings)
        return grad_hidden, grad_weight, *[None] * 4


class _ChunkedLogits:
    """Logits of one chunk of positions at a time, all in one buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, settings: _Settings) -> None:
        num_valid, size = settings.vocab.num_valid, min(settings.chunk_positions, len(hidden))
        self.hidden = hidden
        self.weight = weight[:num_valid]
        self.chunks = [slice(i, i + size) for i in range(0, len(hidden), size)] if num_valid and size else []
        alignment = CUDA_ROW_ALIGNMENT if hidden.is_cuda else 1
        row_size = -(-num_valid // alignment) * alignment
        self._buffer = hidden.new_empty(size if self.chunks else 0, row_size)[:, :num_valid]

    def compute(self, chunk: slice) -> Tensor:
        """[n, num_valid] in the dtype of `hidden`, valid until the next call."""
        hidden = self.hidden[chunk]
        return torch.mm(hidden, self.weight.t(), out=self._buffer[: len(hidden)])


def _weight_gradient_buffer(weight: Tensor, settings: _Settings, num_chunks: int) -> Tensor:
    """The buffer [V / tp, h] to which chunks add their gradients: float32, unless there is one chunk only."""
    if settings.accumulate_into_main_grad:
        buffer: Tensor = weight.main_grad  # type: ignore[attr-defined]
        return buffer
    return torch.zeros_like(weight, dtype=compute_dtype(weight.dtype) if num_chunks > 1 else weight.dtype)


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """total [v, h] += gradient [n, v].T @ hidden [n, h]."""
    if total.dtype is hidden.dtype:
        total.addmm_(gradient.t(), hidden)
        return
    if hidden.is_cuda:
        # Only CUDA multiplies bf16 into float32, and adds it there without a copy of the product.
        torch.addmm(total, gradient.t(), hidden, out_dtype=total.dtype, out=total)
        return
    num_rows = max(1, PARTIAL_BYTES // (4 * hidden.shape[1]))
    for part in (slice(i, i + num_rows) for i in range(0, len(total), num_rows)):
        total[part].add_(torch.mm(gradient[:, part].t(), hidden))  # Each chunk's part is rounded once.


def _returned_weight_gradient(weight: Any, total: Tensor, settings: _Settings) -> Tensor | None:
    """The gradient for autograd, or the placeholder that Megatron expects once main_grad has the gradient.

    Follows megatron.core.tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication: DDP's hook skips
    the stand-in's values, except where the embedding shares the weight (`zero_out_wgrad`), which then adds its
    gradient to zeros.
    """
    if not settings.accumulate_into_main_grad:
        return total.to(weight.dtype)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
