"""Tensors that are on a GPU by name: values are real and on the CPU, storages carry a tag, and an operation that mixes
tags raises as CUDA's does.

`pretending()` holds for this thread and all that it starts, forward and backward; operations are looked at in torch's
dispatcher, whoever calls them. Rules are those of torch 2.13 on CUDA; `emulated/test_devices.py` lists them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dapo_mega.distributed import accelerator
from dapo_mega.megatron import logprob_kernels, logprobs
from dapo_mega.megatron.core.repairs import cpu_accelerator
from tests import te_cpu
from tests.te_cpu.engines import gpu_stand_ins

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")

_COPIES = {"copy_", "_to_copy", "copy", "_foreach_copy_"}
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_TAKE_HOST_SCALARS = {"masked_fill", "masked_fill_", "fill", "fill_", "index_fill", "index_fill_", "lerp", "lerp_"}
"""Besides pointwise operations."""
_REFUSE_HOST_SCALARS = {"clamp", "clamp_", "clamp_min", "clamp_max", "clamp_min_", "clamp_max_"}
_NOT_DETERMINISTIC = {"kthvalue", "put_", "scatter_reduce", "scatter_reduce_", "nll_loss2d_forward"}
_NOT_DETERMINISTIC_FOR_FLOATS = {"histc", "cumsum", "cumsum_"}
_GLOO_TAKES_CUDA = {"allreduce_", "broadcast_"}


class MixedDevicesError(RuntimeError):
    """What CUDA refuses."""


def _storage(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        if type(tensor) is not Tensor and hasattr(tensor, "get_data_tensors"):  # Of FP8: its class has the values.
            tensor = next(part for part in tensor.get_data_tensors() if part is not None)
        return tensor.untyped_storage()


def on_gpu(tensor: Tensor) -> bool:
    """Storages keep their Python object, and so the tag, for as long as there is a tensor of theirs."""
    return getattr(_storage(tensor), "is_on_gpu", False)


def tag(tensor: Tensor, is_on_gpu: bool = True) -> Tensor:
    """Says of the tensor's storage, and so of all its views, where it is; returns the tensor."""
    _storage(tensor).is_on_gpu = is_on_gpu
    return tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Tensor.to(device); its gradient comes back to where the tensor is."""
    wanted = device.type == "cuda"
    if on_gpu(tensor) == wanted:
        return tensor
    result: Tensor = _Move.apply(tensor, wanted)
    return result


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, wanted: bool) -> Tensor:
        ctx.was_on_gpu = on_gpu(tensor)
        with _unwatched():
            return tag(tensor.detach().clone(), wanted)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return moved(gradients[0], CUDA if ctx.was_on_gpu else CPU), None


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        yield


class _Call(threading.local):
    """The call of Python that is under way: whether a tensor that C++ makes from nothing within it is on the GPU."""

    makes_on_gpu = False
    is_kernel = False
    """Within what stands in for compiled code of CUDA, where all that is made is on the GPU."""


_call = _Call()


class _Dispatch(TorchDispatchMode):
    """Sees every operation, in backward passes too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            gpu, host = _by_place(tensors)
            if not _call.is_kernel:
                check(func, args, gpu, host)
        for tensor in tensors:
            if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                with _asked(), self:  # What its class does to its parts is seen.
                    return type(tensor).__torch_dispatch__(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
            known = {_storage(tensor)._cdata for tensor in tensors}
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for tensor in made:
                if _storage(tensor)._cdata not in known:
                    tag(tensor, _call.is_kernel or (bool(gpu) if tensors else _call.makes_on_gpu))
            if tensors and torch._C._current_graph_task_id() != -1:
                _call.makes_on_gpu = bool(gpu)  # A formula's next zeros are where its gradient is.
        return result


class _Facts:
    """What an operation's schema says of it."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.library, self.name = schema.name.split("::")
        self.written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
        is_pointwise = torch.Tag.pointwise in func.tags and self.name not in _REFUSE_HOST_SCALARS
        self.takes_host_scalars = is_pointwise or self.name in _TAKE_HOST_SCALARS


_facts = functools.cache(_Facts)


def _by_place(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those on the GPU and those on the host."""
    places: tuple[list[Tensor], list[Tensor]] = ([], [])
    for tensor in tensors:
        places[not on_gpu(tensor)].append(tensor)
    return places


def check(func: Any, args: Any, gpu: list[Tensor], host: list[Tensor]) -> None:
    """Raises MixedDevicesError where CUDA would raise for the tensors' devices."""
    facts = _facts(func)
    if facts.library == "c10d":
        _check_collective(facts.name, args, gpu, host)
        return
    if not gpu or facts.name in _COPIES:
        return
    if torch.are_deterministic_algorithms_enabled():
        is_float = gpu[0].is_floating_point()
        if facts.name in _NOT_DETERMINISTIC or (is_float and facts.name in _NOT_DETERMINISTIC_FOR_FLOATS):
            raise MixedDevicesError(f"{facts.name} of CUDA does not have a deterministic implementation")
    if facts.name in _INDEXING:
        source, values = args[0], args[2] if len(args) > 2 else args[0]
        is_fine = on_gpu(source) and (on_gpu(values) or values.dim() == 0)
    elif facts.name.startswith("_foreach_"):
        lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
        is_fine = all(len({on_gpu(tensor) for tensor in row}) == 1 for row in zip(*lists, strict=True))
    else:
        is_fine = not host
        if host and facts.takes_host_scalars and all(tensor.dim() == 0 for tensor in host):
            written = [t for i in facts.written for t in tree_leaves(args[i : i + 1]) if isinstance(t, Tensor)]
            is_fine = all(map(on_gpu, written))
    if not is_fine:
        seen = [(tuple(tensor.shape), "cuda" if on_gpu(tensor) else "cpu") for tensor in (*gpu, *host)]
        raise MixedDevicesError(f"{facts.name}: expected all tensors to be on the same device, got {seen}")


def _check_collective(name: str, args: Any, gpu: list[Tensor], host: list[Tensor]) -> None:
    group = next((dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a)), None)
    if group is None or name == "barrier":
        return
    is_nccl = dist.get_backend(group) == "nccl"
    if is_nccl and host:
        raise MixedDevicesError(f"{name}: no backend type associated with device type cpu (an NCCL group)")
    if not is_nccl and gpu and (host or name not in _GLOO_TAKES_CUDA):
        raise MixedDevicesError(f"{name}: gloo does not take tensors of a GPU")


