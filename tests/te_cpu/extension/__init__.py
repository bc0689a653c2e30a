"""What Transformer Engine's Python code finds in its compiled extension `transformer_engine_torch`, in plain PyTorch.

Only what the trainer's Transformer Engine path calls is here; every other name raises NotImplementedError. Products of
FP8 values are exact in float32 up to the order of the sums. Where a device would refuse (an operand without the data
that its layout needs, sizes that cuBLAS does not take), so does this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention import (  # noqa: F401
    convert_bshd_to_thd,
    convert_thd_to_bshd,
    fused_attn_bwd,
    fused_attn_fwd,
    fused_rope_backward,
    fused_rope_forward,
    get_fused_attn_backend,
)
from .enums import *  # noqa: F403
from .enums import DType
from .quantization import (
    BLOCK,
    TORCH_TYPES,
    create_empty_quantized_tensor,  # noqa: F401
    dequantize,  # noqa: F401
    is_block_scaled,
    is_quantized,
    largest,
    quantize,
    scale_from_amax,
    shape_of,
    to_fp8,
    transposed,
    usage,
    values,
)
from .ring import (  # noqa: F401
    thd_grad_correction,
    thd_out_correction,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Every name that is not here, as Transformer Engine's modules ask for many when they are imported."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} is not emulated on the CPU")

    refuse.__name__ = name
    return refuse


# Asked for through a star import.
layernorm_fwd, layernorm_bwd = map(__getattr__, ("layernorm_fwd", "layernorm_bwd"))


class FP8TensorMeta:
    scale: Tensor
    scale_inv: Tensor
    amax_history: Tensor


class CommOverlapHelper: ...


class CommOverlapCore: ...


class CommOverlapBase(CommOverlapCore): ...


class CommOverlapP2PBase(CommOverlapCore): ...


class CommOverlap(CommOverlapBase): ...


class CommOverlapP2P(CommOverlapP2PBase): ...


def get_cublasLt_version() -> int:
    return 130100


def get_cudnn_version() -> int:
    return 91800


def get_num_cublas_streams() -> int:
    return 4


def device_supports_multicast(device_id: int = -1) -> bool:
    return False


def ubuf_built_with_mpi() -> bool:
    return False


# Casts


def multi_tensor_quantize(tensors: list[Tensor], quantizers: list[Any]) -> list[Any]:
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensors, quantizers, strict=True)]


def split_quantize(
    tensor: Tensor, sections: list[int], quantizers: list[Any], *, disable_bulk_allocation: bool = False
) -> list[Any]:
    assert sum(sections) == tensor.shape[0], f"sections {sections} of {tuple(tensor.shape)}"
    return multi_tensor_quantize(list(tensor.split(sections)), quantizers)


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> list[Any]:
    return [gradient.flatten(0, -2).float().sum(0).to(gradient.dtype), quantize(gradient, quantizer)]


def fp8_transpose(data: Tensor, dtype: DType, *, out: Tensor | None = None) -> Tensor:
    result = transposed(data)
    if out is None:
        return result
    return out.copy_(result)


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    amax.copy_(tensor.abs().max())


# Products


def _matrix(operand: Any, by_rows: bool, name: str) -> Tensor:
    """float32 [M, K] of one operand. FP8 products of Hopper take both operands with the inner dimension contiguous."""
    if not is_quantized(operand):
        return values(operand)
    has_rows, has_columns = usage(operand)
    if not (has_rows if by_rows else has_columns):
        raise RuntimeError(f"Input {name} is missing {'row' if by_rows else 'column'}-wise usage")
    matrix = values(operand, columnwise=not by_rows)
    inner = matrix.shape[1] if by_rows else matrix.shape[0]
    if inner % 16:
        raise RuntimeError(f"Leading dimension requirement on {name} for FP8 GEMM ({inner}). Caller must pad.")
    return matrix


def _multiply(a: Any, transa: bool, b: Any, transb: bool) -> Tensor:
    """cuBLAS counts columns first: the product of row-major matrices is b a, each transposed as asked."""
    matrix_a, matrix_b = _matrix(a, transa, "A"), _matrix(b, not transb, "B")
    if is_block_scaled(a) or is_block_scaled(b):
        if not (is_block_scaled(a) and is_block_scaled(b)) or (a._is_2D_scaled and b._is_2D_scaled):
            raise RuntimeError("Inputs A and B to GEMM need to have compatible scaling modes")
        outer_a = matrix_a.shape[0] if transa else matrix_a.shape[1]
        outer_b = matrix_b.shape[1] if transb else matrix_b.shape[0]
        if outer_a % 8 or (not b._is_2D_scaled and outer_b % 8):
            raise RuntimeError("Outer dimension requirement for NVTE_BLOCK_SCALING GEMM. Caller must pad.")
    elif is_quantized(a) != is_quantized(b):
        raise RuntimeError("FP8 products take FP8 on both sides")
    left = matrix_b.t() if transb else matrix_b
    return left @ (matrix_a.t() if transa else matrix_a)


def _output_shape(a: Any, transa: bool, b: Any, transb: bool) -> tuple[int, ...]:
    shape_a, shape_b = shape_of(a), shape_of(b)
    outer = (shape_b[-1],) if transb else shape_b[:-1]
    return (*outer, math.prod(shape_a[:-1]) if transa else shape_a[-1])


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: DType | None,
    bias: Tensor | None,
    bias_type: DType,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """[output, gradient of the bias, input of the activation, extra output]."""
    if gelu or comm_overlap is not None or extra_output is not None:
        raise NotImplementedError("transformer_engine_torch.generic_gemm with an activation or overlap")
    if is_quantized(D):
        raise NotImplementedError("transformer_engine_torch.generic_gemm into an FP8 tensor")
    shape = _output_shape(A, transA, B, transB)
    dtype = D.dtype if D is not None else TORCH_TYPES[output_dtype] if output_dtype is not None else A.dtype
    if D is not None and tuple(D.shape) != shape:
        raise RuntimeError(f"GEMM output has invalid dims (expected {shape}, got {tuple(D.shape)})")
    wide = _multiply(A, transA, B, transB).view(shape) * alpha
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = values(B).sum(0).to(dtype)
    elif bias is not None:
        wide = wide + bias.float()
    if D is None:
        D = wide.to(dtype)
    elif accumulate:
        D.copy_(wide + (1.0 if beta is None else beta) * D.float())
    else:
        D.copy_(wide)
    return [quantize(D, quantizer), bias_gradient, None, None]


def te_general_grouped_gemm(
    A: list[Any],
    transa: bool,
    B: list[Any],
    transb: bool,
    D: list[Tensor] | None,
    D_type: DType,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: DType,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor]:
    """One product per expert; with a single output their rows follow each other in D[0]."""
    assert D is not None
    shapes = [_output_shape(a, transa, b, transb) for a, b in zip(A, B, strict=True)]
    outputs = D[0].view(-1, D[0].shape[-1]).split([shape[0] for shape in shapes]) if single_output else D
    for a, b, output, shape, its_bias in zip(A, B, outputs, shapes, bias, strict=True):
        assert tuple(output.shape) == shape
        if 0 in (*shape_of(a), *shape_of(b)):
            if not accumulate:
                output.zero_()
            if grad and its_bias.numel():
                its_bias.zero_()
            continue
        result = _multiply(a, transa, b, transb).view(shape)
        if its_bias.numel() and grad:
            its_bias.copy_(values(b).sum(0))
        elif its_bias.numel():
            result = result + its_bias.float()
        output.copy_(output.float() + result if accumulate else result)
    return bias


# Norms


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """[output, None, 1 / rms]; a delayed scaling sees the norm in float32."""
    wide = input.reshape(-1, input.shape[-1]).float()
    inverse = (wide.square().mean(-1) + eps).rsqrt()
    gamma = weight.float() + (1.0 if zero_centered_gamma else 0.0)
    normed = (wide * inverse[:, None] * gamma).view(input.shape)
    if quantizer is None:
        normed = normed.to(TORCH_TYPES[otype])
        return [normed if ln_out is None else ln_out.copy_(normed), None, inverse]
    fused = type(quantizer).__name__ == "Float8Quantizer"
    result = quantize(normed if fused else normed.to(TORCH_TYPES[otype]), quantizer, ln_out)
    if fused and hasattr(result, "_dtype"):
        result._dtype = TORCH_TYPES[otype]
    return [result, None, inverse]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Gradients of the input and of the weight."""
    wide_dz, normed = dz.reshape(-1, dz.shape[-1]).float(), x.reshape(-1, x.shape[-1]).float() * rsigma[:, None]
    of_normed = wide_dz * (gamma.float() + (1.0 if zero_centered_gamma else 0.0))
    share = (of_normed * normed).mean(-1, keepdim=True)
    of_x = (of_normed - normed * share) * rsigma[:, None]
    return [of_x.to(x.dtype).view(x.shape), (wide_dz * normed).sum(0).to(gamma.dtype)]


