"""Triton kernels of the two operations on a chunk of logits: statistics in one pass, gradient in one pass in place.

`logprobs.chunk_statistics_` and `logprobs.chunk_gradient_` are the reference implementations. The module can be
imported without Triton; `IS_AVAILABLE` is then False. With TRITON_INTERPRET=1 in the environment before the import, the
kernels run on CPU tensors through Triton's interpreter.
"""

from __future__ import annotations

from torch import Tensor

try:
    import triton
    import triton.language as tl

    IS_AVAILABLE = True
except ImportError:
    IS_AVAILABLE = False

STATISTICS_BLOCK = 4096
GRADIENT_BLOCK = 2048
NUM_WARPS = 8
# Triton compiles another kernel for arguments that this divides.
DIVISOR = 16


def chunk_statistics(
    logits: Tensor, targets: Tensor, inverse_temperature: float, statistics: Tensor, with_entropy: bool
) -> None:
    """Write peak, total, weighted and target logit into `statistics` [4, n] float32; `logits` [n, v] stay.

    Rows of `logits` (bf16, fp16 or float32) may be further apart than v; `targets` [n] are columns or -1.
    """
    _check_layout(logits, targets, statistics)
    _statistics_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        targets,
        statistics,
        statistics.stride(0),
        logits.shape[1],
        _whole_vectors(logits),
        inverse_temperature,
        WITH_ENTROPY=with_entropy,
        BLOCK=STATISTICS_BLOCK,
        num_warps=NUM_WARPS,
    )


def chunk_gradient_(
    logits: Tensor, targets: Tensor, inverse_temperature: float, coefficients: Tensor, with_entropy: bool
) -> None:
    """Overwrite `logits` [n, v] by their gradient from `coefficients` [4, n] float32."""
    _check_layout(logits, targets, coefficients)
    num_rows, width = logits.shape
    _gradient_kernel[(num_rows, triton.cdiv(width, GRADIENT_BLOCK))](
        logits,
        logits.stride(0),
        targets,
        coefficients,
        coefficients.stride(0),
        width,
        _whole_vectors(logits),
        inverse_temperature,
        WITH_ENTROPY=with_entropy,
        BLOCK=GRADIENT_BLOCK,
        num_warps=NUM_WARPS,
    )


def _whole_vectors(logits: Tensor) -> int:
    """Columns of `logits` up to a whole number of vectors, where each row's memory has so many; otherwise the width.

    Triton takes an argument that 16 divides for one whose masks end between loads of 128 bits.
    """
    width, row_stride = logits.shape[1], logits.stride(0)
    rounded = -(-width // DIVISOR) * DIVISOR
    first = logits.storage_offset() % row_stride if row_stride else 0
    return rounded if first + rounded <= row_stride else width


def _check_layout(logits: Tensor, targets: Tensor, vectors: Tensor) -> None:
    assert logits.stride(1) == 1
    assert targets.is_contiguous()
    assert vectors.stride(1) == 1 or vectors.shape[1] == 1


if IS_AVAILABLE:

    @triton.jit
    def _statistics_kernel(
        logits: tl.tensor,
        row_stride: int,
        targets: tl.tensor,
        statistics: tl.tensor,
        statistics_stride: int,
        width: int,
        readable: int,
        inverse_temperature: float,
        WITH_ENTROPY: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        # One program a row: softmax online over blocks of columns (Milakov and Gimelshein, 2018, algorithm 3).
        row = tl.program_id(0).to(tl.int64)
        start = logits + row * row_stride
        # Below any logit; that times exp of it is 0, where the product of 0 and -inf would not be.
        lowest = -1e30
        peak = lowest
        total = 0.0
        weighted = 0.0
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            loaded = tl.load(start + columns, mask=columns < readable, other=0.0)
            scaled = tl.where(columns < width, loaded.to(tl.float32) * inverse_temperature, lowest)
            new_peak = tl.maximum(peak, tl.max(scaled, axis=0))
            centred = scaled - new_peak
            exponentials = tl.exp(centred)
            shift = peak - new_peak
            rescale = tl.exp(shift)
            if WITH_ENTROPY:
                weighted = (weighted + total * shift) * rescale + tl.sum(exponentials * centred, axis=0)
            total = total * rescale + tl.sum(exponentials, axis=0)
            peak = new_peak
        target = tl.load(targets + row)
        target_logit = tl.load(start + target, mask=target >= 0, other=0.0).to(tl.float32) * inverse_temperature
        tl.store(statistics + row, peak)
        tl.store(statistics + statistics_stride + row, total)
        if WITH_ENTROPY:
            tl.store(statistics + 2 * statistics_stride + row, weighted)
        tl.store(statistics + 3 * statistics_stride + row, tl.where(target >= 0, target_logit - peak, 0.0))

    @triton.jit
    def _gradient_kernel(
        logits: tl.tensor,
        row_stride: int,
        targets: tl.tensor,
        coefficients: tl.tensor,
        coefficients_stride: int,
        width: int,
        readable: int,
        inverse_temperature: float,
        WITH_ENTROPY: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_readable = columns < readable
        places = logits + row * row_stride + columns
        normaliser = tl.load(coefficients + row)
        constant = tl.load(coefficients + coefficients_stride + row)
        on_target = tl.load(coefficients + 3 * coefficients_stride + row)
        loaded = tl.load(places, mask=is_readable, other=0.0)
        logp = loaded.to(tl.float32) * inverse_temperature - normaliser
        factor = constant
        if WITH_ENTROPY:
            factor = constant + tl.load(coefficients + 2 * coefficients_stride + row) * logp
        gradient = tl.exp(logp) * factor
        gradient += tl.where(columns == tl.load(targets + row), on_target, 0.0)
        # What lies beyond the width is written as it was.
        written = tl.where(columns < width, gradient.to(places.dtype.element_ty), loaded)
        tl.store(places, written, mask=is_readable)
