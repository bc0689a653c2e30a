"""What a run computes stays what it was: a curve recorded once, and a checkpoint of an earlier version that continues
on it. A change that is not about numerics must not move them.

`python -m tests.integration.test_golden_curve` records both anew, into `golden/`.
"""

import json
import shutil
import tarfile
import tempfile
from pathlib import Path

import pytest

from dapo_mega.metrics import read_metrics

from .runs import finish, prepare, start

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

GOLDEN = Path(__file__).parent / "golden"
CURVE = GOLDEN / "curve.json"
CHECKPOINT_STEP = 4
NUM_STEPS = 10
NAMES = (
    "policy/loss",
    "policy/grad_norm",
    "policy/entropy",
    "policy/clip_high_share",
    "policy/kl_to_old",
    "policy/loss_tokens",
    "rollout/reward_mean",
    "rollout/response_length_mean",
    "groups/offered",
    "buffer/size",
)
OVERRIDES = (
    f"num_steps={NUM_STEPS}", "evaluation.at_start=false", "evaluation.every=0", "batch.epochs=2",
    "checkpoint.asynchronous=false", "checkpoint.keep_last=1",
)  # fmt: skip


def run(folder, output, *overrides, options=()):
    finish(start(folder / "config.yaml", 1, output, *OVERRIDES, *overrides, *options), output)


def curve(output):
    return {
        str(record["step"]): {name: record[name] for name in NAMES if name in record}
        for record in read_metrics(output / "metrics.jsonl")
        if record["step"]
    }


def assert_on_the_curve(found, first):
    expected = json.loads(CURVE.read_text())
    assert [int(step) for step in found] == list(range(1, NUM_STEPS + 1))
    for step in range(first, NUM_STEPS + 1):
        # Sums are taken in another order by another CPU's kernels.
        assert found[str(step)] == pytest.approx(expected[str(step)], rel=1e-3, abs=1e-6), f"step {step}"


@pytest.fixture
def recorded(tmp_path):
    """The task of the curve, and the run that was kept after some of its steps."""
    with tarfile.open(GOLDEN / "run.tar.gz") as archive:
        archive.extractall(tmp_path)  # Without a filter, which Python 3.11.0 to 3.11.3 does not know.
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("FOLDER", str(tmp_path)))
    return tmp_path


def test_a_run_follows_the_recorded_curve(recorded):
    run(recorded, recorded / "anew")
    assert_on_the_curve(curve(recorded / "anew"), 1)


def test_a_run_of_an_earlier_version_continues_on_the_curve(recorded):
    run(recorded, recorded / "run", options=["--accept-changes"])
    assert_on_the_curve(curve(recorded / "run"), CHECKPOINT_STEP + 1)


def record():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = prepare(folder)
        run(folder, folder / "whole")
        CURVE.write_text(json.dumps(curve(folder / "whole"), indent=1) + "\n")
        run(folder, folder / "run", f"num_steps={CHECKPOINT_STEP}", "checkpoint.save_hf_at_end=false")
        shutil.rmtree(folder / "run" / "tensorboard")
        config.write_text(config.read_text().replace(str(folder), "FOLDER"))
        with tarfile.open(GOLDEN / "run.tar.gz", "w:gz") as archive:
            for part in ("config.yaml", "data", "model", "run"):
                archive.add(folder / part, part)


if __name__ == "__main__":
    record()
