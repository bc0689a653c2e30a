"""Raises an error of one rank on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from dapo_mega.errors import FleetError, InputError, StarvedError, StopRequested


@contextlib.contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup) -> Iterator[None]:
    """Run a block that may raise on some ranks only: then all ranks raise the first error. The block must not wait for
    other ranks."""
    error: Exception | None = None
    try:
        yield
    except (InputError, StarvedError, FleetError, StopRequested, OSError) as caught:
        error = caught
    found: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, error, group=group)
    first = next((e for e in found if e is not None), None)
    if first is not None:
        raise first
