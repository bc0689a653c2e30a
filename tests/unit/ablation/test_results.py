"""Means, intervals and verdicts from fake runs, with values computed by hand."""

import json

import numpy as np
import pytest

from dapo_mega.ablation.arms import LADDER
from dapo_mega.ablation.intervals import Estimate, estimate_difference, estimate_mean
from dapo_mega.ablation.outcomes import outcome_of
from dapo_mega.ablation.report import band, markdown, verdict, write_results
from dapo_mega.ablation.results import gather

from .fake_runs import plan_of, train

ROWS = tuple(rung.name for rung in LADDER)


def outcomes(plan):
    return {run.name: outcome_of(run) for run in plan.runs}


def test_the_interval_holds_the_middle_of_the_resampled_means():
    # Means of pairs out of 0 and 1: 0 and 1 with 1/4 each, so 95 % reach from one to the other.
    assert estimate_mean([0.0, 1.0]) == Estimate(0.5, 0.0, 1.0)
    # Of three values the lowest mean is a third of a third of a third likely: 3.7 % is more than 2.5 %.
    assert estimate_mean([0.1, 0.2, 0.6]) == Estimate(pytest.approx(0.3), pytest.approx(0.1), pytest.approx(0.6))
    # One 1 among ten: the share of 1s in ten draws is binomial(10, 0.1), with quantiles 0 and 3 of ten.
    assert estimate_mean([1.0] + [0.0] * 9) == Estimate(pytest.approx(0.1), 0.0, pytest.approx(0.3))
    assert estimate_mean([0.4]) == Estimate(0.4)
    assert estimate_mean([0.4]).excludes_zero is None
    assert estimate_mean([-0.1, -0.2]).excludes_zero
    assert not estimate_mean([-0.1, 0.2]).excludes_zero


def test_a_difference_has_students_interval():
    # Mean 0.2, deviation 0.1 * sqrt(2), error 0.1, times 12.706 for one degree of freedom.
    assert estimate_difference([0.1, 0.3]) == Estimate(
        pytest.approx(0.2), pytest.approx(-1.0706), pytest.approx(1.4706)
    )
    # Error 0.1 / sqrt(3), times 4.303 for two.
    assert estimate_difference([0.1, 0.2, 0.3]).low == pytest.approx(0.2 - 4.303 * 0.1 / 3**0.5)
    assert estimate_difference([0.4]) == Estimate(0.4)
    assert estimate_difference([0.0, 0.0]).excludes_zero is False


def test_equal_rows_are_told_apart_in_one_comparison_of_twenty():
    noise = np.random.default_rng(0).normal(size=(2000, 3))
    assert 0.04 < np.mean([estimate_difference(list(row)).excludes_zero for row in noise]) < 0.06


def test_a_verdict_is_the_interval_of_the_difference():
    shown = [verdict(e) for e in (None, Estimate(0.1), Estimate(0.1, -0.1, 0.2), Estimate(0.1, 0.05, 0.2))]
    assert [*shown, verdict(Estimate(-0.1, -0.2, -0.05))] == ["-", "one seed", "within noise", "better", "worse"]


@pytest.fixture
def plan(tmp_path):
    """Two rows with two seeds: the second is better by 0.1 and 0.3. A method that is finished with one seed only."""
    plan = plan_of(tmp_path, rows=ROWS[:2], methods=("dapo", "grpo"), seeds=(0, 1))
    final = {"naive_grpo": (0.5, 0.4), "overlong_filtering": (0.6, 0.7), "dapo": (0.75, 0.75)}
    for run in plan.runs:
        if run.arm.name in final:
            train(run, final[run.arm.name][run.seed])
        elif run.seed == 0:
            train(run, steps=2, state="failed", exit_status=3)
    return plan


def test_results_are_means_over_finished_seeds(plan):
    naive, filtering, dapo, grpo = gather(plan, outcomes(plan))
    assert naive.before == Estimate(0.25, 0.25, 0.25)
    assert naive.after == Estimate(pytest.approx(0.45), 0.4, 0.5)
    assert naive.gain == Estimate(pytest.approx(0.2), pytest.approx(0.15), pytest.approx(0.25))
    assert naive.versus_previous is None
    assert filtering.versus_previous == estimate_difference([0.6 - 0.5, 0.7 - 0.4])
    assert (naive.response_length, naive.entropy, naive.minutes) == (40.0, 0.25, 2.0)
    assert dapo.versus_previous is None
    assert (grpo.after, grpo.versus_previous, grpo.finished) == (None, None, [])


def test_the_files_have_every_arm_and_run_and_what_is_not_finished(plan):
    text = write_results(plan, outcomes(plan))
    assert (plan.output / "results.md").read_text() == text
    lines = text.splitlines()
    assert "| Naive GRPO | 30 | 0.250 [0.250, 0.250] | 0.450 [0.400, 0.500] | 0.200 [0.150, 0.250] | - | - | 40.0 | 0.125 | 0.250 | 2.0 | 2/2 |" in lines  # fmt: skip  # noqa: E501
    (row,) = (line for line in lines if line.startswith("| + Overlong Filtering"))
    assert "| 0.200 [-1.071, 1.471] | within noise | 40.0" in row
    assert "| grpo | - | - | - | - | - | - | - | - | - | 0/2 |" in lines
    assert "- grpo, seed 0: starved, step 2: why" in lines
    assert "- grpo, seed 1: not begun, step 0" in lines
    assert "over the seeds (not over prompts" in text
    assert (plan.output / "curves.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((plan.output / "results.json").read_text())
    assert (content["seeds"], content["versions"]) == ([0, 1], {"python": "3.11"})
    first = content["arms"][1]["runs"][1]
    assert (content["arms"][1]["name"], first["seed"], first["state"]) == ("overlong_filtering", 1, "finished")
    assert first["overrides"] == list(plan.of_arm(plan.arms[1])[1].overrides)
    assert first["curves"]["policy/entropy"] == [[1, 1.0], [2, 0.5], [3, 1 / 3], [4, 0.25]]
    assert first["curves"]["evaluation/avg_at_k"] == [[0, 0.25], [4, 0.7]]


def test_an_evaluation_without_a_score_is_not_replaced_by_an_earlier_one(plan):
    run = plan.of_arm(plan.arms[0])[0]
    file = run.folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert records[-1].pop("evaluation/avg_at_k") == 0.5
    records[2]["evaluation/avg_at_k"] = 0.9
    file.write_text(
        "".join(
            json.dumps({**record, "evaluation/failed": 3.0}) + "\n"
            if record is records[-1]
            else json.dumps(record) + "\n"
            for record in records
        )
    )
    results = gather(plan, outcomes(plan))
    naive, filtering, *_ = results
    assert (naive.after, naive.gain) == (Estimate(0.4), Estimate(pytest.approx(0.15)))
    assert filtering.versus_previous == Estimate(pytest.approx(0.7 - 0.4))
    assert "- Naive GRPO, seed 0: no accuracy in the last evaluation; it is in no mean" in markdown(results)


def test_a_band_covers_the_steps_that_all_seeds_have():
    runs = [
        [{"step": 0, "a": 1.0}, {"step": 1, "a": 2.0}, {"step": 2, "a": 5.0}],
        [{"step": 0, "a": 3.0}, {"step": 1, "b": 2.0}, {"step": 2, "a": float("nan")}],
    ]
    assert band(runs, "a") == {0: (2.0, 1.0, 3.0)}
    assert band([], "a") == {}
