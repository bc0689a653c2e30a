"""A device whose tensors have shapes, types and storages, and mostly no values: torch's "meta".

Tensors of the host are real. Inside of `PretendedDevice` an operation on tensors of the device allocates nothing and is
counted: its bytes, its floating-point operations. Values that come from the host (tokens, masks, lengths) and what is
computed of such values alone stay known, so that shapes which depend on them are right; of all others a reader gets
ones. Routers choose all experts equally often.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

from dapo_mega.rehearsal.places import place

P = ParamSpec("P")
T = TypeVar("T")
DEVICE: Final = torch.device("meta")

_LARGEST_KNOWN = 2**23
_LARGEST_FILLED = 2**22
_SMALL = 2**20
_NOTED = 1.002
"""What the peak is made of is noted again when it has grown so much."""
_aten = torch.ops.aten


class UnknownValues(RuntimeError):
    """A shape depends on values that the device does not have."""

    def __init__(self, operation: Any) -> None:
        super().__init__(f"{operation} gives a tensor whose size depends on values that no rehearsal has")


class PretendedDevice(TorchDispatchMode):
    """Counts what is held and computed.

    `live` are the bytes of each kind of memory that is allocated under that name of `holding`; `peak` their sum at the
    most, `at_peak` the kinds and `where` the operation and the place in the code at that moment; `flops` counts
    multiplications and additions apart. With `keeps_large_here` nothing is counted, and large tensors that are made on
    the host, or copied to it, are the device's, so that they take no memory. Activations with rows of `num_logits` are
    called logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_logits: int | None = None
        self.kind = "other"
        self.keeps_large_here = False
        self.live: Counter[str] = Counter()
        self.flops = 0
        self._kinds: dict[int, tuple[str, int]] = {}
        self._kernels = 0
        self._layouts: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
        self.forget_peak()

    # ---- memory ----

    def forget_peak(self) -> None:
        """From now on `peak` is that of what follows."""
        self.peak = self.live.total()
        self.at_peak, self.where = dict(self.live), ("", "")
        self._total = self._noted = self.peak

    @contextmanager
    def holding(self, kind: str) -> Iterator[None]:
        """What is allocated in this block is of this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def holds(self, kind: str, function: Callable[P, T]) -> Callable[P, T]:
        """The function, what it allocates being of this kind."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.holding(kind):
                return function(*args, **kwargs)

        return call

    def beside(self, function: Callable[P, T]) -> Callable[P, T]:
        """The function, with `keeps_large_here`."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            before, self.keeps_large_here = self.keeps_large_here, True
            try:
                return function(*args, **kwargs)
            finally:
                self.keeps_large_here = before

        return call

    def call_it(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """These tensors' memory is of this kind."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._kinds:
                old, size = self._kinds[key]
                self.live[old] -= size
                self.live[kind] += size
                self._kinds[key] = (kind, size)

    def _hold(self, tensor: Tensor, func: Any) -> None:
        if self.keeps_large_here:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._kinds:
            self.resized(storage)
        else:
            is_logits = self.kind == "activations" and tensor.dim() and tensor.shape[-1] == self.num_logits
            kind = "logits" if is_logits else self.kind
            self._kinds[key] = (kind, size)
            self.live[kind] += size
            self._total += size
            weakref.finalize(storage, self._release, key)
        self._note_peak(func)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """It may have been emptied, or filled again."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._kinds:
            kind, known = self._kinds[key]
            self._kinds[key] = (kind, size)
            self.live[kind] += size - known
            self._total += size - known

    def _note_peak(self, operation: Any) -> None:
        if self._total > self.peak and not self._kernels:
            self.peak = self._total
            if self._total > _NOTED * self._noted:
                self._noted, self.at_peak = self._total, dict(self.live)
                self.where = (str(operation), place(sys._getframe(3)))

    def _release(self, key: int) -> None:
        kind, size = self._kinds.pop(key)
        self.live[kind] -= size
        self._total -= size

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """What is allocated in this block is one kernel's: it counts if it is there behind the block."""
        self._kernels += 1
        try:
            yield
        finally:
            self._kernels -= 1
        self._note_peak("kernel")

    # ---- values ----

    def read(self, tensor: Tensor) -> Tensor:
        """A tensor of the device on the host: what is known of it, otherwise ones."""
        known = known_of(tensor)
        return torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known.clone()

    # ---- operations ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # Tensors made of others, such as those in FP8: what they do with these is counted.
        kwargs = kwargs or {}
        tensors = _tensors((*args, *kwargs.values()))
        is_here = any(tensor.is_meta for tensor in tensors)
        device = kwargs.get("device")
        if self.keeps_large_here and device is not None and device != DEVICE and _makes_much(func, args):
            kwargs, device = kwargs | {"device": DEVICE}, DEVICE
        if not is_here and device != DEVICE:
            return func(*args, **kwargs)
        if is_here:
            if func is _aten._local_scalar_dense.default:
                return self.read(args[0]).item()
            if func is _aten.equal.default:
                return func(*map(self.read, args))
            if func is _aten._to_copy.default and device is not None and device != DEVICE:
                return func(self.read(args[0]), **kwargs)
            if func is _aten.copy_.default and not args[0].is_meta:
                return func(args[0], self.read(args[1]))
        # An optimizer's moments would otherwise begin as zeros of this machine's memory.
        is_moment = self.kind == "optimizer" and func._overloadpacket in _FILLED
        known = None if is_moment else _known_result(func, args, kwargs, tensors)
        if is_here:
            args, kwargs = _with_known_shapes(func, args, kwargs)
        result = self._run(func, args, kwargs, known)
        for tensor, value in _pairs(result, known):
            if isinstance(tensor, Tensor):
                self._hold(tensor, func)
                if tensor.is_meta:  # Megatron does not read pickled tensors with attributes, as of scales, back.
                    tensor.known = value  # type: ignore[attr-defined]
        self._count(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, known: Any) -> Any:
        if func in _SHAPED_BY_VALUES:
            if known is None:
                raise UnknownValues(func)
            return torch.empty(known.shape, dtype=known.dtype, device=DEVICE)
        if func is _aten.masked_select.default:
            if (mask := known_of(args[1])) is None:
                raise UnknownValues(func)
            return torch.empty(int(mask.sum()), dtype=args[0].dtype, device=DEVICE)
        # torch computes shapes of the device's tensors in Python, and layers repeat them.
        if not (result_is := _result_of(func)):
            return func(*args, **kwargs)
        key = func, _described(args), _described(tuple(kwargs.items()))
        if (layout := self._layouts.get(key)) is None:
            result = func(*args, **kwargs)
            if result.is_meta:
                self._layouts[key] = result.shape, result.stride(), result.dtype
            return result
        if result_is == "changed":
            return args[0]
        return torch.empty_strided(layout[0], layout[1], dtype=layout[2], device=DEVICE)

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func in _ATTENTION:
            # Of a backward pass the four products of its gradients; what a kernel computes again is not counted. Each
            # query of a causal attention sees the keys before it.
            shapes, passes = [tensor.shape for tensor in args[_ATTENTION[func] :][:3]], 1 + _ATTENTION[func]
            self.flops += int(passes * sdpa_flop_count(*shapes) * (1 - shapes[0][2] / shapes[1][2] / 2))
        elif func is _aten.convolution_backward.default:
            # Gradients of inputs and weights. In torch's formula each channel of a depthwise one meets all others.
            _, inputs, weight, *_, wanted = args
            self.flops += sum(wanted[:2]) * conv_flop_count(inputs.shape, weight.shape, args[0].shape)
        elif formula := flop_registry.get(_OUT_OF_PLACE.get(func._overloadpacket, func._overloadpacket)):
            self.flops += formula(*args, **kwargs, out_val=result)


