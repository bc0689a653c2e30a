"""FP8 casts of Transformer Engine's extension in plain PyTorch: per tensor with a given scale (delayed), per tensor
with the scale of the tensor itself (current), and per 1x128 or 128x128 block.

The casts are those of the device: values times a float32 scale, saturated, rounded to the nearest even by torch's own
conversion to float8. Only a device's fused kernels may see a float32 value where this sees one rounded to bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .enums import DType, Float8BlockScaleTensorFormat

FP8_TYPES = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
TORCH_TYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    **FP8_TYPES,
}
BLOCK = 128
_LARGEST = torch.finfo(torch.float32).max


def largest(dtype: DType) -> float:
    return float(torch.finfo(FP8_TYPES[dtype]).max)


def to_fp8(wide: Tensor, dtype: DType) -> Tensor:
    """Bytes of `wide` saturated and rounded to FP8; what is not a number stays so."""
    limit = largest(dtype)
    return wide.clamp(-limit, limit).to(FP8_TYPES[dtype]).view(torch.uint8)


def from_fp8(data: Tensor, dtype: DType) -> Tensor:
    return data.view(torch.uint8).view(FP8_TYPES[dtype]).float()


def scale_from_amax(amax: Tensor, limit: float, power_of_2: bool, epsilon: float) -> Tensor:
    """limit / amax, 1 where that says nothing; optionally rounded down to a power of 2."""
    amax = amax.float()
    amax = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    scale = limit / amax
    scale = torch.where(scale.isinf(), torch.full_like(scale, _LARGEST), scale)
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax == 0) | ~amax.isfinite(), torch.ones_like(scale), scale)


def transposed(data: Tensor) -> Tensor:
    """[..., K] seen as [M, K], transposed to [K, ...]."""
    return data.view(-1, data.shape[-1]).t().contiguous().view(data.shape[-1], *data.shape[:-1])


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """`tensor` as the quantizer wants it, in a new tensor or in `output`."""
    if quantizer is None:
        return tensor
    tensor = tensor.contiguous()
    if output is None:
        output = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype, tensor.device)
    elif noop is not None and float(noop) == 1.0:
        return output
    kind = type(quantizer).__name__
    if kind == "Float8BlockQuantizer":
        _quantize_blocks(tensor, quantizer, output)
        return output
    if kind == "Float8Quantizer":
        if quantizer.amax.numel():
            quantizer.amax.copy_(_amax(tensor))
        scale = quantizer.scale
    elif kind == "Float8CurrentScalingQuantizer":
        amax = _amax(tensor).view(1)
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(
                amax, op=torch.distributed.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group()
            )
        scale = scale_from_amax(amax, largest(quantizer.dtype), quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    else:
        raise NotImplementedError(f"transformer_engine_torch.quantize with {kind}")
    data = to_fp8(tensor.float() * scale, quantizer.dtype)
    _set(output, "_data", data if quantizer.rowwise_usage else None)
    _set(output, "_transpose", transposed(data) if quantizer.columnwise_usage else None)
    output._transpose_invalid = not quantizer.columnwise_usage
    output._fp8_dtype = quantizer.dtype
    output._scale_inv.copy_((1.0 / scale).view_as(output._scale_inv))
    return output


def _amax(tensor: Tensor) -> Tensor:
    return tensor.abs().max().float() if tensor.numel() else torch.zeros((), device=tensor.device)


def _set(output: Any, name: str, data: Tensor | None) -> None:
    """In place where there is a tensor: fp8 parameters are views of Megatron's buffers."""
    existing = getattr(output, name)
    if data is not None and existing is not None and existing.shape == data.shape:
        existing.view(torch.uint8).copy_(data)
    else:
        setattr(output, name, data)


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool = False
) -> Any:
    """A tensor of this shape whose values are to be written."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
        Float8BlockwiseQTensorStorage,
    )
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    if type(quantizer).__name__ == "Float8BlockQuantizer":
        has = {False: quantizer.rowwise_usage, True: quantizer.columnwise_usage}
        shapes = {False: tuple(shape), True: tuple(quantizer.get_columnwise_shape(shape))}
        data = {
            side: torch.empty(shapes[side], dtype=torch.uint8, device=device) if has[side] else None for side in has
        }
        scales = {
            side: torch.zeros(quantizer.get_scale_shape(shape, side), device=device) if has[side] else None
            for side in has
        }
        arguments = {
            "rowwise_data": data[False],
            "columnwise_data": data[True],
            "rowwise_scale_inv": scales[False],
            "columnwise_scale_inv": scales[True],
            "fp8_dtype": quantizer.dtype,
            "quantizer": quantizer,
            "is_2D_scaled": quantizer.block_scaling_dim == 2,
        }
        if hasattr(quantizer, "all_gather_usage"):
            compact, ready = Float8BlockScaleTensorFormat.COMPACT, Float8BlockScaleTensorFormat.GEMM_READY
            arguments["data_format"] = compact if quantizer.all_gather_usage else ready
        if quantizer.internal:
            return Float8BlockwiseQTensorStorage(**arguments)
        return Float8BlockwiseQTensor(shape=list(shape), dtype=dtype, **arguments)
    arguments = {
        "data": torch.empty(shape, dtype=torch.uint8, device=device) if quantizer.rowwise_usage else None,
        "data_transpose": torch.empty((shape[-1], *shape[:-1]), dtype=torch.uint8, device=device)
        if quantizer.columnwise_usage
        else None,
        "fp8_scale_inv": torch.empty(1, device=device),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(**arguments)
    return Float8Tensor(shape=list(shape), dtype=dtype, **arguments)


def _tiles(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """[M, K] as [M / rows, rows, K / columns, columns], zeros behind the edges."""
    height, width = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -width % columns, 0, -height % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _scale_of_each(scale: Tensor, rows: int, columns: int, shape: tuple[int, int]) -> Tensor:
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def _quantize_blocks(tensor: Tensor, quantizer: Any, output: Any) -> None:
    matrix = tensor.view(-1, tensor.shape[-1]).float()
    height, width = matrix.shape
    two_d = quantizer.block_scaling_dim == 2
    # As it is gathered from other processes; 2.16 and newer have one form only.
    compact = getattr(quantizer, "all_gather_usage", False)
    for columnwise in (False, True):
        prefix = "_columnwise" if columnwise else "_rowwise"
        if not (quantizer.columnwise_usage if columnwise else quantizer.rowwise_usage):
            setattr(output, f"{prefix}_data", None)
            setattr(output, f"{prefix}_scale_inv", None)
            continue
        rows, columns = (BLOCK, BLOCK) if two_d else (BLOCK, 1) if columnwise else (1, BLOCK)
        amax = _tiles(matrix.abs(), rows, columns).amax((1, 3))
        scale = scale_from_amax(amax, largest(quantizer.dtype), quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        data = to_fp8(matrix * _scale_of_each(scale, rows, columns, (height, width)), quantizer.dtype)
        data = data.view(tensor.shape)
        inverse = 1.0 / scale
        if columnwise and not compact:
            data = transposed(data)
        # As cuBLAS takes them: [blocks of the product's inner dimension, rows], but square blocks the other way round.
        if (two_d and columnwise) or (not two_d and not columnwise and not compact):
            inverse = inverse.t()
        padded = torch.zeros(quantizer.get_scale_shape(tensor.shape, columnwise), device=tensor.device)
        padded[: inverse.shape[0], : inverse.shape[1]] = inverse
        for name, value in ((f"{prefix}_data", data), (f"{prefix}_scale_inv", padded)):
            existing = getattr(output, name)
            if existing is None or existing.shape != value.shape:
                setattr(output, name, value)
            else:
                existing.copy_(value)


def is_block_scaled(tensor: Any) -> bool:
    return hasattr(tensor, "_is_2D_scaled")


def _is_gemm_ready(tensor: Any) -> bool:
    """Whether blocks lie as products take them; always in 2.16 and newer."""
    ready = Float8BlockScaleTensorFormat.GEMM_READY
    return getattr(tensor, "_data_format", ready) == ready  # type: ignore[no-any-return]


def is_quantized(tensor: Any) -> bool:
    return hasattr(tensor, "_fp8_dtype")


def usage(tensor: Any) -> tuple[bool, bool]:
    """Whether a quantized tensor has its data by rows, and transposed."""
    if is_block_scaled(tensor):
        return tensor._rowwise_data is not None, tensor._columnwise_data is not None
    return tensor._data is not None, tensor._transpose is not None and not tensor._transpose_invalid


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of the values, whichever data there is."""
    if not is_quantized(tensor):
        return tuple(tensor.shape)
    by_rows, _ = usage(tensor)
    if is_block_scaled(tensor):
        data = tensor._rowwise_data if by_rows else tensor._columnwise_data
        is_transposed = not by_rows and _is_gemm_ready(tensor)
    else:
        data, is_transposed = (tensor._data, False) if by_rows else (tensor._transpose, True)
    return (*data.shape[1:], data.shape[0]) if is_transposed else tuple(data.shape)


