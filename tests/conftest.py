"""Shared by all tests: the CPU stands in as Megatron's accelerator before any test module imports Megatron."""

from pathlib import Path

import hypothesis
import pytest
import torch

from dapo_mega.distributed import accelerator
from dapo_mega.megatron.core.repairs import cpu_accelerator

cpu_accelerator.install()
torch.set_num_threads(1)
hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if accelerator.has_gpu():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def benchmark_data() -> Path:
    """Folder with the public benchmark files."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"benchmark data is not at {folder}")
    return folder
