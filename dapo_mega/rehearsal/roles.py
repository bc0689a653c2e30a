"""Which ranks of a layout are rehearsed, and for which others each of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from dapo_mega.config import ParallelConfig

_ALL_UP_TO: Final = 8
"""A world of so many ranks is rehearsed rank by rank."""


@dataclass(frozen=True)
class Roles:
    """Ranks of a layout that do the same. Along tensor, context and data parallelism the first rank leads, and all
    others are alike; every pipeline stage is different. A small world is rehearsed rank by rank."""

    parallel: ParallelConfig
    world_size: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Tensor, context, data and pipeline parallelism, as Megatron numbers ranks: tensor first."""
        parallel = self.parallel
        return parallel.tensor, parallel.context, parallel.data_size(self.world_size), parallel.pipeline

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """The rank's place along each of `sizes`."""
        found = []
        for size in self.sizes:
            found.append(rank % size)
            rank //= size
        return found[0], found[1], found[2], found[3]

    def rank(self, tensor: int, context: int, data: int, stage: int) -> int:
        sizes = self.sizes
        return tensor + sizes[0] * (context + sizes[1] * (data + sizes[2] * stage))

    @cached_property
    def rehearsed(self) -> list[int]:
        """The ranks that are rehearsed, in order: of each stage its first, and one that is second along tensor, context
        or data parallelism."""
        if self.world_size <= _ALL_UP_TO:
            return list(range(self.world_size))
        firsts = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
        sizes = self.sizes
        here = [first for first in firsts if all(at < size for at, size in zip(first, sizes[:3], strict=True))]
        return sorted(self.rank(*first, stage) for first in here for stage in range(sizes[3]))

    def within(self, group: Sequence[int]) -> list[int]:
        """The rehearsed ranks of a group."""
        return [rank for rank in self.rehearsed if rank in group]

    def stand_in(self, rank: int, group: Sequence[int]) -> int:
        """The rehearsed rank of a group that does what a rank of it does: the first of a dimension leads, the second
        stands for the others."""
        here = self.within(group)
        if rank in here:
            return rank
        place = self.place(rank)
        alike = [
            other for other in here if all(bool(a) >= bool(b) for a, b in zip(place, self.place(other), strict=True))
        ]
        return max(alike or here)

    def describe(self, rank: int) -> str:
        """Such as "stage 1, tensor 0, context 1, data 1"."""
        names = ("tensor", "context", "data", "stage")
        parts = [f"{name} {at}" for name, at, size in zip(names, self.place(rank), self.sizes, strict=True) if size > 1]
        return f"rank {rank}" + (f" ({', '.join(reversed(parts))})" if parts else "")