def _device_of_objects(group: dist.ProcessGroup | None = None) -> torch.device:
    return CUDA if dist.get_backend(group) == "nccl" else CPU


def _is_group(value: Any) -> bool:
    return bool(value._type().qualified_name().endswith("ProcessGroup"))


def _named(device: Any) -> torch.device:
    if isinstance(device, int):
        return CUDA
    return torch.device(device)


class _Function(TorchFunctionMode):
    """Answers what Python asks of devices, before torch hears of one that it does not have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None:
            if name == "__get__":
                answer = _ATTRIBUTES.get(getattr(func.__self__, "__name__", ""))
                return func(*args) if answer is None else answer(first)
            if name == "__set__" and func.__self__.__name__ == "grad" and isinstance(args[1], Tensor):
                _check_gradient(first, args[1])
            if name in _METHODS:
                return _METHODS[name](func, *args, **kwargs)
        wanted = kwargs.get("device")
        is_data = name in ("tensor", "as_tensor", "asarray", "new_tensor")
        if wanted is not None:
            wanted = kwargs["device"] = _named(wanted)
        elif is_data and first is not None:
            wanted = CUDA if on_gpu(first) else CPU
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        makes_on_gpu = any(map(on_gpu, tensors)) if wanted is None else wanted.type == "cuda"
        _check_generator(kwargs.get("generator"), makes_on_gpu)
        if wanted is not None and wanted.type == "cuda":
            kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        if name in ("as_tensor", "asarray") and first is not None:
            return moved(func(*args, **kwargs), wanted)
        before, _call.makes_on_gpu = _call.makes_on_gpu, makes_on_gpu
        try:
            result = func(*args, **kwargs)
        finally:
            _call.makes_on_gpu = before
        if wanted is not None and isinstance(result, Tensor):
            tag(result, makes_on_gpu)  # Of a storage of its own.
        return result


def _check_gradient(tensor: Tensor, gradient: Tensor) -> None:
    if on_gpu(tensor) != on_gpu(gradient):
        raise MixedDevicesError("assigned grad has data located on a different device")


def _check_generator(generator: Any, is_on_gpu: bool) -> None:
    if generator is not None and getattr(generator, "is_on_gpu", False) != is_on_gpu:
        kinds = ("cuda", "cpu") if is_on_gpu else ("cpu", "cuda")
        raise MixedDevicesError("expected a '{}' device type for generator but found '{}'".format(*kinds))


class _Generator(torch.Generator):
    """torch.Generator, also of a GPU."""

    is_on_gpu: bool

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls, device=CPU)
        made.is_on_gpu = _named(device).type == "cuda"
        return made


_ATTRIBUTES: dict[str, Callable[[Tensor], Any]] = {
    "device": lambda tensor: CUDA if on_gpu(tensor) else CPU,
    "is_cuda": on_gpu,
    "is_cpu": lambda tensor: not on_gpu(tensor),
}


def _to(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    wanted, rest = kwargs.pop("device", None), []
    other = kwargs.pop("other", None)
    for value in (*args, *([other] if other is not None else [])):
        if isinstance(value, torch.device | str) or type(value) is int:
            wanted = value
        elif isinstance(value, Tensor):
            wanted = CUDA if on_gpu(value) else CPU
            rest.append(value.dtype)
        elif isinstance(value, torch.dtype):
            rest.append(value)
    kwargs.pop("non_blocking", None)
    if rest or kwargs:
        tensor = func(tensor, *rest, **kwargs)
    return tensor if wanted is None else moved(tensor, _named(wanted))


def _to_numpy(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if on_gpu(tensor):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
    return func(tensor, *args, **kwargs)


def _pin(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if on_gpu(tensor):
        raise MixedDevicesError("cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned")
    return tensor.detach().clone()


def _type(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    result = func(tensor, *args, **kwargs)
    return result.replace("torch.", "torch.cuda.") if isinstance(result, str) and on_gpu(tensor) else result


def _multiply(func: Any, tensor: Tensor, other: Tensor, *, out_dtype: Any = None, **kwargs: Any) -> Tensor:
    tensor = tensor.contiguous()  # The CPU's product of bf16 rows that lie apart reads what is between them.
    if out_dtype is None:
        return func(tensor, other, **kwargs)
    # Which only CUDA has.
    return func(tensor.to(out_dtype), other.to(out_dtype), **kwargs)


def _multiply_and_add(
    func: Any, tensor: Tensor, left: Tensor, right: Tensor, *, out_dtype: Any = None, **kwargs: Any
) -> Tensor:
    if out_dtype is not None:  # Which only CUDA has.
        left, right = left.to(out_dtype), right.to(out_dtype)
    return func(tensor, left, right, **kwargs)


def _count(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch.histc counts whole numbers on CUDA only."""
    if tensor.is_floating_point():
        return func(tensor, *args, **kwargs)
    with _unwatched():
        return tag(func(tensor.float(), *args, **kwargs).to(tensor.dtype), on_gpu(tensor))