_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 0,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 1,
}
"""The place of queries, keys and values among the arguments."""
_OUT_OF_PLACE = {_aten.addmm_: _aten.addmm, _aten.baddbmm_: _aten.baddbmm}
_SHAPED_BY_VALUES = {_aten.nonzero.default, _aten.repeat_interleave.Tensor, _aten._unique2.default}
_CHANGE_LAYOUTS = {"resize_", "resize_as_", "set_", "as_strided_", "t_", "transpose_", "squeeze_", "unsqueeze_"}
_FILLED = {_aten.zeros_like, _aten.ones_like, _aten.full_like}
_WITHOUT_VALUES = {_aten.empty, _aten.empty_strided, _aten.zeros, _aten.ones, _aten.full, _aten.randn, _aten.rand}


@functools.cache
def _result_of(func: Any) -> Literal["", "new", "changed"]:
    """Whether the operation returns one tensor with a storage of its own and changes none, or its first argument, whose
    values alone it changes; "" for all others."""
    schema, name = func._schema, func._overloadpacket.__name__
    written = [part.name for part in schema.arguments if part.alias_info]
    if [str(part.type) for part in schema.returns] != ["Tensor"] or not schema.arguments:
        return ""
    if not written and not schema.returns[0].alias_info:
        return "new"
    is_own = written == [schema.arguments[0].name] and name.endswith("_") and name not in _CHANGE_LAYOUTS
    return "changed" if is_own else ""


