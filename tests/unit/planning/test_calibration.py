"""A plan calibrated by a run, whose metrics are made here from factors on its own plan."""

import json
from dataclasses import replace

import pytest
import yaml

from dapo_mega.commands import plan
from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import InputError
from dapo_mega.metrics.jsonl import encode_line
from dapo_mega.models.families import read_architecture
from dapo_mega.planning.calibration import calibrate
from dapo_mega.planning.estimate import Assumptions, estimate
from dapo_mega.planning.memory import GIB
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.step_time import Calibration, Machine

MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
MACHINE = Machine(1e14, 0.4, 3e11, 5e10, 8, 80 * GIB, 3e12, 0.6)
ASSUMED = Assumptions(MACHINE, 100.0, 200.0, 1, 2, 5 * GIB)
FACTORS = Calibration(3.0, 2.0, 5.0, 7.0, 11.0, 0.25)
LENGTH = 200.0


@pytest.fixture
def run(tmp_path):
    """The folder of a run with two engines and four GPUs that took `FACTORS` times as long as planned."""
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    values = {
        "output_dir": str(tmp_path),
        "num_steps": 1,
        "model": {"path": "absent", "architecture": str(tmp_path / "model.json")},
        "data": {"train": {"path": "d"}, "max_prompt_tokens": 256},
        "rollout": {"max_response_tokens": 768, "placement": "fleet", "fleet": {"rendezvous": "a:1"}},
        "reward": {"overlong_punishment": False},
        "batch": {"groups_per_step": 16, "group_size": 4, "mini_batch_groups": 8, "tokens_per_microbatch": 2048},
        "parallel": {"world_size": 4},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    steps = [record(tmp_path, at_work=float(4 + step % 5)) for step in range(12)]
    # The seventh lives on groups that are held, and generates nothing.
    steps[7] = record(tmp_path, at_work=1.0, idle_share=1.0)
    for name in ("fleet/requests_at_work", "rollout/response_length_mean", "rollout/response_length_std"):
        del steps[7][name]
    write(tmp_path, steps)
    return tmp_path


def write(run, records):
    (run / "metrics.jsonl").write_text("".join(encode_line(step, values) for step, values in enumerate(records)))


def architecture(run):
    return read_architecture(run / "model.json")[1]


def planned(run):
    config = load_config(RunConfig, run / "config.yaml", [])
    arch = architecture(run)
    return estimate(config, RankLayout(arch, config.parallel, 4), replace(ASSUMED, mean_response=LENGTH))


def record(run, at_work, idle_share=0.4):
    """Metrics of a step whose engines decode `at_work` responses at once while they work."""
    expected = planned(run)
    time, speed = expected.time, expected.generation.speed
    stages = {
        "time/score_s": time.scoring * FACTORS.scoring,
        "time/update_s": (time.training - time.scoring - time.besides) * FACTORS.updates,
        "time/weight_sync_s": time.weights * FACTORS.weights,
        "time/rollout_s": 3.0,
        "time/checkpoint_s": 9.0,
    }
    seconds = sum(stages.values()) + FACTORS.besides_s
    a_token_s = speed.base_s * FACTORS.decoding_base / at_work + speed.per_response_s * FACTORS.decoding_per_response
    return stages | {
        "time/step_s": seconds,
        "fleet/idle_share": idle_share,
        "fleet/requests_at_work": at_work,
        "fleet/engines_serving": 2.0,
        "rollout/tokens": 2 * seconds * (1 - idle_share) / a_token_s,
        "rollout/response_length_mean": LENGTH,
        "rollout/response_length_std": LENGTH,
        "groups/offered": 20.0,
        "groups/kept_share": 0.8,
    }


def measured(run):
    return calibrate(run, architecture(run), ASSUMED, 4)


def test_the_factors_of_a_run_are_found_and_its_plan_then_takes_what_the_run_took(run):
    found = measured(run)
    assert vars(found.calibration) == pytest.approx(vars(FACTORS), rel=1e-3)
    assert (found.mean_response, found.kept_share) == pytest.approx((LENGTH, 0.8))
    assert found.spread == pytest.approx(0.8326, abs=1e-3), "the standard deviation is the mean: sqrt(log 2)"
    config = load_config(RunConfig, run / "config.yaml", [])
    arch, machine = architecture(run), replace(MACHINE, calibration=found.calibration)
    again = estimate(config, RankLayout(arch, config.parallel, 4), replace(ASSUMED, machine=machine))
    of_run = record(run, at_work=6.0)
    assert again.time.total == pytest.approx(of_run["time/step_s"] - 3 - 9, rel=1e-3)
    assert 2 / again.generation.speed.step_s(6) * 6 * of_run["time/step_s"] * 0.6 == pytest.approx(
        of_run["rollout/tokens"], rel=1e-3
    )


def test_engines_that_are_always_as_full_give_one_factor_of_decoding(run):
    # All take 7 times as long as planned with 6 responses at once; the factor is right for as many.
    write(run, [record(run, at_work=6.0) for _ in range(12)])
    found = measured(run)
    assert found.keeps_proportion
    assert found.calibration.decoding_base == found.calibration.decoding_per_response
    assert FACTORS.decoding_base < found.calibration.decoding_base < FACTORS.decoding_per_response


def test_a_step_in_which_the_machine_stood_still_does_not_count(run):
    steps = [record(run, at_work=float(4 + step % 5)) for step in range(12)]
    steps[6] = steps[6] | {"time/update_s": 1000.0, "time/step_s": steps[6]["time/step_s"] + 1000.0}
    write(run, steps)
    found = measured(run)
    assert found.calibration.updates == pytest.approx(FACTORS.updates, rel=1e-3)
    assert (found.num_steps, found.num_stalled) == (8, 1)
    assert "evaluations, and 1 of over 3 times the median):" in next(found.lines())


def test_the_command_plans_and_simulates_with_the_factors_and_names_them(run, capsys):
    command = [str(run / "config.yaml"), "--engine-gpus", "2", "--engine-tensor", "1", "--calibrate", str(run)]
    plan.main(command)
    lines = capsys.readouterr().out.splitlines()
    assert "qwen2 with" in lines[0]
    assert "4 GPUs, 2 engines" in lines[0]
    assert "200 tokens a response, spread 0.83, 80% of the groups kept" in lines[2]
    assert any("+ 0.25 besides" in line for line in lines)
    plan.main([*command, "--simulate", "--simulated-steps", "1"])
    assert "mean 200 and spread 0.833 (--length-spread), 80% of the groups kept" in capsys.readouterr().out


def other_model(run):
    (run / "other.json").write_text(json.dumps(MODEL | {"hidden_size": 128}))
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("model.json", "other.json"))