def _copy_deeply(func: Any, tensor: Tensor, memo: Any) -> Any:
    return tag(func(tensor, memo), on_gpu(tensor))


def _asked() -> contextlib.AbstractContextManager[Any]:
    """torch turns modes of functions off in its own functions, so also in what they call that is written in Python."""
    return contextlib.nullcontext() if _get_current_function_mode() else _Function()


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    with _asked():
        return _RUN_BACKWARD(*args, **kwargs)


_RUN_BACKWARD = torch.autograd._engine_run_backward


_METHODS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cpu": lambda func, tensor, *args, **kwargs: moved(tensor, CPU),
    "cuda": lambda func, tensor, *args, **kwargs: moved(tensor, CUDA),
    "get_device": lambda func, tensor: 0 if on_gpu(tensor) else -1,
    "numpy": _to_numpy,
    "__array__": _to_numpy,
    "mm": _multiply,
    "addmm": _multiply_and_add,
    "histc": _count,
    "pin_memory": _pin,
    "type": _type,
    "__deepcopy__": _copy_deeply,
}


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Tags are followed in this thread and in all that start within, and `accelerator.device()` is the GPU by name."""
    started = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def start(thread: threading.Thread) -> None:
        with _Function(), _Dispatch():
            started(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "_bootstrap_inner", start)
        patch.setattr(torch.autograd, "_engine_run_backward", _run_backward)
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(cpu_accelerator, "_CPU", CUDA)
        patch.setattr(accelerator, "device", lambda: CUDA)
        gpu_stand_ins.have_nccl(patch)
        patch.setattr(gpu_stand_ins, "all_on_gpu", False)
        _replace_kernels(patch)
        _watch_extension(patch)
        patch.setattr(distributed_c10d, "_get_object_coll_device", _device_of_objects)
        patch.setattr(gpu_stand_ins.NcclStandIn, "broadcast", _broadcast)
        patch.setattr(Tensor, "record_stream", lambda self, stream: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: te_cpu.CAPABILITY)
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
        for name in ("is_cuda", "to", "cuda", "pin_memory", "type"):
            patch.setattr(Tensor, name, _ORIGINAL[name])
        patch.setattr(Tensor, "_make_wrapper_subclass", staticmethod(_make_wrapper))
        with _Function(), _Dispatch():
            yield


def _replace_kernels(patch: Any) -> None:
    """Triton's take pointers of a GPU only. Their results are those of the functions that are their reference."""

    def launched(reference: Any) -> Any:
        def launch(logits: Tensor, targets: Tensor, scale: float, vectors: Tensor, with_entropy: bool) -> None:
            logprob_kernels._check_layout(logits, targets, vectors)
            if not all(map(on_gpu, (logits, targets, vectors))):
                raise MixedDevicesError("pointer argument cannot be accessed from Triton (cpu tensor?)")
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(logprobs, "_kernels_for", lambda logits: None)
                reference(logits, targets, scale, vectors, with_entropy)

        return launch

    def chunk_statistics(logits: Tensor, *args: Any) -> None:
        logprobs.chunk_statistics_(logits.clone(), *args)  # The kernel leaves them.

    patch.setattr(logprob_kernels, "chunk_statistics", launched(chunk_statistics))
    patch.setattr(logprob_kernels, "chunk_gradient_", launched(logprobs.chunk_gradient_))


