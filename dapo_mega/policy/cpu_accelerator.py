"""Presents the CPU to Megatron-Core as its accelerator, so that one trainer runs on a laptop and on a cluster.

Megatron-Core 0.16 was written for CUDA devices only: it creates tensors on the device "cuda", asks for the
current CUDA device, uses streams and events, and checks tensors by their CUDA type names. On a machine without
CUDA, `install()` answers each of these questions for the CPU. Nothing is installed on a machine with CUDA.

Every replacement is listed below with its cause in Megatron-Core 0.16.1. All of them can go once Megatron-Core
takes its device from configuration.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "eye")

_installed = False


def device() -> torch.device:
    """The device the policy computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


def install() -> None:
    """Make Megatron-Core usable without CUDA; does nothing with CUDA or when called again.

    Must run before any Megatron module is imported: some look devices up at import.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _redirect_factories()
    _replace_cuda_queries()
    _present_cuda_type_names()
    _replace_megatron_rng_access()
    _provide_missing_names()


def _redirect_factories() -> None:
    """torch.zeros(..., device="cuda") and the like: schedules, optimizer, gradient clipping, RNG tracker."""

    def redirected(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def create(*args: Any, **kwargs: Any) -> torch.Tensor:
            wanted = kwargs.get("device")
            if wanted is not None and str(wanted).startswith("cuda"):
                kwargs["device"] = _CPU
            return factory(*args, **kwargs)

        return create

    for name in _FACTORIES:
        setattr(torch, name, redirected(getattr(torch, name)))


class _Stream:
    """Work on the CPU is done in program order, so a stream has nothing to order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return _Event()


class _Event:
    """Always already reached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _replace_cuda_queries() -> None:
    """torch.cuda.current_device() as a tensor's device, streams of gradient communication, memory figures."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.memory_allocated = lambda device=None: 0
    cuda.max_memory_allocated = lambda device=None: 0
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda new_state, device="cuda": torch.set_rng_state(new_state)
    cuda.random.get_rng_state = cuda.get_rng_state
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self


def _present_cuda_type_names() -> None:
    """The optimizers accept parameters whose Tensor.type() is 'torch.cuda.FloatTensor' and the like."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    tensor: Any = torch.Tensor
    tensor.type = type_


def _replace_megatron_rng_access() -> None:
    """tensor_parallel.random reads torch.cuda.default_generators, which is empty without CUDA."""
    from megatron.core.tensor_parallel import random as megatron_random

    module: Any = megatron_random
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def _provide_missing_names() -> None:
    """moe_utils refers to te_general_gemm although it defines it only beside Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    module: Any = moe_utils
    if "te_general_gemm" not in vars(module):
        module.te_general_gemm = None


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Megatron warns about every optional GPU library it does not find; none is meant for a CPU."""
    import logging
    import warnings

    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
