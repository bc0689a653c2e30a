"""Tensors that carry the name of a device. A file of its own, as other tests of the emulated device run beside it."""

import re

import pytest

from tests.integration.sglang_servers import sglang_python

from .suites import DEVICES, has_sources, on_the_emulated_device

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2500), has_sources]


def test_nothing_mixes_tensors_of_host_and_gpu(pytestconfig):
    """In a process of its own: Transformer Engine and Megatron keep tensors of the models before, which have no tag."""
    sglang_python()  # One of the files runs engines.
    whole = ["--whole-table"] if pytestconfig.getoption("whole_table") else []
    result = on_the_emulated_device(*DEVICES, *whole)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) == (40 if whole else 14)
    assert "skipped" not in result.stdout.splitlines()[-1], result.stdout[-500:]
