"""Two steps on the real GSM8K file with a tiny model of random weights: counts, rewards and metrics are right."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dapo_mega.metrics import read_metrics

from .runs import REPOSITORY, finish, prepare_data, start

pytestmark = pytest.mark.integration


def test_two_steps_on_gsm8k(benchmark_data, tmp_path):
    prepare_data(
        "init-model", "--output", tmp_path / "model", "--tokenizer", "byte", "--hidden-size", 32, "--layers", 2,
        "--intermediate-size", 48, "--max-positions", 2048,
    )  # fmt: skip
    output = tmp_path / "run"
    workers = start(
        REPOSITORY / "configs" / "gsm8k.yaml",
        2,
        output,
        f"model.path={tmp_path / 'model'}",
        f"data.train.path={benchmark_data / 'gsm8k-train.jsonl'}",
    )
    finish(workers, output)
    records = read_metrics(output / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        # 4 prompts x 4 responses, all wrong: reward -1, minus up to 1 for responses over 48 of 64 tokens.
        assert record["groups/offered"] == 4
        assert record["rollout/accuracy_mean"] == 0
        assert record["groups/all_wrong_share"] == 1
        assert record["rollout/accuracy_reward_mean"] == -1
        assert -2 <= record["rollout/reward_mean"] < -1
        assert record["rollout/response_length_max"] == 64
        assert 0 < record["rollout/truncated_share"] <= 1
        assert record["rollout/tokens"] == pytest.approx(16 * record["rollout/response_length_mean"])
        assert record["policy/loss_tokens"] == record["rollout/tokens"] / 2
        assert record["rollout/logprob_abs_diff_max"] < 1e-4
        assert record["policy/learning_rate"] == pytest.approx(1e-6)
    state = json.loads((output / "checkpoints" / "step_00000002" / "loop.json").read_text())
    assert state["collector"]["cursor"] == {"seed": 0, "num_prompts": 7473, "epoch": 0, "position": 8}
    assert state["collector"]["next_request_id"] == 32
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    shown = set(events.Tags()["scalars"])
    assert set(records[0]) - {"step"} <= shown
    assert {
        "rollout/reward_mean", "rollout/accuracy_reward_mean", "rollout/response_length_mean", "policy/entropy",
        "rollout/mean_token_probability", "policy/loss", "policy/clip_low_share", "policy/clip_high_share",
        "policy/grad_norm", "policy/learning_rate", "groups/kept_share",
        "groups/all_right_share", "groups/all_wrong_share", "buffer/size", "buffer/staleness_mean",
        "rollout/truncated_share", "time/rollout_s", "time/update_s", "time/step_s", "rollout/tokens_per_s",
        "batch/packing_efficiency", "rollout/logprob_abs_diff_mean", "rollout/logprob_abs_diff_max",
    } <= shown  # fmt: skip
    assert (output / "versions.json").is_file()
    assert (output / "config.yaml").is_file()
