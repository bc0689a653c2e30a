"""Weights as they come to an engine's processes: names with tensors, which a model's `load_weights` goes through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dapo_mega.sglang_plugin.homes import Homes
from dapo_mega.sglang_plugin.patches import Write, Written, make_patch
from dapo_mega.weight_sync.engine_groups import EngineGroup
from dapo_mega.weight_sync.wire import TensorSpec, split_specs, unpack_changes, unpacked


class ArrivingWeights:
    """Tensors on their way. Iterating waits for a piece when it comes to its tensors, so that those that are there are
    loaded while the others arrive; it can be repeated."""

    def __init__(
        self,
        group: EngineGroup,
        device: str,
        specs: Sequence[TensorSpec],
        piece_lengths: Sequence[int],
        homes: Homes | None = None,
    ) -> None:
        """Starts to receive; a piece goes home whose tensors have homes in a row. `goes_home`: some do. `is_broken`: a
        piece has not come."""
        self._homes = homes
        self._pieces = []
        self.goes_home = False
        self.is_broken = False
        for of_piece in split_specs(specs, piece_lengths):
            num_bytes = sum(spec.num_bytes for spec in of_piece)
            if homes and (tensors := homes.find_row(of_piece)):
                piece = tensors[0].flatten().view(torch.uint8).as_strided((num_bytes,), (1,))
                self.goes_home = True
            else:
                piece = torch.empty(num_bytes, dtype=torch.uint8, device=device)
                tensors = list(unpacked(piece, of_piece))
            self._pieces.append((of_piece, tensors, group.broadcast(piece, 0)))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for specs, tensors, work in self._pieces:
            try:
                work.wait()
            except RuntimeError:
                self.is_broken = True
                raise
            for spec, tensor in zip(specs, tensors, strict=True):
                yield spec.name, self._homes.arrived(spec, tensor) if self._homes else tensor


class ChangedWeights:
    """What has changed since the last update, as tensors that write just that into an engine's parameters."""

    def __init__(self, group: EngineGroup, device: str, specs: Sequence[TensorSpec]) -> None:
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