def without_engines(run):
    write(run, [{"time/update_s": 1.0}] * 12)


def too_short(run):
    write(run, [record(run, 4.0), *[record(run, 4.0) | {"evaluation/k": 4.0}] * 5, *[record(run, 4.0)] * 4])


def fine_tuning(run):
    (run / "config.yaml").write_text("output_dir: x\nnum_steps: 1\nbatch_samples: 4\n")


def unknown_size(run):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("world_size: 4", "world_size: null"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_model, "model is qwen2 with .* 4 layers of 128, .* and the plan's is .* 4 layers of 256, .*; calibrate"),
        (without_engines, "no metrics of engines .* calibrate with a run of rollout.placement=fleet or colocated"),
        (too_short, "9 steps, 4 of which count .*; give a run of at least 5 that do"),
        (unknown_size, "neither parallel.world_size in its config.yaml nor its samples say how many GPUs"),
        (lambda run: (run / "metrics.jsonl").unlink(), "has no metrics.jsonl; give one that has trained"),
        (fine_tuning, r"its config.yaml is not of a run with rollouts \(.*batch_samples.*; give one of those"),
        (lambda run: (run / "config.yaml").unlink(), "config.yaml does not exist; give the output_dir of a run"),
    ],
)
def test_a_run_that_says_nothing_about_the_plan_is_refused(run, tmp_path_factory, spoil, message):
    own = tmp_path_factory.mktemp("plan") / "run.yaml"
    own.write_text((run / "config.yaml").read_text())
    spoil(run)
    with pytest.raises(InputError, match=message) as caught:
        plan.main([str(own), "--engine-gpus", "2", "--calibrate", str(run)])
    assert "\n" not in str(caught.value)
