"""Two steps of every method, as users start them: each trains, and records what is its own."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from dapo_mega.config import PRESETS
from dapo_mega.metrics import read_metrics
from dapo_mega.samples.table import account_of

from .runs import decisive, finish, kill_when, prepare, start, steps_done

pytestmark = pytest.mark.integration
DISTURBED = Path(__file__).with_name("disturbed_trainer.py")

OVERRIDES = (
    "num_steps=2", "evaluation.every=0", "evaluation.at_start=false", "checkpoint.save_hf_at_end=false",
    "samples.groups_per_step=5",
)  # fmt: skip
OWN_METRICS = {
    "grpo": "policy/kl_to_reference",
    "reinforce_pp": "policy/kl_to_reference",
    "remax": "rollout/greedy_reward_mean",
    "ppo": "critic/explained_variance",
    "kimi": "policy/squared_log_ratio",
    "sapo": "policy/gate_mean",
    "gspo": "policy/clip_high_share",
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    return folder, prepare(folder)


@pytest.fixture(scope="module")
def records(task):
    """{preset: records of two steps}; two runs at a time."""
    folder, file = task
    presets = [preset for preset in PRESETS if preset != "dapo"]  # All other tests run DAPO.
    for pair in zip(presets[::2], [*presets[1::2], None], strict=False):
        running = {p: start(file, 1, folder / p, f"algorithm.preset={p}", *OVERRIDES) for p in pair if p}
        for preset, workers in running.items():
            finish(workers, folder / preset)
    return {preset: read_metrics(folder / preset / "metrics.jsonl") for preset in presets}


def test_every_method_takes_two_steps_and_moves_the_weights(records):
    for preset, (first, second) in records.items():
        assert (first["step"], second["step"]) == (1, 2), preset
        assert min(first["policy/grad_norm"], second["policy/grad_norm"]) > 0, preset
        assert second["rollout/logprob_abs_diff_mean"] < 1e-4, preset
        assert (first["rollout/response_length_mean"], second["policy/loss"]) != (0, 0), preset
        if preset in OWN_METRICS:
            assert OWN_METRICS[preset] in second, preset


def test_as_many_groups_are_recorded_as_wanted_with_what_training_computed(task, records):
    folder, _ = task
    num_trained = 0
    for preset in records:
        table = pq.read_table(folder / preset / "samples" / "step_00000002.parquet")
        account = account_of(table.schema.metadata)
        assert (account["recorded_groups"], account["all_recorded"]) == (5, False), preset
        assert len(set(table["group"].to_pylist())) == 5, preset
        for row in table.to_pylist():
            if row["outcome"] == "trained" and not row["is_greedy"]:
                num_trained += 1
                assert len(row["trainer_logprobs"]) == row["length"], preset
                assert not np.isnan(row["trainer_logprobs"]).any(), preset
            else:
                assert row["trainer_logprobs"] is None, preset
    assert num_trained


# Surplus groups with greedy responses; a critic with its optimizer, and an entropy bonus that follows a target.
STATEFUL = {
    "remax": ["algorithm.dynamic_sampling=true", "algorithm.max_staleness=2"],
    "ppo": ["critic.warmup_steps=2", "algorithm.entropy_target=3.43", "critic.pretraining_steps=1"],
}


@pytest.mark.parametrize("preset", STATEFUL)
def test_what_only_a_method_has_survives_a_kill(task, monkeypatch, preset):
    folder, file = task
    overrides = [
        f"algorithm.preset={preset}", *STATEFUL[preset], "num_steps=5", "evaluation.every=0",
        "evaluation.at_start=false", "checkpoint.every=1",
    ]  # fmt: skip
    whole, killed = folder / f"whole_{preset}", folder / f"killed_{preset}"
    finish(start(file, 1, whole, *overrides), whole)
    monkeypatch.setenv("DISTURBANCE", "waits after step 3")
    kill_when(start(file, 1, killed, *overrides, script=DISTURBED), lambda: steps_done(killed) == 3)
    finish(start(file, 1, killed, *overrides), killed)
    expected, got = (read_metrics(run / "metrics.jsonl") for run in (whole, killed))
    for before, after in zip(expected, got, strict=True):
        assert decisive(after) == decisive(before), f"step {before['step']}"
    if preset == "ppo":
        assert "policy/loss" not in expected[0], "the critic learns alone at first"
        assert {0.0, 0.0001} <= {record["policy/entropy_coefficient"] for record in expected}
    exports = {"hf", *(["hf_critic"] if preset == "ppo" else [])}
    assert exports == {path.name for path in whole.iterdir() if path.name.startswith("hf")}
    for export in exports:
        final, wanted = (load_file(run / export / "model.safetensors") for run in (killed, whole))
        assert all((final[name] == tensor).all() for name, tensor in wanted.items()), export
