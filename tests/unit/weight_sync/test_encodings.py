"""Encoded buckets hold the bytes of their tensors, in chunks that an engine can take apart."""

import math
from dataclasses import replace
from itertools import pairwise

import torch

from dapo_mega.engines.sglang.weight_protocol import ChunkedEncoding, PlannedBucket, split_specs, unpacked
from dapo_mega.types import WeightBucket, WeightSpec

SIZES = {"a": (3, 5), "large": (40, 8), "b": (7,), "c": (20, 8), "d": (1,), "e": (2, 2), "last": (50, 8)}


def tensors_of(sizes=SIZES, dtypes=(torch.float32, torch.bfloat16)):
    random = torch.Generator().manual_seed(0)
    return {
        f"{name}_{dtype}": torch.randn(size, generator=random).to(dtype)
        for dtype in dtypes
        for name, size in sizes.items()
    }


def bucket_of(tensors):
    specs = tuple(WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    return WeightBucket(1, specs, iter(tensors.values()), is_last=True, sender=3)


def test_a_flat_bucket_is_one_run_of_bytes():
    tensors = tensors_of()
    bucket = bucket_of(tensors)
    (chunk,) = ChunkedEncoding(math.inf).encode(bucket)
    got = unpacked(chunk, bucket.specs)
    assert all(torch.equal(tensor, expected) for tensor, expected in zip(got, tensors.values(), strict=True))
    assert ChunkedEncoding(math.inf).planned(bucket) == PlannedBucket(3, bucket.specs, (len(bucket.specs),))


def test_large_tensors_are_chunks_and_small_neighbours_share_one():
    tensors = tensors_of()
    tensors["turned"] = torch.randn(30, 8).t()
    bucket = bucket_of(tensors)
    planned = ChunkedEncoding(600).planned(replace(bucket, tensors=None))
    assert (planned.sender, planned.specs) == (3, bucket.specs)
    lengths = planned.lengths
    # In float32 a, large, b, c, d + e, last; in bfloat16 a, large, b to e, last; turned.
    assert lengths == (1, 1, 1, 1, 2, 1, 1, 1, 4, 1, 1)
    chunks = list(ChunkedEncoding(600).encode(bucket))
    got = {
        spec.name: tensor
        for chunk, specs in zip(chunks, split_specs(bucket.specs, lengths), strict=True)
        for spec, tensor in zip(specs, unpacked(chunk, specs), strict=True)
    }
    assert list(got) == list(tensors)
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    assert chunks[1].data_ptr() == list(tensors.values())[1].data_ptr()  # Alone, and so not copied.


def test_a_chunk_is_made_only_when_it_is_read():
    made = []

    def tensors():
        for name, tensor in values.items():
            made.append(name)
            yield tensor

    values = tensors_of({"first": (20, 8), "second": (20, 8)}, (torch.float32,))
    bucket = bucket_of(values)
    chunks = ChunkedEncoding(600).encode(WeightBucket(0, bucket.specs, tensors(), is_last=False))
    assert [len(made) for _ in chunks] == [1, 2]
    assert all(one != other for one, other in pairwise(made))
