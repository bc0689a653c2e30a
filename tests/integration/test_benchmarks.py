"""Every benchmark at its smallest size: it runs to its end, and prints what its form in golden/benchmarks.txt says."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import te_cpu
from tests.distributed.launching import run_script
from tools.benchmark import NAMES
from tools.cluster_in_a_box import why_impossible
from tools.headless_browser import MISSING, find_browser

from .runs import REPOSITORY

pytestmark = pytest.mark.integration

MODEL = "--hidden 32 --layers 1 --heads 2 --kv-heads 1"
STEPS = f"{MODEL} --longest 32 --mean 10 --rounds 1 --group-size 4"
UPDATES = f"{STEPS} --responses 16"
PACES = "--places 4 --base-ms 1 --per-response-ms 0.1 --mean 10 --longest 32"
SMALLEST = {
    "update": UPDATES,
    "methods": UPDATES,
    "step": f"{STEPS} --prompts 2 --peer-micro-rows 4",
    "mfu": "--device cpu --shape tiny --layers 1 --tokens 64 --segment 64 --warmup 0 --rounds 1",
    "fp8_drift": "--widths 128 --depths 1 --responses 2 --response-tokens 8",
    "packing": "--responses 64 --ranks 2 --mean 40 --longest 200 --budget 400",
    "handover": "--processes 2 --replica-size 2 --responses 2 --repeats 1",
    "gather": "--megabytes 0.2 --bucket-mib 0.1 --repeats 1 --layouts 'CP 2' 'TP 2 x EP 2'",
    "samples": UPDATES,
    "timeline": "--engines 2 --requests 8 --steps 2",
    "page": "--responses 200 --mean 20 --rounds 1",
    "checkpoint": f"{MODEL} --rounds 1",
    "logprobs": "--tokens 32 --hidden 16 --vocabulary 64",
    "prepare": "--rows 200 --distinct 50 --words 5",
    "answers": "--responses 20 --hostile 1 --time-limit-s 0.5",
    "simulation": f"{MODEL} {PACES} --engines 1 --groups 2 --group-size 2 --steps 2 --update-s 0.1 --schedules 1",
    "fleet": "--requests 20 --turns 32 --rounds 1 --engines 2 3 --buckets 2",
    "environments": "--trajectories 40 --turns 3 --slow 2 --call-s 0.01 --rounds 1",
    "endpoint": "--conversations 2 --turns 3",
    "senders": "--layout data=1 --engines 1 --mib 1 --rate 100mbit --rounds 1",
    "weight_sync": "--bucket-mib 1 --rounds 1",  # In test_fleet.py, which has an engine.
}


def form(printed):
    """The text with N for every number, however wide: what is no number, such as nan, stays, and so do the words."""
    text = re.sub(r"\S*/tmp\S*/", "", printed).strip()
    return re.sub(r" +", " ", re.sub(r"[-+]?\d(?:[\d,]*\d)?(\.\d+)?(e[-+]?\d+)?", "N", text))


GOLDEN = (Path(__file__).parent / "golden" / "benchmarks.txt").read_text()
FORMS = {name: form(text) for name, text in re.findall(r"## (\w+)\n(.*?)\n\n\n", GOLDEN, re.DOTALL)}


def printed_by(name, *more, program=("tools/benchmark.py",)):
    """The form of what the benchmark prints, which runs in a process of its own."""
    command = [sys.executable, *program, name, *shlex.split(SMALLEST[name]), *map(str, more)]
    with tempfile.TemporaryDirectory() as folder:  # One of them leaves its runs to look at.
        variables = {**os.environ, "TMPDIR": folder}
        result = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return form(result.stdout)


def test_every_benchmark_is_run_by_a_test():
    assert set(NAMES) == set(SMALLEST) == set(FORMS)


def printed_by_fork(name, folder, *more):
    """The same of a fork of a process that has imported the package."""
    errors = folder / "errors"
    left = ["--output", folder / "runs"] if name == "simulation" else []
    arguments = [name, *shlex.split(SMALLEST[name]), *left, *more]
    status, printed = run_script(REPOSITORY / "tools" / "benchmark.py", arguments, 300, errors)
    assert status == 0, errors.read_text()[-3000:]
    return form(printed)


def test_a_benchmark_prints_its_table(tmp_path):
    special = {"step", "page", "fp8_drift", "senders", "weight_sync"}
    printed = {name: printed_by_fork(name, tmp_path) for name in SMALLEST if name not in special}
    assert printed == {name: FORMS[name] for name in printed}


def test_the_benchmark_of_a_step_measures_both_sides(peer, tmp_path):
    assert printed_by_fork("step", tmp_path, "--peer-python", peer) == FORMS["step"]


@pytest.mark.skipif(find_browser() is None, reason=MISSING)
def test_the_benchmark_of_the_page_prints_its_table():
    assert printed_by("page") == FORMS["page"]


@pytest.mark.skipif(bool(why_impossible()), reason=f"no hosts in a box: {why_impossible()}")
def test_the_benchmark_of_senders_prints_its_table():
    assert printed_by("senders") == FORMS["senders"]


@pytest.mark.skipif(not (te_cpu.sources() / ".installed").is_file(), reason="run tools/install_te_sources.sh")
def test_the_benchmark_of_fp8_drift_prints_its_table():
    program = ("-m", "tests.te_cpu", "tools/benchmark.py")
    assert printed_by("fp8_drift", program=program) == FORMS["fp8_drift"]
