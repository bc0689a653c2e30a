"""What the tests of a session share, as starting or installing it takes longer than what is tested with it: engines,
and an environment with TRL."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import free_port

from .sglang_servers import Launcher, serving_engines, sglang_python, tiny_model


@dataclass(frozen=True)
class SharedEngines:
    """Two real engines of one model, which announce themselves at `rendezvous` (where a test may listen)."""

    launcher: Launcher
    model: Path
    rendezvous: str


@contextmanager
def one_engine(folder: Path, *options: str, **changes: Any) -> Iterator[SharedEngines]:
    """A single engine that nobody else uses, of a model with these changes."""
    model = tiny_model(folder / "model", **changes)
    with serving_engines(model, folder / "served", 1, *options) as launcher:
        yield SharedEngines(launcher, model, rendezvous="")


@pytest.fixture(scope="session")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    """Engines with the weights of `model`, healthy. A test leaves them so; a killed one comes back by itself."""
    sglang_python()
    folder = tmp_path_factory.mktemp("engines")
    model = tiny_model(folder / "model")
    rendezvous = f"127.0.0.1:{free_port()}"
    with serving_engines(model, folder / "served", 2, "--rendezvous", rendezvous) as launcher:
        yield SharedEngines(launcher, model, rendezvous)


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with TRL, which takes all else from this one."""
    folder = tmp_path_factory.mktemp("peer")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages]
    installed = subprocess.run([*command, "trl==1.16.0", "accelerate>=1.10,<2"], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"TRL cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    (packages / "this_environment.pth").write_text(sysconfig.get_path("purelib"))
    return python
