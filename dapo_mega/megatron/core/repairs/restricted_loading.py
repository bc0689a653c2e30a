"""Loads Megatron's distributed checkpoints without unrestricted unpickling.

Megatron-Core 0.16 reads `.metadata` with `pickle.load`, the states of layers with `torch.load(weights_only=False)`, and
`common.pt` with torch's default, which an environment variable can change. Here Megatron gets a reader, a planner and a
strategy that use `pickles`, which checks every pickle. Can go when Megatron's own loading is restricted.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from dapo_mega.models.megatron_format.pickles import check_object, read_common, read_metadata


def load_restricted(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`dist_checkpointing.load`. Collective; raises what it raises, and InputError for pickles that may run code."""
    with _restricted():
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder), common_strategy=_CommonStrategy())
    return loaded


class _CommonStrategy(TorchCommonLoadStrategy):  # type: ignore[misc]
    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return read_common(Path(checkpoint_dir))


class _Reader(FileSystemReader):
    _metadata: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path))
        return self._metadata


class _Planner(torch_strategy.MCoreLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        check_object(key, value.getvalue(), repr(key))
        super().load_bytes(read_item, value)


@contextlib.contextmanager
def _restricted() -> Iterator[None]:
    original = torch_strategy._get_filesystem_reader, torch_strategy.MCoreLoadPlanner
    torch_strategy._get_filesystem_reader = lambda folder, cache_metadata=False: _Reader(folder)
    torch_strategy.MCoreLoadPlanner = _Planner
    try:
        yield
    finally:
        torch_strategy._get_filesystem_reader, torch_strategy.MCoreLoadPlanner = original
