"""Receives weights where the engine keeps them, once it is known where that is.

In the first update a tensor arrives in memory of its own and the model's loader copies it to its parameters. If that is
one copy of the whole to a place that can be received into, that place is its home from then on. The loader is still
given the tensor, with the rest of the bucket; a copy from a place to itself is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from dapo_mega.sglang_plugin.wrappers import Wrapper
from dapo_mega.weight_sync.wire import TensorSpec, checksum


class Homes:
    """Where tensors of one model are received, by name."""

    def __init__(self) -> None:
        self._is_closed = False
        self._places: dict[str, Tensor] = {}
        self._trusted: set[str] = set()

    def close(self) -> None:
        """Give the model's loader plain tensors from now on, received in memory of their own."""
        self._is_closed = True
        self._places.clear()

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Give up places that are in none of these: an engine may make new parameters of those that were loaded."""
        memory = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        places = self._places.items()
        self._places = {name: place for name, place in places if place.untyped_storage().data_ptr() in memory}

    def find(self, spec: TensorSpec) -> Tensor | None:
        """The tensor's home; None while it has none."""
        place = self._places.get(spec.name)
        return place if place is not None and (place.dtype, place.shape) == (spec.dtype, spec.shape) else None

    def find_row(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """The homes of all these tensors, if each lies right after the one before; else none."""
        places = [place for spec in specs if (place := self.find(spec)) is not None]
        follow = (one.data_ptr() + one.nbytes == other.data_ptr() for one, other in pairwise(places))
        memory = {place.untyped_storage().data_ptr() for place in places}
        return places if len(places) == len(specs) and len(memory) == 1 and all(follow) else []

    def settle(self, name: str, place: Tensor) -> None:
        """The tensor as a whole belongs here."""
        self._places[name] = place

    def arrived(self, spec: TensorSpec, content: Tensor) -> Tensor:
        """What the loader is given of a tensor that has been received to `content`.

        When it does so for the first time at home it is on trial: a loader that clears a parameter before it copies
        would clear what has just arrived there.
        """
        if self._is_closed:
            return content
        is_home = self.find(spec) is content
        on_trial = checksum(content) if is_home and spec.name not in self._trusted else None
        if is_home:
            self._trusted.add(spec.name)
        return Arrival.of(_Journey(spec.name, content, self, on_trial))


@dataclass(frozen=True)
class _Journey:
    """Where a tensor comes from: all of it, as it arrived, and where it may settle. Its checksum must still be
    `on_trial` when it is copied, if given."""

    name: str
    whole: Tensor
    homes: Homes
    on_trial: Tensor | None


class Arrival(Wrapper):
    """A tensor that has arrived, or a part of it."""

    journey: _Journey

    @classmethod
    def of(cls, journey: _Journey) -> Arrival:
        arrival = cls.wrapping(journey.whole)
        arrival.journey = journey
        return arrival

    def derived(self, content: Tensor, others: list[Self]) -> Self:
        """See `Wrapper`."""
        arrival = self.wrapping(content)
        arrival.journey = self.journey
        return arrival

    def write_to(self, parameter: Tensor) -> None:
        """See `Wrapper`."""
        journey = self.journey
        if journey.on_trial is not None and not torch.equal(checksum(journey.whole), journey.on_trial):
            raise RuntimeError(f"the model's loader changes the parameter of {journey.name} before it copies to it")
        if _same_place(parameter, self.content):
            return
        parameter.copy_(self.content)
        can_be_home = parameter.is_contiguous() and parameter.device == self.content.device
        if can_be_home and _same_place(self.content, journey.whole):
            journey.homes.settle(journey.name, parameter.detach())


def _same_place(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.dtype, one.shape, one.stride()) == (
        other.data_ptr(), other.dtype, other.shape, other.stride()
    )  # fmt: skip
