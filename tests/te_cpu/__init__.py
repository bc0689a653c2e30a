"""Transformer Engine on an emulated device: its real Python code, on the CPU.

`install()` makes `transformer_engine.pytorch` importable with `extension` in the place of its compiled extension, and
lets the project believe that this process has a Hopper GPU. Call it before the first import of Megatron-Core; it holds
for the whole process. What is not emulated raises NotImplementedError by name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dapo_mega.distributed import accelerator
from dapo_mega.megatron.core.repairs import cpu_accelerator
from tests.te_cpu import rehearsed

VARIABLE = "DAPO_MEGA_TE_CPU"
"""Set it to 1 for processes of the tests that are to `install()`."""
CAPABILITY = (9, 0)
REPOSITORY = Path(__file__).resolve().parents[2]
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_torch_for_te: types.ModuleType | None = None


def sources() -> Path:
    """The folder that tools/install_te_sources.sh fills with Transformer Engine's Python files."""
    return Path(os.environ.get("DAPO_MEGA_TE_SOURCES", REPOSITORY / ".te-sources"))


def version() -> str:
    """Of Transformer Engine's files."""
    (found,) = sources().glob("transformer_engine-*.dist-info")
    return found.name.removeprefix("transformer_engine-").removesuffix(".dist-info")


def is_installed() -> bool:
    """Whether this process has the emulated device."""
    return _torch_for_te is not None


def install() -> None:
    """Emulate the device in this process. May be called again, which reaches modules that were loaded since."""
    global _torch_for_te
    if _torch_for_te is None:
        assert "megatron.core" not in sys.modules, "install() before Megatron-Core is imported"
        os.environ |= {"NVTE_TORCH_COMPILE": "0", "TORCHDYNAMO_DISABLE": "1"}
        _pretend_a_gpu()
        _torch_for_te = _make_torch()
        _load()
        _replace_tensor_methods()
        cpu_accelerator.install()
        _gather_parameters_one_by_one()
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and vars(module).get("torch") is torch:
            vars(module)["torch"] = _torch_for_te


def install_if_asked() -> None:
    """Do so where the environment asks for it."""
    if os.environ.get(VARIABLE) == "1":
        install()


def forget_models() -> None:
    """Forget the largest values of delayed scaling of all models of this process: Transformer Engine would reduce them
    with those of every later model, over groups that the later layout may not enter in step."""
    if is_installed():
        quantization: Any = importlib.import_module("transformer_engine.pytorch.quantization")
        quantization.FP8GlobalStateManager.reset()


def _pretend_a_gpu() -> None:
    """The project builds what it builds on a Hopper GPU; tensors stay on the CPU."""
    replaced: Any = accelerator
    replaced.has_gpu = lambda: True
    replaced.device = lambda: cpu_accelerator._CPU
    replaced.select = lambda local_rank: None
    replaced.stream = lambda: None
    replaced.capability = lambda: CAPABILITY
    replaced.cuda_version = lambda: (12, 9)


def _load() -> None:
    """Load Transformer Engine without its libraries, which its top-level package looks for."""
    # Not among the installed packages: without its libraries its import raises what Megatron does not expect.
    sys.path.append(str(sources()))
    extension = sys.modules["transformer_engine_torch"] = importlib.import_module("tests.te_cpu.extension")
    rehearsed.make_kernels(extension)
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = _Refusing("transformer_engine.pytorch.onnx_extensions")
    spec = importlib.util.find_spec("transformer_engine")
    assert spec, f"no Transformer Engine in {sources()}"
    assert spec.loader
    package = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = package
    with _environment("NVTE_PROJECT_BUILDING", "1"):  # Not to look for CUDA's libraries.
        common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    spec.loader.exec_module(package)
    utils: Any = importlib.import_module("transformer_engine.pytorch.utils")
    utils._empty_tensor = utils._empty_tensor.__wrapped__  # It remembers the device, and a rehearsal has another one.
    distributed: Any = importlib.import_module("transformer_engine.pytorch.distributed")
    distributed._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


