"""Receives weights where the engine keeps them, once it is known where that is.

1. In the first update a tensor arrives in memory of its own and the model's loader copies it to its parameters. If that
   is one copy of the whole to a place that can be received into, that place is its home from then on.
2. In the next one it arrives there, and the loader is still given it: a copy from a place to itself is left out.
3. If that copy was all that the loader did with it, it is not given the tensor any more. What a model derives from its
   parameters it does after an update then, as for weights that SGLang receives past the loader (`post_load_weights`).
   Otherwise the tensor has no home from then on.

All of it begins anew for parameters whose memory or form has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from dapo_mega.sglang_plugin.wrappers import Wrapper
from dapo_mega.weight_sync.wire import TensorSpec, checksum


class Homes:
    """Where tensors of one model are received, by name."""

    def __init__(self) -> None:
        self.is_past_loader = False
        """Whether a tensor has come since the last `end_update` that the loader has not been given."""
        self._is_closed = False
        self._forms: dict[int, set[_Form]] = {}
        self._places: dict[str, Tensor] = {}
        self._settled: set[str] = set()
        self._homeless: set[str] = set()
        self._on_trial: list[_Journey] = []

    def close(self) -> None:
        """Give the model's loader plain tensors from now on, received in memory of their own."""
        self._is_closed = True
        self._places.clear()

    def start(self, parameters: Iterable[Tensor]) -> None:
        """Tensors are about to come for these parameters.

        Gives up places in memory that none of them has, or has in another form than at the last call of this or of
        `end_update`: an engine may make new parameters of those that were loaded.
        """
        before, self._forms = self._forms, {}
        for parameter in parameters:
            self._forms.setdefault(_memory(parameter), set()).add(_form(parameter))
        kept = {memory for memory, forms in self._forms.items() if forms == before.get(memory)}
        self._places = {name: place for name, place in self._places.items() if _memory(place) in kept}
        self._on_trial.clear()

    def end_update(self, parameters: Iterable[Tensor]) -> None:
        """All tensors have come, and these are the parameters now; see `start`."""
        self.is_past_loader = False
        self.start(parameters)

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
        if name in self._homeless:
            return
        before = self._places.get(name)
        if before is None or _form(before) != _form(place):
            self._settled.discard(name)
        self._places[name] = place

    def arrived(self, spec: TensorSpec, content: Tensor) -> Tensor | None:
        """What the loader is given of a tensor that has been received to `content`; None: nothing, for it is done."""
        if self._is_closed:
            return content
        if self.find(spec) is not content:
            return Arrival.of(_Journey(spec.name, content, self, None))
        if spec.name in self._settled:
            self.is_past_loader = True
            return None
        journey = _Journey(spec.name, content, self, checksum(content))
        self._on_trial.append(journey)
        return Arrival.of(journey)

    def loaded(self) -> None:
        """The loader is done with what it has been given since `start`."""
        for journey in self._on_trial:
            if journey.goes_home_alone:
                self._settled.add(journey.name)
            else:
                self._homeless.add(journey.name)
                self._places.pop(journey.name, None)
        self._on_trial.clear()


@dataclass
class _Journey:
    """Where a tensor comes from, all of it, and what the loader does with it. At home its checksum must still be
    `on_trial` when it is copied: a loader that clears a parameter before would clear what has just arrived there."""

    name: str
    whole: Tensor
    homes: Homes
    on_trial: Tensor | None
    copies_home: list[bool] = field(default_factory=list)
    """Of each copy made of it, whether it was one of the whole to where that is already."""
    is_read: bool = False
    """Whether something was computed of it."""

    @property
    def goes_home_alone(self) -> bool:
        """Whether the loader has done nothing that is not done when the tensor has arrived."""
        return self.copies_home == [True] and not self.is_read

    def copied(self, content: Tensor, parameter: Tensor) -> None:
        """Copy this much of it."""
        if self.on_trial is not None and not torch.equal(checksum(self.whole), self.on_trial):
            raise RuntimeError(f"the model's loader changes the parameter of {self.name} before it copies to it")
        is_whole = _form(content) == _form(self.whole)
        self.copies_home.append(is_whole and _form(parameter) == _form(self.whole))
        if self.copies_home[-1]:
            return
        parameter.copy_(content)
        if is_whole and parameter.is_contiguous() and parameter.device == content.device:
            self.homes.settle(self.name, parameter.detach())


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
        for each in (self, *others):
            if _memory(content) != _memory(each.content):
                each.read()
        arrival = self.wrapping(content)
        arrival.journey = self.journey
        return arrival

    def read(self) -> None:
        """See `Wrapper`."""
        self.journey.is_read = True

    def write_to(self, parameter: Tensor) -> None:
        """See `Wrapper`."""
        self.journey.copied(self.content, parameter)


_Form = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


def _form(tensor: Tensor) -> _Form:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
