"""What a run's folder says about it: whether the same command has anything left to do there."""

import pytest

from dapo_mega.ablation.outcomes import outcome_of, refuse_other_settings
from dapo_mega.errors import InputError

from .fake_runs import plan_of, train


def only_run(folder, *overrides):
    return plan_of(folder, *overrides, rows=("clip_higher",)).runs[0]


STATES = {
    ("finished", 0, 4): ("finished", True),
    ("finished", 0, 3): ("begun", False),  # num_steps was raised since.
    ("failed", 3, 2): ("starved", True),
    ("failed", 2, 0): ("failed", False),
    ("failed", 1, 2): ("failed", False),
    ("failed", 130, 2): ("failed", False),
    ("stopped", 75, 2): ("begun", False),
    ("running", None, 2): ("begun", False),
}


def test_only_finished_and_starved_runs_are_settled(tmp_path):
    run = only_run(tmp_path)
    assert outcome_of(run).state == "absent"
    wrong = {}
    for (state, status, step), expected in STATES.items():
        train(run, steps=step, state=state, exit_status=status)
        outcome = outcome_of(run)
        if (outcome.state, outcome.is_settled, outcome.step) != (*expected, step):
            wrong[state, status, step] = outcome
    assert wrong == {}


def test_a_run_with_more_steps_than_the_plan_is_refused(tmp_path):
    train(only_run(tmp_path, "num_steps=6"))
    with pytest.raises(InputError, match=r"clip_higher seed 0: .* holds 6 steps, more than num_steps=4; raise num_st"):
        outcome_of(only_run(tmp_path))


def test_settings_that_decide_the_result_may_not_change_between_starts(tmp_path):
    train(only_run(tmp_path))
    refused, accepted = {}, []
    for override in (
        "optimizer.learning_rate=0.5", "batch.group_size=4", "algorithm.max_staleness=3", "evaluation.top_p=0.5",
        "model.path=other", "data.train.path=other", "parallel.world_size=4", "checkpoint.every=3", "num_steps=9",
    ):  # fmt: skip
        plan = plan_of(tmp_path, override, rows=("clip_higher",))
        try:
            refuse_other_settings(plan)
            accepted.append(override)
        except InputError as error:
            refused[override.partition("=")[0]] = str(error)
    assert accepted == ["parallel.world_size=4", "checkpoint.every=3", "num_steps=9"]
    for key, message in refused.items():
        assert message.startswith(f"clip_higher seed 0 in {tmp_path / 'out'}/ladder/clip_higher/seed0 was begun with")
        assert f"({key}: " in message
        assert len(message.splitlines()) == 1


def test_a_run_that_has_not_begun_has_no_settings_to_keep(tmp_path):
    plan = plan_of(tmp_path, "batch.group_size=4", rows=("clip_higher",))
    refuse_other_settings(plan)
    assert outcome_of(plan.runs[0]).state == "absent"
    assert not plan.runs[0].folder.exists(), "looking writes nothing"
