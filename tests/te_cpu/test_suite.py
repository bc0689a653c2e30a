"""The code of GPUs on an emulated device: runs other tests in processes that have Transformer Engine's Python."""

import os
import re
import subprocess
import sys

import pytest

from tests import te_cpu
from tests.distributed.tiny import FAMILIES

from .suites import DEVICES, has_sources, on_the_emulated_device

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2500), has_sources]

POLICY = "tests/numerics/test_policy_against_transformers.py"
DEEPSEEK = "tests/numerics/test_deepseek.py"
REHEARSAL = "tests/te_cpu/emulated/test_rehearsal.py"
# One update of every family, and of tied layers with biases, and the log-probs behind it.
IN_GATE = (
    *(
        f"{POLICY}::test_one_supervised_step_equals_that_of_transformers[{name}]"
        for name in (*FAMILIES, "qwen2, tied", "llama, all biases, tied")
    ),
    f"{DEEPSEEK}::test_an_update_moves_each_bias_towards_balance",
)


def test_what_needs_a_gpu_passes_on_the_emulated_one(pytestconfig):
    whole = pytestconfig.getoption("whole_table", False)
    paths = [
        "tests/gpu/test_transformer_engine.py",
        "tests/te_cpu/emulated",
        *(f"--ignore={file}" for file in (*DEVICES, REHEARSAL)),
    ]
    result = on_the_emulated_device(*paths, *([POLICY, DEEPSEEK, "--whole-table"] if whole else IN_GATE))
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    print(result.stdout)  # `pytest -s` shows the largest deviations.
    assert f"device: emulated; Transformer Engine {te_cpu.version()}" in result.stdout
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed, result.stdout[-500:]
    assert int(passed[1]) >= (300 if whole else 100)
    skipped = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("Transformer Engine's layers refuse it" in line for line in skipped), skipped
    # Transformer Engine's own code ran: it called what stands in for its extension.
    calls = re.search(r"calls of the emulated extension: (\d+)", result.stdout)
    assert calls
    assert int(calls[1]) > 0


def test_rehearsals_do_what_processes_with_transformer_engines_layers_do(pytestconfig):
    """In a process of its own, as a user's: those that are rehearsed are its forks, and would know of other models."""
    whole = pytestconfig.getoption("whole_table", False)
    result = on_the_emulated_device(REHEARSAL, *["--whole-table"] * whole)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    outcomes = {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|skipped)", result.stdout)}
    # Of gpt-oss and gated delta layers, which older versions of Transformer Engine and Megatron-Core do not compute.
    all_, newer = (23, 4) if whole else (10, 1)
    assert outcomes == {"passed": all_ - newer, "skipped": newer} if "refuse it" in result.stdout else {"passed": all_}


@pytest.mark.parametrize("learning", [pytest.param("learn-fp8", marks=pytest.mark.whole_table), None])
def test_the_first_hour_on_a_gpu_goes_through_on_the_emulated_one(tmp_path, learning):
    """That FP8 learns is shown by emulated/test_engines.py in less time."""
    steps = ("environment", "mfu-tiny-delayed", *filter(None, [learning]))
    command = ["bash", "tools/gpu_first_hour.sh", "--output", str(tmp_path / "hour"), "--only", ",".join(steps)]
    python = f"{sys.executable} -m tests.te_cpu"
    environment = {**os.environ, "PYTHON": python, "SMALL": "1", "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""}
    result = subprocess.run(
        command, cwd=te_cpu.REPOSITORY, env=environment, capture_output=True, text=True, timeout=1100
    )
    report = (tmp_path / "hour" / "report.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    assert {row[0]: row[2] for row in rows[1:]} == dict.fromkeys(steps, "passed"), result.stdout + report
    assert result.returncode == 0
    assert "FP8 delayed" in report
    assert "compute capability 9.0" in report
    assert "EMULATED" in report
    assert ("step 2/2" in report) == bool(learning)