def _described(value: Any) -> Any:
    """What the shape of an operation's result may depend on: of a tensor its own shape, strides and type."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return (type(value), value) if isinstance(value, float | bool) else value  # 1 is 1.0 and True as a key.


def _makes_much(func: Any, args: Any) -> bool:
    """Whether a tensor of more than a million numbers is made or copied."""
    if func is _aten._to_copy.default:
        return bool(args[0].is_meta and args[0].numel() > _SMALL and known_of(args[0]) is None)
    return func._overloadpacket in _WITHOUT_VALUES and math.prod(args[0]) > _SMALL


def known_of(tensor: Tensor) -> Tensor | None:
    """The values of a tensor: of the host's all, of the device's if they are known."""
    return getattr(tensor, "known", None) if tensor.is_meta else tensor.detach()


def _known_result(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """What the operation gives on known values, if it is of such only, or whatever the values are."""
    if func._overloadpacket in _FILLED and args[0].numel() <= _LARGEST_FILLED:
        return func(torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:], **{**kwargs, "device": None})
    if func is _aten.topk.default and args[0].is_meta:
        return None, even_choice((*args[0].shape[:-1], args[1]), args[0].shape[-1])
    size = 0
    for tensor in tensors:
        if (value := known_of(tensor)) is None:
            return None
        size += value.numel()
    if size > _LARGEST_KNOWN:
        return None
    if not tensors and func._overloadpacket in _WITHOUT_VALUES:
        return None

    return func(*map(_on_host, args), **{name: _on_host(value) for name, value in kwargs.items()})


def _on_host(value: Any) -> Any:
    """An argument of an operation, for the values that are known."""
    if isinstance(value, Tensor):
        return known_of(value)
    if isinstance(value, list | tuple):
        return list(map(_on_host, value))
    return torch.device("cpu") if isinstance(value, torch.device) else value


def even_choice(shape: Sequence[int], number: int) -> Tensor:
    """What routers choose of `number` experts if all get equally many tokens: [..., experts per token] int64."""
    return torch.arange(math.prod(shape)).remainder_(number).reshape(*shape)


def _with_known_shapes(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Masks among the indices become the positions that they choose."""
    if func not in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default):
        return args, kwargs
    indices: list[Any] = []
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            if (mask := known_of(index)) is None:
                raise UnknownValues(func)
            indices += mask.nonzero().unbind(1)
        else:
            indices.append(index)
    return (args[0], indices, *args[2:]), kwargs


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments of an operation, which are nested in lists only."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _pairs(result: Any, known: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(result, Tensor):
        return iter(((result, known),))
    leaves = tree_leaves(result)
    values = tree_leaves(known) if known is not None else [None] * len(leaves)
    return zip(leaves, values, strict=True)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's scaled_dot_product_attention with the kernel that it takes on a CPU, which keeps no scores."""
    assert not enable_gqa
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = kernel(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
    return output


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight, inputs.new_empty(*inputs.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs, weight, _ = ctx.saved_tensors
        return torch.empty_like(inputs), torch.empty_like(weight)


def rms_norm(inputs: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    """torch's rms_norm as a GPU's kernel, which keeps its input and a number for each row, and no copy in float32."""
    output: Tensor = _Norm.apply(inputs, weight)
    return output
