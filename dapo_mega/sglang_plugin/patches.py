"""Tensors that, copied over a parameter, change only some of its values.

A model's loader slices, transposes and fuses what it gets before it copies it into its parameters, and each process
takes only its part. A patch goes through all that like the tensor it stands for: NaN marks the values that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from dapo_mega.weight_sync.wire import Change, TensorSpec, checksum


class Written(NamedTuple):
    """`size` values of the tensors `names`, several where they are fused, have been written; `checksum` is what memory
    holds then, None where its dtype is not the tensors'."""

    names: tuple[str, ...]
    checksum: int | None
    size: int


@dataclass(frozen=True)
class Write:
    """A `Written` whose checksum [] int64 may still be on its way from the device."""

    names: tuple[str, ...]
    checksum: Tensor | None
    size: int

    def counted(self) -> Written:
        return Written(self.names, None if self.checksum is None else int(self.checksum), self.size)


@dataclass(frozen=True)
class _Origin:
    """What a patch was made of, possibly several tensors: their names and dtypes, and whether NaN marks values of them
    that stay. Every copy to a parameter is added to `writes`."""

    names: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    has_gaps: bool
    writes: list[Write]

    @staticmethod
    def joined(origins: Sequence[_Origin]) -> _Origin:
        return _Origin(
            tuple(dict.fromkeys(name for origin in origins for name in origin.names)),
            frozenset().union(*(origin.dtypes for origin in origins)),
            any(origin.has_gaps for origin in origins),
            origins[0].writes,
        )


class Patch(Tensor):
    """Stands for tensors or parts of them; `content` are the values."""

    content: Tensor
    origin: _Origin

    @staticmethod
    def __new__(cls: type[Patch], content: Tensor, origin: _Origin) -> Patch:
        patch: Patch = Tensor._make_wrapper_subclass(
            cls,
            content.size(),
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=content.device,
        )
        patch.content, patch.origin = content, origin
        return patch

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Nothing special: operations come to `__torch_dispatch__`."""
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], Patch):
            args[1]._write_to(args[0])
            return args[0]
        origin = _Origin.joined([patch.origin for patch in tree_leaves((args, kwargs)) if isinstance(patch, Patch)])
        args, kwargs = tree_map_only(Patch, lambda patch: patch.content, (args, kwargs or {}))
        return tree_map_only(Tensor, lambda tensor: Patch(tensor, origin), func(*args, **kwargs))

    def _write_to(self, parameter: Tensor) -> None:
        new = torch.where(self.content.isnan(), parameter, self.content) if self.origin.has_gaps else self.content
        parameter.copy_(new)
        held = checksum(parameter) if self.origin.dtypes == {parameter.dtype} else None
        self.origin.writes.append(Write(self.origin.names, held, parameter.numel()))


def make_patch(spec: TensorSpec, change: Change, writes: list[Write]) -> Tensor:
    """A tensor of this kind that brings the change."""
    origin = _Origin((spec.name,), frozenset([spec.dtype]), change.places is not None, writes)
    if change.places is None:
        return Patch(change.values, origin)
    content = torch.full((spec.size,), torch.nan, dtype=spec.dtype, device=change.values.device)
    content[change.places.long()] = change.values
    return Patch(content.view(spec.shape), origin)