def values(tensor: Any, columnwise: bool = False) -> Tensor:
    """float32 values [M, K] of a tensor, of its transposed data if asked: the two differ in 1x128 blocks."""
    if not is_quantized(tensor):
        return tensor.reshape(-1, tensor.shape[-1]).float()
    if not is_block_scaled(tensor):
        data = tensor._transpose if columnwise else tensor._data
        matrix = from_fp8(data, tensor._fp8_dtype) * tensor._scale_inv
        return matrix.reshape(data.shape[0], -1).t() if columnwise else matrix.reshape(-1, data.shape[-1])
    shape = shape_of(tensor)
    height, width = math.prod(shape[:-1]), shape[-1]
    data = tensor._columnwise_data if columnwise else tensor._rowwise_data
    inverse = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    gemm_ready = _is_gemm_ready(tensor)
    matrix = from_fp8(data, tensor._fp8_dtype)
    matrix = matrix.reshape(width, height).t() if columnwise and gemm_ready else matrix.reshape(height, width)
    if tensor._is_2D_scaled:
        rows, columns = BLOCK, BLOCK
        inverse = inverse.t() if columnwise else inverse
    elif columnwise:
        rows, columns = BLOCK, 1
    else:
        rows, columns = 1, BLOCK
        inverse = inverse.t() if gemm_ready else inverse
    return matrix * inverse.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:height, :width]


def dequantize(tensor: Any, otype: DType) -> Tensor:
    by_rows, _ = usage(tensor)
    return values(tensor, columnwise=not by_rows).reshape(shape_of(tensor)).to(TORCH_TYPES[otype])
