"""Rewards that judge nothing right or wrong, and responses that could not be scored, from rollout to evaluation."""

import json
import logging
import threading
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web

from dapo_mega.batching.samples import samples_of_groups
from dapo_mega.errors import InputError, StarvedError, StopRequested
from dapo_mega.evaluation.evaluator import Evaluator
from dapo_mega.rewards import ComposedReward, Score, ScoringFailure, WeightedReward
from dapo_mega.rewards.build import make_reward
from dapo_mega.rewards.sandbox import seccomp
from dapo_mega.rollout.collector import Collector
from dapo_mega.rollout.scoring import ResponseScorer
from tests.unit.rewards.local_server import serving
from tests.unit.rollout.scripted import DrivenCollector, ScriptedEngine
from tests.unit.rollout.test_collector import PROMPTS, config, every_other, partial

FUNCTION = {"function": "my_reward.py:score"}


class Scripted:
    """A reward by a rule over the request's id."""

    def __init__(self, rule):
        self.rule = rule
        self.prompts = []

    def score(self, records):
        self.prompts.extend(record.prompt for record in records)
        return [self.rule(record.request_id) for record in records]

    def close(self):
        pass


def texts(responses):
    return ["text"] * len(responses)


def collector(run, rule, engine=None, reward=None):
    reward = ComposedReward([WeightedReward("function", 1.0, reward or Scripted(rule))], "function")
    scorer = ResponseScorer(run.reward, reward, texts, run.batch.groups_per_step * run.batch.group_size)
    return DrivenCollector(run, PROMPTS, engine or ScriptedEngine(every_other), scorer, (2,))


class Hanging(Scripted):
    """Hangs in every call but `num_calls`, until `stop` is set."""

    def __init__(self, rule, num_calls):
        super().__init__(rule)
        self.num_calls = num_calls
        self.stop, self.has_hung = threading.Event(), threading.Event()

    def score(self, records):
        self.num_calls -= 1
        if self.num_calls < 0:
            self.has_hung.set()
            self.stop.wait(60)
        return super().score(records)


def own(**algorithm):
    return config(reward=FUNCTION, algorithm=algorithm)


