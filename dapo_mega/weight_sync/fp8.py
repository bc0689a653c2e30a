"""Weights as SGLang's FP8 engines hold them: float8_e4m3fn with one float32 scale per block of 128 x 128.

Such an engine serves a checkpoint with `weight_block_size: [128, 128]` in its quantization_config, and takes weights in
no other form: bf16 tensors would be cast into its float8 parameters under the scales of the weights before.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor
from torch.nn import functional

from dapo_mega.types import StageBucket
from dapo_mega.weight_sync.buckets import named_tensors

BLOCK = 128
# Projections of attention and MLPs, experts' included; not embeddings, norms, biases, routers or the output layer.
_QUANTISED = re.compile(r"_proj(_with_mqa)?\.weight$")


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [out, in] as float8_e4m3fn [out, in] and scales [out / 128, in / 128] float32, rounded up.

    Block by block, float8 value times scale is the weight to within half a step of float8; the largest magnitude of a
    block becomes float8's largest.
    """
    rows, columns = weight.shape
    padded = functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scales = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
    quantised = (blocks / scales).flatten(2, 3).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn)
    return quantised, scales[:, 0, :, 0]


def quantised_bucket(bucket: StageBucket) -> StageBucket:
    """The bucket with its projections quantised, each beside its scales, in memory of its own."""
    entries: list[tuple[str, str, tuple[int, ...]]] = []
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        if _QUANTISED.search(name):
            scales_shape = tuple(math.ceil(size / BLOCK) for size in shape)
            entries.append((f"{name}_scale_inv", "float32", scales_shape))
            entries.append((name, "float8_e4m3fn", shape))
        else:
            entries.append((name, dtype, shape))
    # In falling order of the size of an element everything is aligned without padding.
    entries.sort(key=lambda entry: getattr(torch, entry[1]).itemsize, reverse=True)
    names, dtypes, shapes = zip(*entries, strict=True)
    pieces = _quantised_pieces(bucket, names)
    return StageBucket(bucket.stage, names, dtypes, shapes, (len(names),), pieces, bucket.is_last)


def _quantised_pieces(bucket: StageBucket, names: tuple[str, ...]) -> tuple[Tensor, ...] | None:
    if bucket.pieces is None:
        return None
    tensors = {}
    for name, tensor in named_tensors(bucket):
        if _QUANTISED.search(name):
            tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensor)
        else:
            tensors[name] = tensor
    return (torch.cat([tensors[name].contiguous().flatten().view(torch.uint8) for name in names]),)
