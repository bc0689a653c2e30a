"""Receives weights where the engine keeps them, once it is known where that is.

In the first update a tensor arrives in memory of its own and the model's loader copies it to its parameters. Where it
makes a single copy, of the whole to a place that can be received into, that place is the tensor's home from then on.
The loader is still given it, for it may do more than copy; a copy from a place to itself is left out. A loader that
does not make just this one copy of a tensor at home, for instance because it keeps an expert in another place by now,
has failed: what it would overwrite there may be another tensor that has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from dapo_mega.engines.sglang.weight_protocol import TensorSpec, checksum
from dapo_mega.sglang_plugin.wrappers import Wrapper

Differences = tuple[list[str], set[str]]
"""Parameters that nothing was copied to, with their shapes, and names of tensors that were copied nowhere."""


class Homes:
    """Where tensors of one model are received, by name."""

    def __init__(self) -> None:
        self._is_closed = False
        self._forms: dict[int, set[_Form]] = {}
        self._places: dict[str, Tensor] = {}
        self._trusted: set[str] = set()
        self._journeys: list[_Journey] = []
        self._written: set[int] = set()
        self._unplaced: set[str] = set()
        self._sees_all = True

    def begin(self) -> None:
        """A session of updates begins, which brings all weights unless `miss` is called."""
        self._written.clear()
        self._unplaced.clear()
        self._sees_all = not self._is_closed

    def miss(self) -> None:
        """Weights of this session come otherwise: it cannot be told what they reach."""
        self._sees_all = False

    def differences(self, parameters: Iterable[tuple[str, Tensor]]) -> Differences:
        """Of this session, at its end. Of single values, which loaders fill in otherwise, nothing is said."""
        if not self._sees_all or not self._written:
            return [], set()
        unwritten = [
            f"{name} {list(parameter.shape)}"
            for name, parameter in parameters
            if parameter.numel() > 1 and _memory(parameter) not in self._written
        ]
        return unwritten, set(self._unplaced)

    def close(self) -> None:
        """Give the model's loader plain tensors from now on, received in memory of their own."""
        self._is_closed = True
        self._places.clear()
        self._journeys.clear()

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Give up places in memory that none of these has, or has in another form than when this was last called: an
        engine may make new parameters of those that were loaded. To be called before tensors come, and when all have.
        """
        before, self._forms = self._forms, {}
        for parameter in parameters:
            self._forms.setdefault(_memory(parameter), set()).add(_form(parameter))
        kept = {memory for memory, forms in self._forms.items() if forms == before.get(memory)}
        self._places = {name: place for name, place in self._places.items() if _memory(place) in kept}
        self._journeys.clear()

    def find(self, spec: TensorSpec) -> Tensor | None:
        """The tensor's home; None while it has none."""
        place = self._places.get(spec.name)
        return place if place is not None and (place.dtype, place.shape) == (spec.dtype, spec.shape) else None

    def find_row(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """The homes of all these tensors, if each lies right after the one before; else none."""
        places = [place for spec in specs if (place := self.find(spec)) is not None]
        follow = (one.data_ptr() + one.nbytes == other.data_ptr() for one, other in pairwise(places))
        return places if len(places) == len(specs) and len(set(map(_memory, places))) == 1 and all(follow) else []

    def settle(self, name: str, place: Tensor) -> None:
        """The tensor as a whole belongs here."""
        self._places[name] = place

    def arrived(self, spec: TensorSpec, content: Tensor) -> Tensor:
        """What the loader is given of a tensor that has been received to `content`.

        When it does so for the first time at home it is on trial: a loader that clears a parameter before it copies
        would clear what has just arrived there.
        """
        if self._is_closed:
            self._sees_all = False
            return content
        is_home = self.find(spec) is content
        on_trial = checksum(content) if is_home and spec.name not in self._trusted else None
        journey = _Journey(spec.name, is_home, on_trial, self._written, is_used=content.numel() <= 1)
        self._journeys.append(journey)
        return Arrival.of(content, content, journey)

    def loaded(self) -> list[str]:
        """The loader is done with the tensors that have come. Names of those at home that it did not copy."""
        left = []
        for journey in self._journeys:
            if not journey.is_used:
                self._unplaced.add(journey.name)
            if journey.is_home:
                self._trusted.add(journey.name)
                left += [] if journey.copies else [journey.name]
            elif len(journey.copies) == 1 and journey.copies[0] is not None:
                self.settle(journey.name, journey.copies[0])
        self._journeys.clear()
        return left


@dataclass
class _Journey:
    """What a loader does with a tensor. At home its checksum must still be `on_trial` when it is copied, if given;
    `copies` are the places that could be its home, None for a copy to any other or of a part. `written` is the memory
    that tensors have been copied to; `is_used`: this one has, alone or together with others."""

    name: str
    is_home: bool
    on_trial: Tensor | None
    written: set[int]
    is_used: bool = False
    copies: list[Tensor | None] = field(default_factory=list)


class Arrival(Wrapper):
    """A tensor that has arrived, the `whole`, or a part of it."""

    whole: Tensor
    journey: _Journey

    @classmethod
    def of(cls, content: Tensor, whole: Tensor, journey: _Journey) -> Self:
        arrival = cls.wrapping(content)
        arrival.whole = whole
        arrival.journey = journey
        return arrival

    def derived(self, content: Tensor, others: list[Self]) -> Self:
        """See `Wrapper`."""
        for other in others:
            other.journey.is_used = True
        return self.of(content, self.whole, self.journey)

    def write_to(self, parameter: Tensor) -> None:
        """See `Wrapper`."""
        journey = self.journey
        if journey.on_trial is not None and not torch.equal(checksum(self.whole), journey.on_trial):
            raise RuntimeError(f"the model's loader changes the parameter of {journey.name} before it copies to it")
        journey.is_used = True
        journey.written.add(_memory(parameter))
        is_whole = _form(self.content) == _form(self.whole)
        if journey.is_home:
            if not is_whole or _form(parameter) != _form(self.whole):
                raise RuntimeError(f"the model's loader no longer copies {journey.name} to the same place only")
            journey.copies.append(parameter)
            return
        parameter.copy_(self.content)
        can_be_home = is_whole and parameter.is_contiguous() and parameter.device == self.content.device
        journey.copies.append(parameter.detach() if can_be_home else None)


_Form = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


def _form(tensor: Tensor) -> _Form:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
