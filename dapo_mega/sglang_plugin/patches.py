"""Tensors that, copied over a parameter, change only some of its values.

A model's loader slices, transposes and fuses tensors before it copies them into parameters, and each rank takes only
its shard. A patch goes through these steps like the full tensor: NaN marks the values that do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dapo_mega.engines.sglang.weight_protocol import Change, checksum
from dapo_mega.sglang_plugin.wrappers import Wrapper
from dapo_mega.types import WeightSpec


class Written(NamedTuple):
    """One copy to a parameter: `size` values of the tensors `names` (several if fused). `checksum` is the parameter's
    afterwards, None if its dtype is not the tensors'; until it is `counted`, [] int64 that may be on the device."""

    names: tuple[str, ...]
    checksum: Tensor | int | None
    size: int

    def counted(self) -> Written:
        return self._replace(checksum=None if self.checksum is None else int(self.checksum))


@dataclass(frozen=True)
class _Origin:
    """A patch's source tensors: their names and dtypes, and whether NaN marks unchanged values. Every copy to a
    parameter is added to `writes`."""

    names: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    has_gaps: bool
    writes: list[Written]

    def joined(self, other: _Origin) -> _Origin:
        names = tuple(dict.fromkeys(self.names + other.names))
        return _Origin(names, self.dtypes | other.dtypes, self.has_gaps or other.has_gaps, self.writes)


class Patch(Wrapper):
    """New values of tensors, or of parts of them."""

    origin: _Origin

    @classmethod
    def of(cls, content: Tensor, origin: _Origin) -> Patch:
        patch = cls.wrapping(content)
        patch.origin = origin
        return patch

    def derived(self, content: Tensor, others: list[Self]) -> Self:
        patch = self.wrapping(content)
        patch.origin = reduce(_Origin.joined, (other.origin for other in others), self.origin)
        return patch

    def write_to(self, parameter: Tensor) -> None:
        new = torch.where(self.content.isnan(), parameter, self.content) if self.origin.has_gaps else self.content
        parameter.copy_(new)
        held = checksum(parameter) if self.origin.dtypes == {parameter.dtype} else None
        self.origin.writes.append(Written(self.origin.names, held, parameter.numel()))


def make_patch(spec: WeightSpec, change: Change, writes: list[Written]) -> Tensor:
    origin = _Origin((spec.name,), frozenset([spec.dtype]), change.places is not None, writes)
    if change.places is None:
        return Patch.of(change.values, origin)
    content = torch.full((spec.size,), torch.nan, dtype=spec.dtype, device=change.values.device)
    content[change.places.long()] = change.values
    return Patch.of(content.view(spec.shape), origin)
