"""Which runs there are, by their resolved configurations: Table 1 row by row, and every preset."""

import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from dapo_mega.ablation.arms import LADDER, METHODS
from dapo_mega.ablation.plan import Request, changed_keys, describe, make_plan
from dapo_mega.ablation.tasks import MODEL, RUN_FILE, TASKS, TUNING_FILE
from dapo_mega.config import PRESETS, RunConfig, SftConfig, load_config
from dapo_mega.data.arithmetic import QUALITIES, ArithmeticTask
from dapo_mega.errors import InputError

from .fake_runs import base_file, plan_of

ROWS = tuple(rung.name for rung in LADDER)
PROJECT = Path(__file__).resolve().parents[3]


def configs_of_rows(folder, *overrides, **sections):
    return [run.config for run in plan_of(folder, *overrides, rows=ROWS, **sections).runs]


def test_the_rows_are_table_1_in_its_order():
    assert [(rung.title, rung.paper) for rung in LADDER] == [
        ("Naive GRPO", 30),
        ("+ Overlong Filtering", 36),
        ("+ Clip-Higher", 38),
        ("+ Soft Overlong Punishment", 41),
        ("+ Token-level Loss", 42),
        ("+ Dynamic Sampling (DAPO)", 50),
    ]


STEPS_OF_TABLE_1 = [
    {"reward.overlong_filtering": (False, True)},
    {"algorithm.policy_loss.high": (0.2, 0.28)},
    {"reward.overlong_punishment": (False, True)},
    {"algorithm.aggregation": ("sequence_mean_token_mean", "token_mean")},
    # Over-sampling is a part of the technique.
    {"algorithm.dynamic_sampling": (False, True), "batch.generation_groups": (None, 12)},
]


@pytest.mark.parametrize(
    "algorithm",
    [{"preset": "dapo"}, {"preset": "grpo", "kl": {"coefficient": 0.1}, "clip_high": 0.4, "advantage": "group_mean"}],
    ids=["DAPO's file", "another method's file"],
)
def test_each_row_changes_one_technique_whatever_the_file_says(tmp_path, algorithm):
    configs = configs_of_rows(tmp_path, algorithm=algorithm)
    assert [changed_keys(*pair) for pair in pairwise(configs)] == STEPS_OF_TABLE_1


def test_the_first_row_is_grpo_without_kl_and_the_last_is_dapo(tmp_path):
    first, *_, last = configs_of_rows(tmp_path)
    algorithm = first.algorithm
    assert (algorithm.advantage.kind, algorithm.aggregation) == ("group_norm", "sequence_mean_token_mean")
    assert (algorithm.policy_loss.low, algorithm.policy_loss.high, algorithm.kl.coefficient) == (0.2, 0.2, 0.0)
    dapo = load_config(RunConfig, base_file(tmp_path))
    assert last.algorithm == dapo.algorithm
    assert changed_keys(dapo.model_copy(update={"evaluation": last.evaluation}), last) == {
        "reward.overlong_filtering": (False, True)
    }


def test_a_row_may_not_be_overridden_but_everything_else_may(tmp_path):
    configs = configs_of_rows(tmp_path, "optimizer.learning_rate=1e-4", "algorithm.clip_low=0.1")
    assert {(c.optimizer.learning_rate, c.algorithm.policy_loss.low) for c in configs} == {(1e-4, 0.1)}
    with pytest.raises(InputError, match=r"algorithm\.policy_loss\.high: the rows of the ladder set this themselves"):
        configs_of_rows(tmp_path, "algorithm.clip_high=0.3")
    with pytest.raises(InputError, match="seed differs from run to run; use"):
        configs_of_rows(tmp_path, "seed=3")


def test_a_method_is_its_preset_whatever_the_file_says(tmp_path):
    algorithm = {"preset": "grpo", "kl": {"coefficient": 0.1}, "clip_high": 0.4, "max_generation_rounds": 7}
    plan = plan_of(tmp_path, methods=METHODS, algorithm=algorithm)
    assert [run.arm.name for run in plan.runs] == list(METHODS)
    assert set(METHODS) == set(PRESETS)
    for run in plan.runs:
        plain = RunConfig.model_validate(
            {"output_dir": "x", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d"}},
             "algorithm": {"preset": run.arm.name, "max_generation_rounds": 7}}
        )  # fmt: skip
        assert run.config.algorithm == plain.algorithm, run.arm.name
        assert (run.config.batch.generation_groups == 12) == plain.algorithm.dynamic_sampling, run.arm.name
        assert run.config.reward == plan.runs[0].config.reward