def _watch_extension(patch: Any) -> None:
    """Kernels of Transformer Engine take tensors of the GPU."""

    def watched(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if not all(map(on_gpu, tensors)):
                seen = [(tuple(tensor.shape), str(tensor.device)) for tensor in tensors]
                raise MixedDevicesError(f"transformer_engine_torch.{name} takes tensors of a GPU, got {seen}")
            before, _call.is_kernel = _call.is_kernel, True
            try:
                return function(*args, **kwargs)
            finally:
                _call.is_kernel = before

        return call

    extension = sys.modules.get("tests.te_cpu.extension")
    for name, function in list(vars(extension).items()) if extension else []:
        if callable(function) and not isinstance(function, type) and not name.startswith("_"):
            patch.setattr(extension, name, watched(name, function))


def _broadcast(self: Any, tensor: Tensor, *args: Any) -> Any:
    """Of a group that is no one of torch.distributed's, as those of engines."""
    if not all(map(on_gpu, tree_leaves(tensor))):
        raise MixedDevicesError("broadcast: no backend type associated with device type cpu (an NCCL group)")
    return dist.ProcessGroupGloo.broadcast(self, tensor, *args)


def _make_wrapper(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """A tensor whose class has the values, such as one of FP8; its parts tell where it is."""
    return torch._C.TensorBase._make_wrapper_subclass(*args, device=CPU, **kwargs)


def _original(name: str) -> Any:
    """Of the class that torch's C++ makes; Tensor's may have been replaced."""
    return getattr(torch._C.TensorBase, name)


_ORIGINAL = {name: _original(name) for name in ("is_cuda", "to", "cuda", "pin_memory", "type")}


def _location(storage: Any) -> str | None:
    return "cuda:0" if getattr(storage, "is_on_gpu", False) else None


def _restore(storage: Any, location: str) -> Any:
    if not location.startswith("cuda"):
        return None
    storage.is_on_gpu = True
    return storage


torch.serialization.register_package(5, _location, _restore)
