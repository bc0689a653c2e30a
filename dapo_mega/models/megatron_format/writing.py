"""Writes files of Megatron's distributed checkpoint format, a block at a time."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

# Megatron's writer fills the same private record: torch has no public one.
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from dapo_mega.atomic_files import disk_refusal, replace_file
from dapo_mega.errors import InputError
from dapo_mega.models.megatron_format.pickles import (
    COMMON_FILE,
    METADATA_FILE,
)

VOCABULARY_FILE = "vocabulary.json"
"""Holds the number of rows that are not padding, which the stored shapes do not tell."""


@dataclass(frozen=True)
class Block:
    """A part of the global tensor `key` of shape `shape`, to be read when it is written."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]
    label: str = ""
    """What to call it in a message."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


def write_blocks(
    blocks: Iterable[Block], objects: Mapping[str, bytes], file: Path, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Write one file, a block at a time; returns what `write_metadata` must know of it, as JSON values.

    Raises InputError naming the file where the disk is full or fails.
    """
    try:
        with file.open("wb") as stream:
            records = [*_write_objects(stream, objects), *_write_tensors(stream, blocks, advance)]
            stream.flush()
            os.fsync(stream.fileno())
    except (OSError, RuntimeError) as error:
        reason = disk_refusal(error)
        if reason is None:
            raise
        raise InputError(f"cannot write {file} ({reason}); free space and start again") from error
    return records


def _write_objects(stream: IO[bytes], objects: Mapping[str, bytes]) -> Iterator[dict[str, Any]]:
    for key, data in objects.items():
        yield {"key": key, "start": stream.tell(), "length": len(data)}
        stream.write(data)


def _write_tensors(
    stream: IO[bytes], blocks: Iterable[Block], advance: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    for block in blocks:
        start = stream.tell()
        tensor = owned(block.read().reshape(block.sizes))
        torch.save(tensor, stream)
        yield {
            "not_finite": not is_finite(tensor),
            "label": block.label,
            "key": block.key,
            "shape": block.shape,
            "dtype": str(block.dtype).removeprefix("torch."),
            "offsets": block.offsets,
            "sizes": block.sizes,
            "start": start,
            "length": stream.tell() - start,
        }
        advance(block.nbytes)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. Takes no memory besides the tensor."""
    if not tensor.is_floating_point() or tensor.itemsize == 1 or tensor.numel() == 0:
        return True
    # The least and the largest value are NaN where any value is.
    return all(math.isfinite(value) for value in torch.stack(torch.aminmax(tensor)).tolist())


def owned(tensor: Tensor) -> Tensor:
    """The tensor with a contiguous storage that holds nothing else."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_vocabulary(folder: Path, vocab_size: int) -> None:
    """Record how many rows of the vocabulary's tensors in `folder` are not padding."""
    replace_file(folder / VOCABULARY_FILE, json.dumps({"vocab_size": vocab_size}))


def write_metadata(
    folder: Path, records: Mapping[str, list[dict[str, Any]]], common: Mapping[str, Any], vocab_size: int
) -> None:
    """Make a checkpoint of files, given with their records; `common` is what Megatron keeps beside tensors.

    `vocab_size` counts the rows that are not padding; reading compares it with config.json.
    """
    stored: dict[str, Any] = {}
    places = {}
    for file, items in records.items():
        for item in items:
            index = MetadataIndex(item["key"], item.get("offsets"))
            places[index] = _StorageInfo(file, item["start"], item["length"])
            if "shape" not in item:
                stored[item["key"]] = BytesStorageMetadata()
                continue
            properties = TensorProperties(dtype=getattr(torch, item["dtype"]))
            tensor = stored.setdefault(
                item["key"], TensorStorageMetadata(properties, torch.Size(item["shape"]), chunks=[])
            )
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(item["offsets"]), torch.Size(item["sizes"])))
    metadata = Metadata(stored, storage_data=places, version=CURRENT_DCP_VERSION)
    buffer = io.BytesIO()
    torch.save(dict(common), buffer)
    replace_file(folder / COMMON_FILE, buffer.getvalue())
    write_vocabulary(folder, vocab_size)
    replace_file(folder / METADATA_FILE, pickle.dumps(metadata))
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {f"{name}_version": 1 for name in backends}
    replace_file(folder / "metadata.json", json.dumps({**backends, **versions}))
