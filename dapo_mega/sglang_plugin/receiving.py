"""Weights as they come to an engine's processes: names with tensors, which a model's `load_weights` goes through."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.engines.sglang.weight_protocol import PiecesFormat, TensorSpec, split_specs, unpack_changes, unpacked
from dapo_mega.sglang_plugin.homes import Homes
from dapo_mega.sglang_plugin.patches import Write, Written, make_patch
from dapo_mega.weight_sync.engine_groups import Broadcasting


@dataclass(frozen=True)
class _Piece:
    """On its way to the memory of `tensors`, `new_bytes` of which it had to be given."""

    specs: Sequence[TensorSpec]
    tensors: Sequence[Tensor]
    new_bytes: int
    work: dist.Work


class ArrivingWeights:
    """Tensors on their way. Iterating waits for a piece when it comes to its tensors, so that those that are there are
    loaded while the others arrive; once only."""

    def __init__(
        self,
        group: Broadcasting,
        device: str,
        specs: Sequence[TensorSpec],
        pieces: PiecesFormat,
        homes: Homes | None = None,
    ) -> None:
        """Starts to receive; a piece goes home whose tensors have homes in a row. `is_broken`: one has not come."""
        self._group = group
        self._device = device
        self._homes = homes
        self._expected = deque(split_specs(specs, pieces.lengths))
        self._arriving: deque[_Piece] = deque()
        self._free_bytes = pieces.window_bytes
        self._is_read = False
        self.is_broken = False
        self._receive()

    def _receive(self) -> None:
        """Begin with the next pieces, as many as there is memory for, but one at least."""
        while self._expected:
            specs = self._expected[0]
            tensors = self._homes.find_row(specs) if self._homes else []
            num_bytes = sum(spec.num_bytes for spec in specs)
            if tensors:
                piece = tensors[0].flatten().view(torch.uint8).as_strided((num_bytes,), (1,))
                new_bytes = 0
            elif self._arriving and num_bytes > self._free_bytes:
                return
            else:
                piece = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                tensors = list(unpacked(piece, specs))
                new_bytes = num_bytes
            self._free_bytes -= new_bytes
            self._arriving.append(_Piece(self._expected.popleft(), tensors, new_bytes, self._group.broadcast(piece, 0)))

    def _next(self) -> _Piece | None:
        """The next piece, arrived; its memory counts as free again once the one after it is asked for."""
        try:
            self._receive()
            if not self._arriving:
                return None
            piece = self._arriving.popleft()
            piece.work.wait()
        except RuntimeError:
            self.is_broken = True
            raise
        return piece

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._is_read:
            raise RuntimeError("these weights are no longer there: they were loaded while they arrived")
        self._is_read = True
        while piece := self._next():
            for spec, tensor in zip(piece.specs, piece.tensors, strict=True):
                yield spec.name, self._homes.arrived(spec, tensor) if self._homes else tensor
            self._free_bytes += piece.new_bytes

    def drain(self) -> None:
        """Receive what a loader has left and forget it: whoever else receives goes on with what comes afterwards."""
        with suppress(RuntimeError):
            while not self.is_broken and self._next():
                pass


class ChangedWeights:
    """What has changed since the last update, as tensors that write just that into an engine's parameters."""

    def __init__(self, group: Broadcasting, device: str, specs: Sequence[TensorSpec]) -> None:
        """Receives."""
        length = torch.empty(1, dtype=torch.int64, device=device)
        group.broadcast(length.view(torch.uint8), 0).wait()
        packed = torch.empty(int(length), dtype=torch.uint8, device=device)
        group.broadcast(packed, 0).wait()
        self._specs = specs
        self._changes = list(unpack_changes(packed, specs))
        self._writes: list[Write] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._writes = []
        for spec, change in zip(self._specs, self._changes, strict=True):
            yield spec.name, make_patch(spec, change, self._writes)

    def written(self) -> list[Written]:
        """What this process has written since iterating began."""
        return [write.counted() for write in self._writes]

    def faults(self, written: Sequence[Written]) -> list[str]:
        """Names of tensors that are not what they should be after all processes of an engine have `written` this.

        A process may hold a part of a tensor, the whole, or the same part as another one.
        """
        expected = {spec.name: change.checksum for spec, change in zip(self._specs, self._changes, strict=True)}
        sizes = {spec.name: spec.size for spec in self._specs}
        sums: dict[tuple[str, ...], list[int]] = {}
        for part in written:
            if part.checksum is not None:
                total = sums.setdefault(part.names, [0, 0])
                total[0] += part.checksum
                total[1] += part.size
        missing = expected.keys() - {name for part in written for name in part.names}
        differing = [
            name
            for names, (total, size) in sums.items()
            if total * sum(sizes[name] for name in names) != size * sum(expected[name] for name in names)
            for name in names
        ]
        return sorted(missing) + differing
