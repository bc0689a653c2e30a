"""The quickstart itself: one command, from random weights to a model that DAPO made better."""

import os
import re
import subprocess
import sys

import pytest

from dapo_mega.metrics import read_metrics

from .runs import REPOSITORY

pytestmark = pytest.mark.integration
FEWER_STEPS = ("num_steps=15", "evaluation.every=15", "evaluation.samples_per_prompt=2")


def quickstart(output, *arguments):
    return subprocess.run(
        ["bash", str(REPOSITORY / "launch" / "quickstart.sh"), "--output", str(output), "--seed", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, "VIRTUAL_ENV": sys.prefix},
    )


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A run that was refused has made its task and model, which the next one finds."""
    return tmp_path_factory.mktemp("runs") / "quick start"


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("--sed", "error: unknown argument '--sed'; usage:"),
        ("algorithm.clip_hi=0.3", "error: unknown key 'algorithm.clip_hi'"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_cold_start(output, argument, line):
    result = quickstart(output, argument)
    assert result.returncode == 2
    assert result.stderr.startswith(line)
    assert len(result.stderr.splitlines()) == 1
    assert not (output / "sft").exists()


@pytest.mark.timeout(1800)
def test_dapo_lifts_accuracy_by_25_points(output):
    # Half of the default, in one process, as two take half as much again of busy cores. How much it then learns
    # differs between kinds of CPU: 0.33 on one, above 0.4 on others.
    result = quickstart(output, "--sft-steps", "600", "--processes", "1", *FEWER_STEPS)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    records = read_metrics(output / "dapo" / "metrics.jsonl")
    before, after = records[0], records[-1]
    assert after["evaluation/avg_at_k"] >= before["evaluation/avg_at_k"] + 0.25
    assert after["evaluation/response_length_mean"] > 1.3 * before["evaluation/response_length_mean"]
    assert after["policy/entropy"] > 0.25 * records[1]["policy/entropy"]
    assert all(record.get("rollout/logprob_abs_diff_max", 0) < 1e-3 for record in records[1:])
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"tensorboard --logdir '{output}/dapo/tensorboard'" in result.stdout
    assert str(output / "curves.png") in result.stdout
    assert re.search(rf"finished \d+ steps, loss 3\.\d+ -> 0\.\d+; the model: {output}/sft/hf;", result.stdout)