def test_runs_go_seed_by_seed_into_folders_of_their_own(tmp_path):
    plan = plan_of(tmp_path, rows=ROWS[:2], methods=("grpo",), seeds=(4, 2, 4))
    places = [run.folder.relative_to(tmp_path / "out") for run in plan.runs]
    assert [str(place) for place in places] == [
        f"{arm}/seed{seed}"
        for seed in (4, 2)
        for arm in ("ladder/naive_grpo", "ladder/overlong_filtering", "methods/grpo")
    ]
    assert [run.config.seed for run in plan.runs] == [4, 4, 4, 2, 2, 2]
    assert all(run.config.evaluation.at_start and run.config.evaluation.at_end for run in plan.runs)
    command = plan.runs[0].command(2)
    assert command[5:9] == ["train", "--processes", "2", "--config"]
    assert load_config(RunConfig, Path(command[9]), command[10:]) == plan.runs[0].config


def test_what_cannot_be_started_is_refused_with_the_name_of_the_run(tmp_path):
    with pytest.raises(InputError, match="--rows clip_lower: there is no such; choose of naive_grpo"):
        plan_of(tmp_path, rows=("clip_lower",))
    with pytest.raises(InputError, match="--methods sgd: there is no such"):
        plan_of(tmp_path, methods=("sgd",))
    with pytest.raises(InputError, match=r"Naive GRPO \(naive_grpo\): evaluation is asked for but data.evaluation"):
        plan_of(tmp_path, rows=ROWS, data={"train": {"path": "d"}})
    with pytest.raises(InputError, match="either --config or --task"):
        make_plan(Request(tmp_path, base_file(tmp_path), "long", ROWS, (), (0,), (), 1))


def test_the_description_names_every_arm_and_its_change(tmp_path):
    text = "\n".join(describe(plan_of(tmp_path, rows=ROWS, methods=("dapo", "rloo"), seeds=(0, 1))))
    assert "16 runs (arms: 8, seeds: 2) of 4 steps" in text
    assert "  Naive GRPO (naive_grpo): the first\n" in text
    assert "  + Clip-Higher (clip_higher): algorithm.policy_loss.high 0.2 -> 0.28\n" in text
    assert "algorithm.advantage.kind group_norm -> leave_one_out" in text
    assert "whatever the file says" not in text
    plan = plan_of(
        tmp_path, rows=ROWS, algorithm={"clip_high": 0.3, "kl": {"coefficient": 0.1}, "entropy_coefficient": 0}
    )
    assert "set by each arm, whatever the file says: algorithm.policy_loss, algorithm.kl" in list(describe(plan))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_brings_data_model_and_cold_start(tmp_path, name):
    plan = make_plan(Request(tmp_path, None, name, ROWS, (), (0,), ("num_steps=3",), 2))
    arithmetic, model, tuning = plan.task.commands(plan.cold_start, 2)
    (config,) = {run.config.model.path for run in plan.runs}
    sft = load_config(SftConfig, TUNING_FILE, tuning[tuning.index(str(TUNING_FILE)) + 1 :])
    assert config == f"{sft.output_dir}/hf"
    assert (sft.model.path, sft.data.train.path) == (
        model[model.index("--output") + 1],
        f"{arithmetic[arithmetic.index('--output') + 1]}/demonstrations.parquet",
    )


def test_the_quickstarts_task_is_the_quickstarts():
    script = (PROJECT / "launch" / "quickstart.sh").read_text().replace("\\\n", " ")
    words = shlex.split(script, comments=True)
    for wanted in (TASKS["quickstart"].problems, MODEL):
        assert " ".join(wanted) in " ".join(words)
    assert RUN_FILE.is_file()
    assert not TASKS["quickstart"].tuning
    assert all(override.startswith("critic.") for override in TASKS["quickstart"].training)


def test_long_answers_of_the_long_task_are_cut_off_in_part():
    task = make_plan(Request(Path("x"), None, "long", ROWS[:1], (), (0,), (), 1)).runs[0].config
    limit = task.rollout.max_response_tokens
    words = TASKS["long"].problems
    min_digits, max_digits = (int(words[words.index(f"--{name}-digits") + 1]) for name in ("min", "max"))
    shares = {quality: float(words[words.index(f"--{quality}") + 1]) for quality in QUALITIES}
    answers = ArithmeticTask(min_digits, max_digits).demonstrations(600, [], shares)
    tokens = {
        quality: [len(answer.response) + 1 for answer in answers if answer.quality == quality]
        for quality in ("careful", "verbose")
    }
    assert max(tokens["careful"]) < limit - task.reward.overlong_cache_tokens
    cut_off = sum(n > limit for n in tokens["verbose"]) / len(answers)
    punished = sum(limit - task.reward.overlong_cache_tokens < n <= limit for n in tokens["verbose"]) / len(answers)
    assert 0.2 < cut_off < 0.3
    assert punished > 0.15
