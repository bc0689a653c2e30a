"""Receives weights on an engine's ranks, as names and tensors for a model's `load_weights`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.engines.sglang.weight_protocol import (
    Change,
    PlannedBucket,
    most_packed_bytes,
    split_specs,
    unpack_changes,
    unpacked,
)
from dapo_mega.sglang_plugin.coverage import LoadTrace
from dapo_mega.sglang_plugin.patches import Written, make_patch
from dapo_mega.types import WeightSpec
from dapo_mega.weight_sync.engine_groups import EngineGroup


@dataclass(frozen=True)
class _Chunk:
    """A chunk of a bucket, which is received into `memory`."""

    specs: Sequence[WeightSpec]
    memory: Tensor
    receipt: dist.Work


class ArrivingWeights:
    """The names and tensors of a bucket; each chunk can be loaded while further chunks arrive. Can be iterated once."""

    def __init__(
        self,
        group: EngineGroup,
        device: str,
        bucket: PlannedBucket,
        window_bytes: int,
        trace: LoadTrace | None = None,
    ) -> None:
        """Posts the first receives, of `window_bytes` or one chunk. `is_broken` is set when one of them fails; `trace`
        sees what the loader copies."""
        self._group = group
        self._device = device
        self._trace = trace
        self._expected = deque(split_specs(bucket.specs, bucket.lengths))
        self._arriving: deque[_Chunk] = deque()
        self._free_bytes = window_bytes
        self._is_read = False
        self.is_broken = False
        with suppress(RuntimeError):  # Raised again by the iteration.
            self._receive()

    def _receive(self) -> None:
        """Post further receives while they fit the window; always at least one."""
        while self._expected:
            num_bytes = sum(spec.num_bytes for spec in self._expected[0])
            if self._arriving and num_bytes > self._free_bytes:
                return
            self._free_bytes -= num_bytes
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._arriving.append(_Chunk(self._expected.popleft(), memory, self._group.broadcast(memory, 0)))

    def _next(self) -> _Chunk | None:
        """Wait for the next chunk; None if there are no more."""
        try:
            self._receive()
            if not self._arriving:
                return None
            chunk = self._arriving.popleft()
            chunk.receipt.wait()
        except RuntimeError:
            self.is_broken = True
            raise
        return chunk

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._is_read:
            raise RuntimeError("these weights are freed: chunks are loaded while they arrive, which works only once")
        self._is_read = True
        while chunk := self._next():
            for spec, tensor in zip(chunk.specs, unpacked(chunk.memory, chunk.specs), strict=True):
                yield spec.name, self._trace.traced(spec.name, tensor) if self._trace else tensor
            self._free_bytes += chunk.memory.nbytes

    def drain(self) -> None:
        """Receive and discard the chunks that the loader did not read, so that the group's next receive matches."""
        with suppress(RuntimeError):
            while not self.is_broken and self._next():
                pass


class ChangedWeights:
    """The changed values since the last update, as tensors that write only these values into parameters."""

    def __init__(self, group: EngineGroup, device: str, specs: Sequence[WeightSpec]) -> None:
        """Receive both chunks. `is_broken` is set if they do not come, which the first iteration raises."""
        self._specs = specs
        self._changes: list[Change] = []
        self._writes: list[Written] = []
        self._failure: RuntimeError | None = None
        try:
            self._changes = list(unpack_changes(_received_changes(group, device, specs), specs))
        except RuntimeError as error:
            self._failure = error

    @property
    def is_broken(self) -> bool:
        return self._failure is not None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._failure:
            raise self._failure
        self._writes = []
        for spec, change in zip(self._specs, self._changes, strict=True):
            yield spec.name, make_patch(spec, change, self._writes)

    def written(self) -> list[Written]:
        """This rank's writes since the last iteration began."""
        return [write.counted() for write in self._writes]

    def faults(self, written: Sequence[Written]) -> list[str]:
        """The names of tensors whose checksum is wrong, given the writes of all ranks of an engine.

        A rank may hold a part of a tensor, the whole tensor, or the same part as another rank.
        """
        expected = {spec.name: change.checksum for spec, change in zip(self._specs, self._changes, strict=True)}
        sizes = {spec.name: spec.size for spec in self._specs}
        sums: dict[tuple[str, ...], list[int]] = {}
        for part in written:
            if part.checksum is not None:
                total = sums.setdefault(part.names, [0, 0])
                total[0] += int(part.checksum)
                total[1] += part.size
        missing = expected.keys() - {name for part in written for name in part.names}
        differing = [
            name
            for names, (total, size) in sums.items()
            if total * sum(sizes[name] for name in names) != size * sum(expected[name] for name in names)
            for name in names
        ]
        return sorted(missing) + differing


def _received_changes(group: EngineGroup, device: str, specs: Sequence[WeightSpec]) -> Tensor:
    """The packed changes [bytes] uint8. Raises RuntimeError for more than there can be of these tensors."""
    length = torch.empty(1, dtype=torch.int64, device=device)
    group.broadcast(length.view(torch.uint8), 0).wait()
    num_bytes, most = int(length), most_packed_bytes(specs)
    if not 0 <= num_bytes <= most:
        raise RuntimeError(f"{num_bytes} bytes of changes are said to come, and there can be {most}")
    packed = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    group.broadcast(packed, 0).wait()
    return packed