# Scales


def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor, histories: list[Tensor], scales: list[Tensor], algorithm: str, dtype: DType, margin: float
) -> None:
    """Delayed scaling: the newest amaxes enter the histories, [length, tensors] each, and make the next scales."""
    limit = largest(dtype) * 2.0**-margin
    for history, scale, newest in zip(histories, scales, reduced.split([len(s) for s in scales]), strict=True):
        last = torch.where(newest != 0, newest, history[0])
        rolled = torch.cat([history[1:], last[None]])
        moves = last != 0
        amax = torch.where(moves, rolled.amax(0), 0.0) if algorithm == "max" else last
        rolled = rolled.clone()
        rolled[0] = 0
        history.copy_(torch.where(moves, rolled, history))
        wanted = torch.where((amax > 0) & amax.isfinite(), limit / amax, scale)
        scale.copy_(wanted.clamp(max=torch.finfo(torch.float32).max))


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int, noop: Tensor, lists: list[list[Tensor]], limit: float, power_of_2: bool, epsilon: float
) -> None:
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(scale_from_amax(amax, limit, power_of_2, epsilon))
        inverse.copy_(1.0 / scale)


def _whole(part: Tensor, height: int, width: int, start: int, fill: float = 0.0) -> Tensor:
    flat = torch.full((height * width,), fill, device=part.device)
    flat[start : start + part.numel()] = part.flatten().float()
    return flat.view(height, width)


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """amaxes of the 128x128 blocks of a matrix of which `tensor` is a flat part."""
    whole = _whole(tensor.abs(), h, w, start_offset)
    padded = torch.nn.functional.pad(whole, (0, -w % BLOCK, 0, -h % BLOCK))
    blocks = padded.view(-(-h // BLOCK), BLOCK, -(-w // BLOCK), BLOCK).amax((1, 3))
    amax[: blocks.shape[0], : blocks.shape[1]] = blocks


def fp8_block_scaling_partial_cast(
    inp: Tensor, out: Tensor, scale: Tensor, h: int, w: int, start_offset: int, block_len: int, out_dtype: DType
) -> None:
    each = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:h, :w]
    data = to_fp8(_whole(inp, h, w, start_offset) * each, out_dtype).view(-1)
    out.copy_(data[start_offset : start_offset + inp.numel()].view(out.shape))


# Rows of experts


def _copy_rows(source: Tensor, target: Tensor, from_rows: list[int], to_rows: list[int]) -> None:
    for old, new in zip(source.split(from_rows), target.split(to_rows), strict=True):
        kept = min(len(old), len(new))
        new[:kept] = old[:kept]
        new[kept:] = 0


def fused_multi_row_padding(input: Tensor, output: Tensor, rows: list[int], padded_rows: list[int]) -> None:
    _copy_rows(input, output, rows, padded_rows)


def fused_multi_row_unpadding(input: Tensor, output: Tensor, rows: list[int], unpadded_rows: list[int]) -> None:
    _copy_rows(input, output, rows, unpadded_rows)


# Optimizer


def multi_tensor_scale(chunk_size: int, noop: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        if not source.isfinite().all():
            noop.fill_(1)
        target.copy_(source * scale)


def multi_tensor_scale_tensor(chunk_size: int, noop: Tensor, lists: list[list[Tensor]], scale: Tensor) -> None:
    multi_tensor_scale(chunk_size, noop, lists, float(scale))


def multi_tensor_l2norm(
    chunk_size: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in lists[0]])
    return torch.linalg.vector_norm(norms).view(1), norms if per_tensor else torch.empty(0)


def multi_tensor_adam(
    chunk_size: int,
    noop: Tensor,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Gradients, parameters, both moments and perhaps float32 parameters; mode 1 decouples the weight decay."""
    assert type(step) is int, "pybind11 takes no float for an int"
    first = 1 - beta1**step if bias_correction else 1.0
    second = 1 - beta2**step if bias_correction else 1.0
    for gradient, parameter, mean, square, *main in zip(*lists, strict=True):
        value = main[0] if main else parameter.float()
        wide = gradient.float()
        if mode == 0:
            wide = wide + weight_decay * value
        mean.mul_(beta1).add_(wide, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
        change = (mean / first) / ((square / second).sqrt() + epsilon)
        if mode == 1:
            change = change + weight_decay * value
        value = value - lr * change
        for target in (parameter, *main):
            target.copy_(value)
