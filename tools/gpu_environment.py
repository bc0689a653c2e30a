"""Prints what a report of measurements on a GPU must say: versions, devices and their link.

python tools/gpu_environment.py
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess

import torch

from dapo_mega.cli import run_command
from dapo_mega.distributed import accelerator
from dapo_mega.errors import InputError

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "triton", "sglang", "transformers", "dapo_mega")


def lines() -> list[str]:
    """A line per fact. Raises InputError where there is no GPU."""
    if not accelerator.has_gpu():
        raise InputError(
            f"this process sees no GPU (torch {torch.__version__}); it needs a torch build for CUDA, a driver that "
            "nvidia-smi knows, and CUDA_VISIBLE_DEVICES unset or with a GPU's number"
        )
    found = [f"Python {platform.python_version()}, {platform.platform()}"]
    found += [f"{name} {_version(name)}" for name in _PACKAGES]
    found += [
        f"CUDA of torch {'.'.join(map(str, accelerator.cuda_version()))}, compute capability "
        f"{'.'.join(map(str, accelerator.capability()))}, {torch.cuda.device_count()} device(s)"
    ]
    if not torch.cuda.is_available():
        found.append("EMULATED on the CPU: nothing in this report is of a GPU")
    if shutil.which("nvidia-smi"):
        for question in (["--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv"], ["topo", "-m"]):
            answer = subprocess.run(["nvidia-smi", *question], capture_output=True, text=True, timeout=60, check=False)
            found.append((answer.stdout or answer.stderr).strip())
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


if __name__ == "__main__":
    run_command(lambda: print("\n".join(lines())))
