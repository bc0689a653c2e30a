"""The device that this process computes on. Nothing else in the project asks torch for GPUs.

Import the module and call `accelerator.device()`: tests replace these functions, to run the code of GPUs on an emulated
one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def has_gpu() -> bool:
    """Whether the policy is built as for a GPU: Transformer Engine layers, fused kernels, FP8, NCCL."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def select(local_rank: int) -> None:
    """Make the GPU with this number the current one of this thread; does nothing without GPUs."""
    if has_gpu():
        torch.cuda.set_device(local_rank)


def free_cached_memory() -> None:
    """Give what torch keeps of freed memory to other processes."""
    if has_gpu():
        torch.cuda.empty_cache()


def stream() -> torch.cuda.Stream | None:
    """A stream beside the one that computes; None where there is no GPU."""
    return torch.cuda.Stream() if has_gpu() else None


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is started in this block runs on the stream, after what is started already. None: as ever."""
    if stream:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def wait_for(stream: torch.cuda.Stream | None) -> None:
    """What is started from now on begins after what is on the stream."""
    if stream:
        torch.cuda.current_stream().wait_stream(stream)


def cuda_version() -> tuple[int, int]:
    """The version of CUDA that torch was built for, such as (12, 9). Call it only with a GPU."""
    major, minor = str(torch.version.cuda).split(".")[:2]
    return int(major), int(minor)


def capability() -> tuple[int, int]:
    """The CUDA compute capability of the current GPU, such as (9, 0) for Hopper. Call it only with a GPU."""
    return torch.cuda.get_device_capability()
