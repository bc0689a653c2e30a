"""What a stage's bucket consists of."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dapo_mega.engines.sglang.weight_protocol import TensorSpec, split_specs, tensor_specs, unpacked
from dapo_mega.types import StageBucket


def bucket_specs(bucket: StageBucket) -> list[TensorSpec]:
    """Of its tensors, known on every process."""
    return tensor_specs(bucket.names, bucket.dtypes, bucket.shapes)


def bucket_bytes(bucket: StageBucket) -> int:
    """Of its tensors, known on every process."""
    return sum(spec.num_bytes for spec in bucket_specs(bucket))


def named_tensors(bucket: StageBucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors as views of the pieces, where these are."""
    assert bucket.pieces is not None
    for piece, specs in zip(bucket.pieces, split_specs(bucket_specs(bucket), bucket.piece_lengths), strict=True):
        for spec, tensor in zip(specs, unpacked(piece, specs), strict=True):
            yield spec.name, tensor
