"""Presents the CPU to Megatron-Core as its accelerator, so that one trainer runs on a laptop and on a cluster.

Megatron-Core 0.16 was written for CUDA devices only: it creates tensors on the device "cuda", asks for the
current CUDA device, uses streams and events, and checks tensors by their CUDA type names. On a machine without
CUDA, `install()` makes each of these work on the CPU. It changes nothing on a machine with CUDA.

Megatron's modules get their own `torch`, in which only the names below differ; all other packages, such as
transformers, keep the real one. Every replacement names its cause in Megatron-Core 0.16.1. All can go once
Megatron-Core takes its device from configuration.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from dapo_mega.distributed import accelerator

P = ParamSpec("P")
T = TypeVar("T")

_CPU = torch.device("cpu")
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "eye")
_USED_PARTS = (
    "parallel_state",
    "dist_checkpointing",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.common",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.torch",
    "distributed",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "optimizer_param_scheduler",
    "pipeline_parallel",
    "ssm.gated_delta_net",
    "tensor_parallel.random",
    "transformer.moe.moe_utils",
)

_torch_for_megatron: types.ModuleType | None = None


def install() -> None:
    """Make Megatron-Core usable without CUDA; does nothing with CUDA. May be called again."""
    global _torch_for_megatron
    if accelerator.device().type == "cuda":
        return
    if not accelerator.has_gpu():
        # Megatron takes their optimizers, norms and gradient clipping wherever they can be imported, and these need a
        # GPU: on a cluster's login node, say. What is None here cannot be imported.
        for kernels in ("transformer_engine", "apex", "amp_C"):
            sys.modules.setdefault(kernels, None)  # type: ignore[arg-type]
    with _fusions_left_as_they_are():
        for part in _USED_PARTS:
            importlib.import_module(f"megatron.core.{part}")
    if _torch_for_megatron is None:
        _torch_for_megatron = make_torch()
        _replace_tensor_methods()
        _replace_megatron_names()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and vars(module).get("torch") is torch:
            vars(module)["torch"] = _torch_for_megatron


@contextlib.contextmanager
def _fusions_left_as_they_are() -> Iterator[None]:
    """megatron.core.jit gives fused functions to torch.compile while they are imported, which alone loads its compiler:
    two of the five seconds that a process takes to start. On the CPU none is used but those of gated delta layers,
    which would be compiled for minutes; what was imported before this has its own already."""
    compiler: Any = torch
    original = compiler.compile
    compiler.compile = _as_one_kernel
    try:
        jit: Any = importlib.import_module("megatron.core.jit")
        jit.jit_fuser = compiler.compile
        yield
    finally:
        compiler.compile = original


kernel: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
"""Within it a function runs that a GPU has fused into one kernel."""


def _as_one_kernel(function: Callable[P, T], *_: Any, **__: Any) -> Callable[P, T]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with kernel():
            return function(*args, **kwargs)

    return call


def make_torch() -> types.ModuleType:
    """torch with factories that map device="cuda" to the CPU, and with a `torch.cuda` for the CPU."""
    replacement = _copy_of(torch)
    for name in _FACTORIES:
        setattr(replacement, name, redirected(getattr(torch, name)))
    vars(replacement)["cuda"] = _make_cuda()
    vars(replacement)["distributed"] = _make_distributed()
    return replacement


def _copy_of(module: types.ModuleType) -> types.ModuleType:
    copy = types.ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module))
    # Submodules that torch loads on first use.
    vars(copy)["__getattr__"] = lambda name: getattr(module, name)
    return copy


def redirected(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.zeros(..., device="cuda") and the like: schedules, optimizer, gradient clipping, RNG tracker. Memory is not
    pinned (YaRN's frequencies under context parallelism)."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = kwargs.get("device")
        if wanted is not None and str(wanted).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


class _Order:
    """A stream or an event. Work on the CPU is done in program order: there is nothing to order or to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = __init__

    def record_event(self, event: Any = None) -> _Order:
        return self

    def query(self) -> bool:
        return True


def _make_cuda() -> Any:
    """torch.cuda.current_device() as a tensor's device, streams of gradient communication, memory figures."""
    cuda: Any = _copy_of(torch.cuda)
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.memory_allocated = lambda device=None: 0
    cuda.max_memory_allocated = lambda device=None: 0
    cuda.Stream = cuda.Event = _Order
    cuda.current_stream = lambda device=None: _Order()
    cuda.default_stream = lambda device=None: _Order()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda new_state, device="cuda": torch.set_rng_state(new_state)
    return cuda


def _make_distributed() -> Any:
    """The token dispatcher of experts turns split sizes into lists only when it copies them from a CUDA device
    (moe_utils.maybe_move_tensor_to_cpu); gloo takes lists only. Processes that share experts' matrices have different
    numbers of tokens for them (tensor_parallel.mappings), which NCCL gathers and sums, but not gloo."""
    distributed: Any = _copy_of(torch.distributed)

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **rest: Any,
    ) -> Any:
        def as_list(sizes: Any) -> Any:
            return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

        return torch.distributed.all_to_all_single(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), **rest
        )

    def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **rest: Any) -> Any:
        if _are_alike(tensor_list):
            return torch.distributed.all_gather(tensor_list, tensor, group=group, **rest)
        tensor_list[torch.distributed.get_rank(group)].copy_(tensor)
        for source, part in enumerate(tensor_list):
            torch.distributed.broadcast(part, group=group, group_src=source)
        return None

    def reduce_scatter(output: torch.Tensor, input_list: list[torch.Tensor], group: Any = None, **rest: Any) -> Any:
        if _are_alike(input_list):
            return torch.distributed.reduce_scatter(output, input_list, group=group, **rest)
        for target, part in enumerate(input_list):
            total = part.clone()
            torch.distributed.reduce(total, group=group, group_dst=target)
            if target == torch.distributed.get_rank(group):
                output.copy_(total)
        return None

    distributed.all_to_all_single = all_to_all_single
    distributed.all_gather, distributed.reduce_scatter = all_gather, reduce_scatter
    return distributed


def _are_alike(tensors: list[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1


def _replace_tensor_methods() -> None:
    """Tensor.cuda() in the embedding set-up; the optimizers accept parameters whose Tensor.type() is
    'torch.cuda.FloatTensor' and the like. Methods cannot be replaced for Megatron alone."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # Of a tensor subclass this is called twice, once within the other.
        is_named = isinstance(result, str) and not result.startswith("torch.cuda.")
        return result.replace("torch.", "torch.cuda.") if is_named else result

    tensor: Any = torch.Tensor
    tensor.type = type_
    tensor.cuda = lambda self, *args, **kwargs: self.to(_CPU)


def _replace_megatron_names() -> None:
    """tensor_parallel.random reads torch.cuda.default_generators, which is empty without CUDA. And moe_utils refers to
    a name that it defines only beside Transformer Engine, as does tensor_parallel.random when layer norms are
    recomputed."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.moe import moe_utils

    # A fusion, of which no setting says whether it is used.
    Attention._apply_output_gate = inspect.unwrap(Attention._apply_output_gate)
    recompute: Any = megatron_random
    recompute._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    recompute._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    routing: Any = moe_utils
    if "te_general_gemm" not in vars(routing):
        routing.te_general_gemm = None
    if "FP8GlobalStateManager" not in vars(recompute):
        recompute.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        recompute.activation_recompute_forward = lambda **_: contextlib.nullcontext()
        recompute.fp8_autocast = lambda **_: contextlib.nullcontext()
