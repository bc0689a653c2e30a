"""Which ranks of a layout are rehearsed, and for which others each of them stands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dapo_mega.config import ParallelConfig

_ALL_UP_TO: Final = 8
"""A world of so many ranks is rehearsed rank by rank."""


@dataclass(frozen=True)
class Roles:
    """Ranks of a layout that do the same. Along tensor, context and data parallelism the first rank leads, and all
    others are alike; every pipeline stage is different."""

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

    def like(self, rank: int) -> int:
        """The rehearsed rank that stands for a rank."""
        if self.world_size <= _ALL_UP_TO:
            return rank
        tensor, context, data, stage = self.place(rank)
        return self.rank(min(tensor, 1), min(context, 1), min(data, 1), stage)

    def rehearsed(self) -> list[int]:
        """The ranks that are rehearsed, in order."""
        return sorted({self.like(rank) for rank in self._ends()})

    def _ends(self) -> Iterator[int]:
        if self.world_size <= _ALL_UP_TO:
            yield from range(self.world_size)
            return
        sizes = self.sizes
        for place in itertools.product(*(range(min(size, 2)) for size in sizes[:3]), range(sizes[3])):
            yield self.rank(*place)

    def describe(self, rank: int) -> str:
        """Such as "stage 1, tensor 0, context 1, data 1"."""
        names = ("tensor", "context", "data", "stage")
        parts = [f"{name} {at}" for name, at, size in zip(names, self.place(rank), self.sizes, strict=True) if size > 1]
        return f"rank {rank}" + (f" ({', '.join(reversed(parts))})" if parts else "")
