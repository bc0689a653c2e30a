"""Quantises weights for SGLang's FP8 engines: float8_e4m3fn with one float32 scale per block of 128 x 128.

An FP8 engine serves a checkpoint with `weight_block_size: [128, 128]` in its quantization_config. It must get weights
in this form: it would cast bf16 tensors to float8 and keep the scales of the old weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from dapo_mega.types import WeightBucket, WeightSpec

BLOCK = 128
# Projections of attention, MLPs and experts; not embeddings, norms, biases, routers or the output layer.
_QUANTISED = re.compile(r"_proj(_with_mqa)?\.weight$")


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [out, in] as float8_e4m3fn [out, in] and scales [ceil(out / 128), ceil(in / 128)] float32.

    In each block, float8 value times scale is the weight to within half a step of float8; the block's largest magnitude
    becomes the largest float8.
    """
    rows, columns = weight.shape
    padded = functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scales = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
    quantised = (blocks / scales).flatten(2, 3).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn)
    return quantised, scales[:, 0, :, 0]


def quantised_bucket(bucket: WeightBucket) -> WeightBucket:
    """The bucket with its projections quantised, and their scales as further tensors."""
    specs: list[WeightSpec] = []
    for spec in bucket.specs:
        if _QUANTISED.search(spec.name):
            scales_shape = tuple(math.ceil(size / BLOCK) for size in spec.shape)
            specs.append(WeightSpec(f"{spec.name}_scale_inv", torch.float32, scales_shape))
            specs.append(replace(spec, dtype=torch.float8_e4m3fn))
        else:
            specs.append(spec)
    # Large elements first, so that every tensor of the flattened bucket is aligned without padding.
    specs.sort(key=lambda spec: spec.dtype.itemsize, reverse=True)
    tensors = None if bucket.tensors is None else _quantised_tensors(bucket, specs)
    return replace(bucket, specs=tuple(specs), tensors=tensors)


def _quantised_tensors(bucket: WeightBucket, specs: Sequence[WeightSpec]) -> Iterator[Tensor]:
    tensors = {}
    for name, tensor in bucket:
        if _QUANTISED.search(name):
            tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensor)
        else:
            tensors[name] = tensor
    for spec in specs:
        yield tensors.pop(spec.name)
