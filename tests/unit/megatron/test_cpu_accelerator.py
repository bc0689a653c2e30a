"""Megatron-Core without a GPU, beside packages that need one."""

import os
import subprocess
import sys

import torch
from megatron.core import jit

from dapo_mega.megatron.core.repairs import cpu_accelerator
from tests.distributed.launching import REPOSITORY

PROGRAM = """
from dapo_mega.megatron.core.repairs import cpu_accelerator
cpu_accelerator.install()
import megatron.core.optimizer
print(megatron.core.optimizer.Adam.__module__.split(".")[0])
"""


def test_optimizers_for_gpus_are_not_taken_without_one(tmp_path):
    """Both can be imported without a driver, on a cluster's login node, and fail as soon as they are used."""
    for package in ("transformer_engine/pytorch", "apex"):  # Megatron-Core asks for the second where the first is not.
        folder = tmp_path / package / "optimizers"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("class FusedAdam: ...\nclass FusedSGD: ...\n")
    paths = os.pathsep.join([str(REPOSITORY), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "torch", done.stderr


def test_fused_functions_are_not_compiled_also_where_megatron_was_imported_before(monkeypatch):
    monkeypatch.setattr(jit, "jit_fuser", torch.compile)
    with cpu_accelerator._fusions_left_as_they_are():
        pass
    assert jit.jit_fuser(os.getpid).__wrapped__ is os.getpid
