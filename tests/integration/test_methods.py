"""Two steps of every method, as users start them: each trains, and records what is its own."""

import pytest

from dapo_mega.config import PRESETS
from dapo_mega.metrics import read_metrics

from .runs import finish, prepare, start

pytestmark = pytest.mark.integration

OVERRIDES = ("num_steps=2", "evaluation.every=0", "evaluation.at_start=false", "checkpoint.save_hf_at_end=false")
OWN_METRICS = {
    "grpo": "policy/kl_to_reference",
    "reinforce_pp": "policy/kl_to_reference",
    "remax": "rollout/greedy_reward_mean",
    "kimi": "policy/squared_log_ratio",
    "sapo": "policy/gate_mean",
    "gspo": "policy/clip_high_share",
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """{preset: records of two steps}; two runs at a time."""
    folder = tmp_path_factory.mktemp("methods")
    file = prepare(folder)
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


def test_methods_differ_in_what_they_learn(records):
    """All begin with the same responses, so equal losses would be equal methods."""
    assert len({round(first["policy/loss"], 9) for first, _ in records.values()}) == len(records) - 1, (
        "reinforce and topr are one on policy"
    )