def group_numbers(groups):
    """Groups of four by the number of their first request."""
    return [group.trajectories[0].id // 4 for group in groups]


def test_groups_of_equal_scores_are_dropped_where_nothing_is_correct():
    subject = collector(
        own(dynamic_sampling_on="unequal_scores"),
        lambda number: Score(0.25 * (number % 4) if number // 4 % 2 else 0.5, parts={"digits": float(number)}),
    )
    groups, metrics = subject.collect(0)
    assert group_numbers(groups) == [1, 3, 5, 7]
    assert [scored.reward for scored in groups[0].trajectories] == [0, 0.25, 0.5, 0.75]
    assert {fate.outcome for fate in subject.pop_fates()} == {"trained", "surplus", "no_signal"}
    assert metrics["groups/kept_share"] == 0.5
    assert metrics["reward/part_digits"] == np.mean(range(48))
    absent = {"rollout/accuracy_mean", "groups/all_right_share", "groups/all_wrong_share"}
    assert absent & metrics.keys() == set()


def test_groups_on_both_sides_of_a_threshold_are_kept():
    def rule(number):
        return Score((0.1, 0.9, [0.1, 0.2, 0.8, 0.9][number % 4])[number // 4 % 3])

    run = own(dynamic_sampling_on="score_threshold", score_threshold=0.5, max_generation_rounds=4)
    groups, metrics = collector(run, rule).collect(0)
    assert group_numbers(groups) == [2, 5, 8, 11]
    assert (metrics["groups/all_right_share"], metrics["groups/all_wrong_share"]) == pytest.approx((1 / 3, 1 / 3))


def test_a_filter_on_correctness_ends_the_run_at_the_first_response_without():
    with pytest.raises(InputError, match="did not say of every response whether it is correct"):
        collector(own(), lambda number: Score(1.0, None if number % 4 == 1 else True)).collect(0)


def test_starvation_says_that_scores_were_equal():
    with pytest.raises(StarvedError, match="18 with equal scores"):
        collector(own(dynamic_sampling_on="unequal_scores"), lambda number: Score(1.0)).collect(0)


def test_a_group_with_a_response_that_could_not_be_scored_is_dropped_and_counted(caplog):
    def rule(number):
        if number == 5:
            return ScoringFailure("it raised", "Traceback\n  line 7")
        return Score(1.0 if number % 2 else -1.0, bool(number % 2))

    subject = collector(own(), rule)
    with caplog.at_level(logging.WARNING):
        groups, metrics = subject.collect(0)
    assert group_numbers(groups) == [0, 2, 3, 4]
    assert (metrics["rollout/unscored_groups"], metrics["reward/num_failed"]) == (1, 1)
    assert metrics["reward/failed_share"] == 1 / 24
    assert metrics["groups/offered"] == 5
    assert "it raised\nTraceback\n  line 7" in caplog.text
    lost = [fate for fate in subject.pop_fates() if fate.outcome == "dropped"]
    assert [[trajectory.id for trajectory in fate.unscored] for fate in lost] == [[4, 5, 6, 7]]


def test_too_many_failures_end_the_run_with_the_first():
    def rule(number):
        return ScoringFailure(f"failure {number}") if number % 5 == 0 else Score(float(number % 2), number % 2 == 1)

    with pytest.raises(InputError, match=r"2 of 16 responses of a step.*max_failed_share=0\.1.*function: failure 0"):
        collector(own(), rule).collect(0)
    lenient = config(reward={**FUNCTION, "max_failed_share": 0.5}, algorithm={"max_generation_rounds": 20})
    assert len(collector(lenient, rule).collect(0)[0]) == 4


def test_a_run_without_correctness_continues_as_if_uninterrupted():
    def rule(number):
        return Score(float(number % 4), parts={"digits": 1.0})

    run = own(dynamic_sampling_on="unequal_scores")
    whole, begun, resumed = (collector(run, rule) for _ in range(3))
    whole.collect(0)
    begun.collect(0)
    values, arrays = begun.state()
    resumed.load_state(json.loads(json.dumps(values)), arrays)
    (expected, metrics), (found, found_metrics) = whole.collect(1), resumed.collect(1)
    assert group_numbers(found) == group_numbers(expected)
    for scored in (scored for group in found for scored in group.trajectories):
        assert (scored.correct, scored.parts) == (None, {"function": scored.reward, "digits": 1.0})
    assert found_metrics["reward/num_failed"] == metrics["reward/num_failed"]


@pytest.mark.parametrize("make_config", [config, partial])
def test_a_stop_does_not_wait_for_a_reward_that_hangs_and_loses_no_group(make_config):
    def rule(number):
        return Score(float(number % 2), number % 2 == 1)

    run = make_config(reward=FUNCTION)
    hanging = Hanging(rule, num_calls=2)

    def check_stop():
        if hanging.has_hung.is_set():
            raise StopRequested("SIGTERM")

    whole, resumed = collector(run, rule), collector(run, rule)
    engine = ScriptedEngine(every_other)
    stopped = collector(run, rule, engine, hanging)
    engine.check_stop = check_stop
    with pytest.raises(StopRequested):
        stopped.collect(0)
    values, arrays = Collector.state(stopped)  # At once: scripted ones wait for what is being scored.
    hanging.stop.set()
    resumed.load_state(json.loads(json.dumps(values)), arrays)
    for _ in range(2):
        assert sorted(group_numbers(resumed.collect(0)[0])) == sorted(group_numbers(whole.collect(0)[0]))


@pytest.mark.skipif(not seccomp.is_supported(), reason="solutions run on Linux on x86_64 and aarch64 only")
def test_a_judge_and_unit_tests_of_code_reach_the_advantages():
    programs = ["print(2 * int(input()))", "print(42)", "x = int(input())\nprint(x + x)", "input()"]
    tests = json.dumps({"inputs": ["21\n", "4\n"], "outputs": ["42\n", "8\n"]})
    prompts = [replace(prompt, ground_truth=tests) for prompt in PROMPTS]

    async def judge(request):
        question = (await request.json())["messages"][-1]["content"]
        text = "Score: 8" if "int(input" in question else "Score: 2"
        return web.json_response({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    def programs_of(responses):
        """Each response in a group of four has another program."""
        return [f"```python\n{programs[i % 4]}\n```" for i in range(len(responses))]

    with serving(judge) as url:
        run = config(
            reward={
                "components": [
                    {"kind": "code", "allow_code": True, "num_workers": 1},
                    {"kind": "judge", "model": "m", "urls": [url], "weight": 0.5},
                ]
            },
            batch={"groups_per_step": 1, "generation_groups": 1, "mini_batch_groups": 1},
        )
        reward = make_reward(run)
        scorer = ResponseScorer(run.reward, reward, programs_of)
        groups, metrics = DrivenCollector(run, prompts, ScriptedEngine(every_other), scorer, (2,)).collect(0)
        reward.close()
    rewards = np.array([1.4, 0.1, 1.4, 0.1])
    assert [scored.reward for scored in groups[0].trajectories] == pytest.approx(rewards)
    assert [scored.correct for scored in groups[0].trajectories] == [True, False, True, False]
    assert (metrics["reward/part_code"], metrics["reward/part_judge"]) == pytest.approx((0.5, 0.5))
    columns = samples_of_groups(groups, run, 0).columns
    advantages = [columns.advantages[columns.response_mask & (columns.sample_ids == i)] for i in range(4)]
    expected = (rewards - rewards.mean()) / rewards.std(ddof=1)
    assert [values.unique().tolist() for values in advantages] == [[pytest.approx(one, abs=1e-4)] for one in expected]


def evaluation(rule):
    run = config(reward=FUNCTION, evaluation={"samples_per_prompt": 2})
    reward = ComposedReward([WeightedReward("function", 1.0, Scripted(rule))], "function")
    engine = ScriptedEngine(every_other)
    return engine.run(Evaluator(run, PROMPTS[:8], reward, texts, (2,)).run(engine.generate))


def test_an_evaluation_reports_rewards_where_nothing_is_correct():
    metrics = evaluation(lambda number: Score(float(number % 2), parts={"digits": 3.0}))
    assert (metrics["evaluation/reward_mean"], metrics["evaluation/part_digits"]) == (0.5, 3.0)
    assert [name for name in metrics if "_at_" in name] == []


def test_an_evaluation_counts_what_could_not_be_scored():
    metrics = evaluation(lambda number: ScoringFailure("no") if number % 16 == 0 else Score(1.0, number % 2 == 1))
    assert (metrics["evaluation/unscored"], metrics["evaluation/avg_at_k"]) == (1, (1 + 7 * 0.5) / 8)
    # The function names no answers that could vote.
    assert "evaluation/maj_at_k" not in metrics
