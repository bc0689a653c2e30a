"""Tensor wrappers that intercept every copy to a parameter."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class Wrapper(Tensor):
    """A model's loader can slice, transpose and fuse it like the tensor `content`; every result is wrapped again.
    `write_to` implements the copy to a plain tensor."""

    content: Tensor

    @classmethod
    def wrapping(cls, content: Tensor) -> Self:
        wrapper: Self = Tensor._make_wrapper_subclass(
            cls,
            content.size(),
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=content.device,
        )
        wrapper.content = content
        return wrapper

    def write_to(self, parameter: Tensor) -> None:
        """Called for `parameter.copy_(self)`."""
        raise NotImplementedError

    def derived(self, content: Tensor, others: list[Self]) -> Self:
        """Wrap `content`, the result of an operation on this tensor and on `others`."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass operations on to `__torch_dispatch__`."""
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], Wrapper):
            args[1].write_to(args[0])
            return args[0]
        if isinstance(args[0], cls) and not kwargs and all(isinstance(value, int) for value in args[1:]):
            content = func(args[0].content, *args[1:])  # A shortcut for the most frequent case, ten times as fast.
            if type(content) is Tensor:
                return args[0].derived(content, [])
        first, *others = [value for value in tree_leaves((args, kwargs)) if isinstance(value, cls)]
        args, kwargs = tree_map_only(Wrapper, lambda wrapper: wrapper.content, (args, kwargs or {}))
        return tree_map_only(Tensor, lambda tensor: first.derived(tensor, others), func(*args, **kwargs))