class _Refusing(types.ModuleType):
    """A module that only exporting to ONNX needs, with its package of 40 MB."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} is not emulated")

        return refuse


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _make_torch() -> types.ModuleType:
    """The `torch` of Transformer Engine's modules: the one that Megatron gets on the CPU, and answers for Hopper."""
    replacement: Any = cpu_accelerator.make_torch()
    for name in _LIKE:
        setattr(replacement, name, cpu_accelerator.redirected(getattr(torch, name)))
    replacement.device = _Device
    replacement.version = types.SimpleNamespace(cuda="12.9", hip=None, git_version="")
    _answer_for_hopper(replacement.cuda)
    _replace_communication(replacement.distributed)
    result: types.ModuleType = replacement
    return result


def _replace_communication(distributed: Any) -> None:
    real = torch.distributed

    def isend(*args: Any, **kwargs: Any) -> _Once:
        return _Once(real.isend(*args, **kwargs))

    def irecv(*args: Any, **kwargs: Any) -> _Once:
        return _Once(real.irecv(*args, **kwargs))

    def make_operation(operation: Any, *args: Any, **kwargs: Any) -> Any:
        return real.P2POp(getattr(real, operation.__name__), *args, **kwargs)

    @contextlib.contextmanager
    def one_by_one(*args: Any, **kwargs: Any) -> Iterator[_Once]:
        """Not in one call as by NCCL: gloo cannot."""
        yield _Once(None)

    distributed._coalescing_manager = one_by_one
    distributed.isend, distributed.irecv, distributed.P2POp = isend, irecv, make_operation
    distributed.batch_isend_irecv = lambda operations: [_Once(work) for work in real.batch_isend_irecv(operations)]


class _Once:
    """Ring attention waits for a message twice; for one of gloo's that would take for ever."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def _answer_for_hopper(cuda: Any) -> None:
    properties = types.SimpleNamespace(
        major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, total_memory=80 << 30, name="emulated"
    )
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_name = lambda device=None: "emulated"
    cuda.is_bf16_supported = lambda *args: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.device = lambda device: contextlib.nullcontext()


class _DeviceType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.device)


class _Device(metaclass=_DeviceType):
    """torch.device("cuda") is the CPU."""

    def __new__(cls, kind: Any = "cpu", *args: Any) -> Any:
        return cpu_accelerator._CPU if str(kind).startswith("cuda") else torch.device(kind, *args)


_ASK_FOR_CUDA = ("transformer_engine.", "megatron.core.optimizer.cpu_offloading.")


def _replace_tensor_methods() -> None:
    """Modules of Transformer Engine refuse tensors of which `is_cuda` is false, and Megatron's offloading optimizer
    looks for those that it is true of: only they are told otherwise. Tensor.to("cuda") does nothing."""
    is_cuda_of, to_of = torch.Tensor.is_cuda, torch.Tensor.to

    def is_cuda(self: torch.Tensor) -> bool:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return is_cuda_of.__get__(self) or (asking.startswith(_ASK_FOR_CUDA) and not hasattr(self, "is_of_host"))

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(kwargs.get("device"), str | int):
            kwargs["device"] = _Device(kwargs["device"])
        return to_of(self, *args, **kwargs)

    def pin_memory(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        pinned: Any = self.detach()
        pinned.is_of_host = True
        result: torch.Tensor = pinned
        return result

    tensor: Any = torch.Tensor
    tensor.is_cuda = property(is_cuda)
    tensor.to = to
    tensor.pin_memory = pin_memory


def _gather_parameters_one_by_one() -> None:
    """Megatron gathers a bucket of FP8 bytes and one of bfloat16 in one call. gloo mixes up the tensors of a call that
    differ in type; NCCL and a rehearsal do not."""
    from megatron.core.distributed import param_and_grad_buffer

    module: Any = param_and_grad_buffer
    in_one_call = module.dist_all_gather_func

    def all_gather(output: torch.Tensor, input: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        if output.is_meta:
            return in_one_call(output, input, group=group, async_op=async_op)
        return group._allgather_base(output, input).wait()

    module.dist_all_gather_func = all_gather
