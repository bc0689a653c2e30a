"""Shared by all tests: the CPU stands in as Megatron's accelerator before any test module imports Megatron."""

import gc
import shlex
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.distributed.launching import share_fork_server

hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")

REPOSITORY = Path(__file__).resolve().parents[1]

# Tests that need the emulated device are collected where it is: in the processes that te_cpu/suites.py starts.
collect_ignore = [] if "transformer_engine_torch" in sys.modules else ["te_cpu/emulated"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole-table", action="store_true", help="also the layouts and models that the gate leaves out: 20 minutes"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Not in a process that leaves all tests to others (pytest -n): importing torch and Megatron is all it would do. It
    starts what they fork."""
    if config.getoption("numprocesses", None):
        share_fork_server()
        return
    gc.disable()  # Imports make little garbage, and take a fifth less.
    # By te_cpu/plugin.py, or as workers are forks.
    prepared = not {"transformer_engine_torch", "tests.distributed.preloaded"}.isdisjoint(sys.modules)
    assert prepared or "megatron.core" not in sys.modules, "a conftest.py below this one has imported Megatron already"
    import torch

    from dapo_mega.megatron.core.repairs import cpu_accelerator

    cpu_accelerator.install()
    torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Workers are forks of what `share_fork_server` has started."""
    for spec in specs:
        spec.python = shlex.join([sys.executable, str(REPOSITORY / "tests" / "distributed" / "forked_worker.py")])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from dapo_mega.distributed import accelerator

    if not config.getoption("whole_table"):
        left_out = [item for item in items if item.get_closest_marker("whole_table")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole_table")]
    for item in items if not accelerator.has_gpu() else []:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """pytest searches ten times at its end for garbage that complains, of which the tests' own is long gone."""
    gc.freeze()


@pytest.fixture(scope="session")
def benchmark_data() -> Path:
    """Folder with the public benchmark files."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"benchmark data is not at {folder}")
    return folder


@pytest.fixture(scope="module", autouse=True)
def collect_only_what_is_new() -> None:
    """Megatron collects garbage at each checkpoint, which looks at all that is imported: a third of a second."""
    from dapo_mega.cli import look_past_what_is_there

    gc.collect()
    look_past_what_is_there()
