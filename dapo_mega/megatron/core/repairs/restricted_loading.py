"""Loads Megatron's distributed checkpoints without unrestricted unpickling.

Megatron-Core reads `.metadata` with `pickle.load`, and 0.16 the states of layers with `torch.load(weights_only=False)`
and `common.pt` with torch's default, which an environment variable can change. Here Megatron gets a reader, a planner
and common values of `pickles`, which checks every pickle. Can go when Megatron's own loading is restricted.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from dapo_mega.models.megatron_format.pickles import check_object, read_common, read_metadata


def load_restricted(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`dist_checkpointing.load`. Collective; raises what it raises, and InputError for pickles that may run code."""
    with _restricted():
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    return loaded


@contextlib.contextmanager
def checked_layer_states() -> Iterator[None]:
    """Within it layers take the pickled states that `load_restricted` has checked: Transformer Engine 2.16 and newer
    refuse those of delayed scaling otherwise. Can go when they are no pickles."""
    name = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


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


def _common_values(*arguments: Any) -> dict[str, Any]:
    """In the place of a function of the folder, or a method of it."""
    return read_common(Path(arguments[-1]))


# Where Megatron has them: the common values are read by a method in 0.16, by the functions in 0.17 and in 0.19.
_REPLACED = (
    (torch_strategy, "_get_filesystem_reader", lambda folder, *_, **__: _Reader(folder)),
    (torch_strategy, "MCoreLoadPlanner", _Planner),
    (getattr(common, "TorchCommonLoadStrategy", None), "load_common", _common_values),
    (serialization, "load_common", _common_values),
    (serialization, "load_common_state_dict", _common_values),
)


@contextlib.contextmanager
def _restricted() -> Iterator[None]:
    with contextlib.ExitStack() as restored:
        for place, name, replacement in _REPLACED:
            if hasattr(place, name):
                restored.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, replacement)
        yield
