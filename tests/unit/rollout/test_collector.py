"""Dynamic sampling's loop: groups arrive in order, failures are counted, starvation says why, state continues."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from dapo_mega.batching.samples import samples_of_groups
from dapo_mega.config import RunConfig
from dapo_mega.data import PromptCursor
from dapo_mega.errors import InputError, StarvedError, StopRequested
from dapo_mega.metrics.timeline import Activity
from dapo_mega.rewards.build import make_reward
from dapo_mega.rollout.scoring import ResponseScorer
from dapo_mega.types import Prompt

from .scripted import DrivenCollector, ScriptedEngine

PROMPTS = [Prompt(i, f"p{i}", np.array([i + 1, 7], np.int32), str(i)) for i in range(20)]
TOKEN_OF_TEXT = {"right": 1, "wrong": 2}


def config(**changes):
    values = {
        "output_dir": "x",
        "num_steps": 4,
        "seed": 5,
        "model": {"path": "m"},
        "data": {"train": {"path": "d"}, "max_prompt_tokens": 8},
        "rollout": {"max_response_tokens": 16},
        "reward": {"overlong_cache_tokens": 4},
        "batch": {
            "groups_per_step": 4,
            "group_size": 4,
            "generation_groups": 6,
            "mini_batch_groups": 2,
            "tokens_per_microbatch": 64,
        },
        "algorithm": {"max_generation_rounds": 3},
    }
    for section, given in changes.items():
        values[section] = {**values.get(section, {}), **given}
    return RunConfig.model_validate(values)


class HookedScorer(ResponseScorer):
    """Calls `before` with what is to be scored."""

    before = staticmethod(lambda asked: None)

    def score(self, asked):
        self.before(asked)
        return super().score(asked)


def collector(engine, run, prompts=PROMPTS, before_scoring=None, activity=None):
    def decode(responses):
        assert responses, "tokenizers make one empty text of no responses"
        # The scripted token says whether the answer is the truth; which truth, the request's prompt decides.
        # Integers: a comparison that needs no worker, as nothing closes the verifier.
        return [f"Answer: {1 if tokens[0] == 1 else 0}" for tokens in responses]

    prompts = [replace(prompt, ground_truth="1") for prompt in prompts]
    scorer = HookedScorer(run.reward, make_reward(run), decode, run.batch.groups_per_step * run.batch.group_size)
    scorer.before = before_scoring or scorer.before
    return DrivenCollector(run, prompts, engine, scorer, (2,), activity or Activity(lambda: 0.0))


def every_other(prompt, request_id):
    return request_id % 2 == 0


def test_a_step_holds_n_mixed_groups_in_cursor_order_and_surplus_waits():
    subject = collector(ScriptedEngine(every_other), config())
    groups, metrics = subject.collect(0)
    assert len(groups) == 4
    assert len(subject.buffer) == 2
    assert metrics["buffer/size"] == 2
    assert metrics["groups/kept_share"] == 1.0
    order = [g.prompt.index for g in [*groups, *subject.buffer.groups]]
    fresh = collector(ScriptedEngine(every_other), config())
    assert order == fresh.sampler.next(6)


def test_the_next_round_asks_less_when_surplus_is_held():
    engine = ScriptedEngine(every_other)
    subject = collector(engine, config())
    subject.collect(0)
    first = len(engine.asked)
    subject.collect(1)
    # Two of four groups are held: half of the six prompts are asked.
    assert first == 6 * 4
    assert len(engine.asked) - first == 3 * 4


def test_a_group_whose_request_fails_is_dropped_counted_and_never_scored():
    engine = ScriptedEngine(every_other, fails=lambda request: request.request_id == 1)
    subject = collector(engine, config())
    groups, metrics = subject.collect(0)
    assert metrics["rollout/dropped_groups"] == 1
    assert metrics["groups/offered"] == 5
    assert metrics["rollout/accuracy_mean"] == 0.5
    assert all(r.id >= 4 for g in [*groups, *subject.buffer.groups] for r in g.trajectories)


def test_every_group_of_a_step_went_to_exactly_one_place():
    # Prompts 0 to 3 are mixed, 4 to 11 all right, the others all wrong; one request fails.
    engine = ScriptedEngine(
        lambda prompt, request_id: prompt < 12 and (prompt > 3 or request_id % 2 == 0),
        fails=lambda request: request.request_id == 33,
    )
    subject = collector(engine, config(algorithm={"max_generation_rounds": 9}, batch={"groups_per_step": 2}))
    seen, fates = set(), []
    for version in range(2):
        groups, metrics = subject.collect(version)
        engine.version = version + 1
        fates = subject.pop_fates()
        assert [fate.group for fate in fates if fate.outcome == "trained"] == groups == [f.group for f in fates[:2]]
        counts = Counter(fate.outcome for fate in fates)
        offered = len([fate for fate in fates if fate.group and fate.group.trajectories[0].id not in seen])
        assert offered == metrics["groups/offered"]
        assert counts["all_right"] == round(metrics["groups/all_right_share"] * offered)
        assert counts["all_wrong"] == round(metrics["groups/all_wrong_share"] * offered)
        assert counts["dropped"] == metrics["rollout/dropped_groups"]
        seen |= {fate.group.trajectories[0].id for fate in fates if fate.group}
    assert subject.pop_fates() == []
    dropped = next(fate for fate in fates if fate.outcome == "dropped") if counts["dropped"] else None
    assert dropped is None or (dropped.group is None and len(dropped.unscored) < 4)


def test_stale_surplus_is_recorded_as_stale():
    engine = ScriptedEngine(every_other)
    subject = collector(engine, config(algorithm={"max_staleness": 1}))
    subject.collect(0)
    surplus = [fate.prompt.index for fate in subject.pop_fates() if fate.outcome == "surplus"]
    engine.version = 5
    subject.collect(5)
    assert [fate.prompt.index for fate in subject.pop_fates() if fate.outcome == "stale"] == surplus
    assert len(surplus) == 2


def test_starvation_names_the_acceptance_rate():
    # Only prompt 0 is ever mixed.
    engine = ScriptedEngine(lambda prompt, request_id: prompt == 0 and request_id % 2 == 0)
    subject = collector(engine, config())
    beginning = subject.state()[0]
    message = r"after 3 generation rounds.*acceptance rate \d+\.\d%.*all wrong.*dynamic_sampling_on=unequal_scores"
    with pytest.raises(StarvedError, match=message):
        subject.collect(0)
    assert subject.state()[0] == beginning, "what is saved now is the last completed step"
    fates = Counter(fate.outcome for fate in subject.pop_fates())
    assert fates == {"surplus": 1, "all_wrong": subject.buffer.counts.all_wrong}


def test_stale_surplus_is_dropped_and_counted():
    engine = ScriptedEngine(every_other)
    subject = collector(engine, config(algorithm={"max_staleness": 1}))
    subject.collect(0)
    engine.version = 5
    _, metrics = subject.collect(5)
    assert metrics["buffer/stale_dropped"] == 2


def test_a_restored_collector_continues_as_if_nothing_had_happened():
    run = config()
    whole = collector(ScriptedEngine(every_other), run)
    whole.collect(0)
    values, arrays = whole.state()
    expected, _ = whole.collect(1)
    resumed = collector(ScriptedEngine(every_other), run)
    resumed.load_state(json.loads(json.dumps(values)), arrays)
    got, _ = resumed.collect(1)
    assert [g.prompt.index for g in got] == [g.prompt.index for g in expected]
    ids = [[r.id for r in g.trajectories] for g in got]
    assert ids == [[r.id for r in g.trajectories] for g in expected]


OTHER_REWARDS = {
    "components": [{"kind": "answer"}], "source": "random", "extraction": "boxed", "numeric_tolerance": 0.1,
    "correct": 2.0, "incorrect": -2.0, "overlong_punishment": False, "overlong_cache_tokens": 5,
    "overlong_filtering": True, "length_weight": 0.1, "length_phase_in": [0, 2], "time_limit_s": 3.0,
}  # fmt: skip


def test_held_groups_that_changed_settings_would_not_make_are_left_out(caplog):
    """They would break the mini-batches of a step, be trained on against the new filter or for the old reward, or be
    compared with the trainer's probabilities at another temperature."""
    run = config()
    subject = collector(ScriptedEngine(every_other), run)
    subject.collect(0)
    state = subject.state()
    changes = {
        "nothing": ({}, 2),
        "larger groups": ({"batch": {"group_size": 6}}, 0),
        "shorter responses": ({"rollout": {"max_response_tokens": 8}}, 0),
        "longer responses": ({"rollout": {"max_response_tokens": 40}}, 0),
        "another temperature": ({"rollout": {"temperature": 0.9}}, 0),
        "top_p": ({"rollout": {"top_p": 0.9}}, 0),
        "top_k": ({"rollout": {"top_k": 5}}, 0),
        "greedy baselines": ({"algorithm": REMAX}, 0),
        "routes": ({"rollout": {"routing_replay": True}}, 0),
        **{f"reward.{name}": ({"reward": {name: value}}, 0) for name, value in OTHER_REWARDS.items()},
        "what changes no reward": ({"reward": {"num_workers": 1, "max_failed_share": 0.5}}, 2),
        "another filter": ({"algorithm": {"dynamic_sampling_on": {"kind": "score_threshold", "threshold": 2.0}}}, 0),
        "no filter": ({"algorithm": {"dynamic_sampling": False}}, 2),
    }
    for name, (changed, num_held) in changes.items():
        resumed = collector(ScriptedEngine(every_other), config(**changed))
        caplog.clear()
        resumed.load_state(*state)
        assert len(resumed.buffer) == num_held, name
        assert [f"{2 - num_held} of the 2 groups" in message for message in caplog.messages] == [True] * (num_held < 2)
    del state[0]["collector"]["made_with"]["sampling.routing_replay"]  # Earlier versions had no such key.
    for replays, num_held in ((False, 2), (True, 0)):
        resumed = collector(ScriptedEngine(every_other), config(rollout={"routing_replay": replays}))
        resumed.load_state(*state)
        assert len(resumed.buffer) == num_held
    resumed = collector(ScriptedEngine(every_other), config(batch={"group_size": 6}))
    resumed.load_state(*state)
    assert {len(group.trajectories) for group in resumed.collect(1)[0]} == {6}


def test_groups_in_flight_of_another_size_are_not_continued(caplog):
    subject = collector(ScriptedEngine(every_other, order=straggler), partial())
    subject.collect(0)
    values, arrays = subject.state()
    assert values["in_flight"]
    for size, num_in_flight in ((4, len(values["in_flight"])), (6, 0)):
        run = partial()
        run = run.model_copy(update={"batch": run.batch.model_copy(update={"group_size": size})})
        resumed = collector(ScriptedEngine(every_other), run)
        resumed.load_state(values, arrays)
        assert len(resumed._open) == num_in_flight
        assert ("are left out" in caplog.text) == (size == 6)


def test_responses_in_flight_that_were_sampled_otherwise_are_asked_for_again():
    subject = collector(ScriptedEngine(every_other, order=straggler), partial())
    subject.collect(0)
    values, arrays = subject.state()
    answered = {response["request_id"] for record in values["in_flight"] for response in record["responses"]}
    assert answered
    for temperature in (1.0, 0.5):
        engine, run = ScriptedEngine(every_other), partial()
        run = run.model_copy(update={"rollout": run.rollout.model_copy(update={"temperature": temperature})})
        resumed = collector(engine, run)
        resumed.load_state(values, arrays)
        resumed.collect(1)
        assert (answered & set(engine.submitted)) == (set() if temperature == 1 else answered)


def test_request_seeds_are_unique_and_depend_on_the_run_seed():
    engine = ScriptedEngine(every_other)
    collector(engine, config()).collect(0)
    seeds = {seed for _, _, seed in engine.asked}
    assert len(seeds) == len(engine.asked)
    other = ScriptedEngine(every_other)
    collector(other, RunConfig.model_validate({**config().model_dump(), "seed": 6})).collect(0)
    assert not seeds & {seed for _, _, seed in other.asked}


def test_overlong_filtering_masks_the_loss_but_not_the_statistics():
    plain, filtered = config(), config(reward={"overlong_filtering": True})
    groups, _ = collector(ScriptedEngine(every_other), plain).collect(0)
    all_in = samples_of_groups(groups, plain, 0)
    masked = samples_of_groups(groups, filtered, 0)
    truncated = [int(part.columns.response_mask.sum()) >= 16 for part in masked.split([1] * len(masked))]
    assert any(truncated)
    assert [bool(part.columns.loss_mask.any()) for part in masked.split([1] * len(masked))] == [
        not t for t in truncated
    ]
    assert torch.equal(all_in.columns.loss_mask, all_in.columns.response_mask)
    assert torch.equal(masked.columns.advantages, all_in.columns.advantages)


def test_rewards_are_the_rule_reward_plus_the_soft_punishment():
    groups, metrics = collector(ScriptedEngine(every_other), config()).collect(0)
    for scored in (r for g in groups for r in g.trajectories):
        length = scored.length
        base = 1.0 if scored.correct else -1.0
        # L_max 16, L_cache 4: free up to 12, then -1/4 per token, -1 from 16 on.
        assert scored.accuracy_reward == base
        assert scored.reward == pytest.approx(base - min(max(length - 12, 0) / 4, 1.0))
    assert metrics["rollout/reward_mean"] < metrics["rollout/accuracy_reward_mean"]


ORDER = PromptCursor(len(PROMPTS), 5).next(len(PROMPTS))


def partial(**changes):
    return scheduled("partial", **changes)


def scheduled(schedule, **changes):
    fleet = {"placement": "fleet", "fleet": {"urls": ["http://127.0.0.1:1"]}, "schedule": schedule}
    return config(rollout={"max_response_tokens": 16, **fleet}, **changes)


def straggler(request):
    """The order of a fleet in which the last response to the first prompt takes longest."""
    return request.request_id == 3, request.request_id


def request_ids(groups):
    return [r.id for g in groups for r in g.trajectories]


def test_the_order_of_answers_changes_nothing_in_whole_rollouts():
    # Punishments of sevenths round, so that sums of them depend on their order.
    run = config(reward={"overlong_cache_tokens": 7})
    expected, expected_metrics = collector(ScriptedEngine(every_other), run).collect(0)
    ranks = np.random.default_rng(0).permutation(6 * 4)
    shuffled = ScriptedEngine(every_other, order=lambda request: ranks[request.request_id])
    groups, metrics = collector(shuffled, run).collect(0)
    assert request_ids(groups) == request_ids(expected)
    assert not shuffled.in_flight
    same = expected_metrics.keys() - {"rollout/tokens_per_s"}
    assert {name: metrics[name] for name in same} == {name: expected_metrics[name] for name in same}


def test_a_group_is_scored_while_others_are_still_generated():
    engine = ScriptedEngine(every_other)
    waiting = []

    def note(asked):
        if asked:
            waiting.append(len(engine.in_flight))

    collector(engine, config(), before_scoring=note).collect(0)
    assert waiting == [20, 16, 12, 8, 4, 0]


def test_a_partial_step_ends_with_its_groups_and_leaves_the_rest():
    engine = ScriptedEngine(every_other, order=straggler)
    groups, metrics = collector(engine, partial()).collect(0)
    # Group 0 lacks its straggler; groups 1 to 4 are complete, and 6 and 7 took the places of the first two. With one
    # group more in flight there could be more left than the next step takes.
    assert [g.prompt.index for g in groups] == ORDER[1:5]
    assert {request_id // 4 for request_id in engine.in_flight} == {0, 5, 6, 7}
    assert engine.most_groups == 6
    assert metrics["rollout/groups_in_flight"] == 4
    assert metrics["rollout/partial_share"] == 0
    assert metrics["rollout/generation_rounds"] == 2


def test_a_continued_response_is_as_old_as_its_oldest_weights():
    engine = ScriptedEngine(every_other, order=straggler)
    subject = collector(engine, partial())
    subject.collect(0)
    engine.version = 1
    groups, metrics = subject.collect(1)
    assert [g.prompt.index for g in groups] == ORDER[5:9]
    assert [g.weight_version for g in groups] == [0, 0, 0, 1]
    assert metrics["rollout/partial_share"] == 0.75
    assert metrics["buffer/staleness_mean"] == 0.75
    samples = samples_of_groups(groups, partial(), 1)
    off_policy = samples.columns.response_mask & ~samples.columns.fresh_mask
    stale = [int(mask.sum()) for mask in off_policy.split(samples.lengths.tolist())]
    assert stale == [2] * 12 + [0] * 4


def test_a_group_in_flight_that_may_be_too_old_is_cancelled_and_counted():
    engine = ScriptedEngine(every_other, order=straggler)
    subject = collector(engine, partial())
    for version in range(3):
        engine.version = version
        groups, metrics = subject.collect(version)
        assert metrics["rollout/groups_expired_in_flight"] == (version == 2)
        assert metrics["buffer/stale_dropped"] == 0, "it was never complete, so it is counted as expired only"
    assert engine.cancelled == [3]
    assert not {0, 1, 2, 3} & set(request_ids(groups))


def test_a_complete_group_of_too_old_weights_is_dropped_and_counted():
    class Outdated(ScriptedEngine):
        def respond(self, request, **versions):
            # An engine that missed two updates.
            return super().respond(request, weight_version=0 if request.request_id < 4 else 2)

    engine = Outdated(every_other)
    engine.version = 2
    groups, metrics = collector(engine, partial()).collect(2)
    assert [g.prompt.index for g in groups] == ORDER[1:5]
    assert metrics["buffer/stale_dropped"] == 1


def test_a_request_that_no_engine_serves_drops_its_whole_group():
    engine = ScriptedEngine(every_other, fails=lambda request: request.request_id == 1)
    groups, metrics = collector(engine, partial()).collect(0)
    assert metrics["rollout/dropped_groups"] == 1
    assert engine.cancelled == [2, 3]
    assert [g.prompt.index for g in groups] == ORDER[1:5]


def test_a_starved_partial_step_asks_no_more_than_its_rounds():
    engine = ScriptedEngine(lambda prompt, request_id: False)
    with pytest.raises(StarvedError, match=r"after 3 generation rounds.*18 all wrong"):
        collector(engine, partial()).collect(0)
    assert len(engine.submitted) == 3 * 6 * 4


def test_groups_in_flight_survive_a_checkpoint_asked_once():
    before = ScriptedEngine(every_other, order=straggler)
    subject = collector(before, partial())
    before.version = 3
    trained = request_ids(subject.collect(3)[0])
    values, arrays = subject.state()
    after = ScriptedEngine(every_other)
    resumed = collector(after, partial())
    resumed.load_state(json.loads(json.dumps(values)), arrays)
    assert not after.submitted, "engines have no weights yet when a checkpoint is loaded"
    again, arrays_again = resumed.state()
    assert json.dumps(again) == json.dumps(values)
    assert all((arrays_again[name] == array).all() for name, array in arrays.items())
    after.version = 4
    groups, _ = resumed.collect(4)
    assert after.submitted[: len(before.in_flight)] == sorted(before.in_flight)
    assert not {0, 1, 2} & set(after.submitted)
    assert [g.prompt.index for g in groups] == [ORDER[0], *ORDER[5:8]]
    # Three answers of the old weights were kept, the fourth is of the new ones.
    assert [r.weight_version for r in groups[0].trajectories] == [3, 3, 3, 4]
    assert groups[0].weight_version == 3
    trained += request_ids(groups)
    waiting = [i for record in resumed.state()[0]["in_flight"] for i in record["request_ids"]]
    assert sorted(trained + waiting) == list(range(resumed.next_request_id))


def test_a_run_that_cannot_continue_groups_does_not_drop_them():
    subject = collector(ScriptedEngine(every_other), partial())
    subject.collect(0)
    with pytest.raises(InputError, match=r"4 groups in flight, which only rollout.schedule=partial or"):
        collector(ScriptedEngine(every_other), config()).load_state(*subject.state())


class StoppedEngine(ScriptedEngine):
    """Is told to stop after so many answers."""

    def __init__(self, is_right, after):
        super().__init__(is_right)
        self.left = after

    def step(self):
        if not self.left:
            raise StopRequested("told so")
        self.left -= 1
        return super().step()


def test_a_step_that_is_stopped_leaves_the_state_that_it_began_with():
    engine = StoppedEngine(every_third, after=10**6)
    undisturbed, stopped = (collector(e, config()) for e in (ScriptedEngine(every_third), engine))
    for subject in (undisturbed, stopped):
        subject.collect(0)
    before = stopped.state()
    assert len(stopped.buffer) > 0
    engine.left = 5
    with pytest.raises(StopRequested):
        stopped.collect(1)
    after = stopped.state()
    assert after[0] == before[0]
    assert all((after[1][name] == array).all() for name, array in before[1].items())
    assert not engine.in_flight
    resumed = collector(ScriptedEngine(every_third), config())
    resumed.load_state(*after)
    ids = [[r.id for g in c.collect(1)[0] for r in g.trajectories] for c in (undisturbed, resumed)]
    assert ids[0] == ids[1]


def test_a_group_that_a_stopped_step_gave_up_is_counted_by_the_run_that_continues():
    engine = StoppedEngine(every_other, after=10**6)
    engine.order = straggler
    subject = collector(engine, partial())
    for engine.version in range(2):
        subject.collect(engine.version)
    engine.version, engine.left = 2, 1
    with pytest.raises(StopRequested):
        subject.collect(2)
    assert engine.cancelled == [3]
    after = ScriptedEngine(every_other)
    after.version = 2
    resumed = collector(after, partial())
    resumed.load_state(*subject.state())
    _, metrics = resumed.collect(2)
    assert metrics["rollout/groups_expired_in_flight"] == 1
    (expired,) = (fate for fate in resumed.pop_fates() if fate.outcome == "expired")
    assert [trajectory.id for trajectory in expired.unscored] == [0, 1, 2]


def every_third(prompt, request_id):
    return request_id % 3 == 0


REMAX = {"preset": "remax", "dynamic_sampling": True}


def test_a_greedy_response_is_the_baseline_and_nothing_else():
    greedy = []

    class Engine(ScriptedEngine):
        def generate(self, request):
            if request.sampling.temperature == 0:
                greedy.append(request.request_id)
            return super().generate(request)

    # Of the five requests of a group the last, which is greedy, is right: it must not make an all-wrong group mixed.
    engine = Engine(lambda prompt, i: i % 5 == 4 or (prompt % 2 == 0 and i % 5 == 0))
    run = config(algorithm={**REMAX, "max_generation_rounds": 9})
    subject = collector(engine, run)
    groups, metrics = subject.collect(0)
    assert greedy == list(range(4, subject.next_request_id, 5))
    assert all(group.prompt.index % 2 == 0 for group in groups)
    assert {group.greedy.id % 5 for group in groups} == {4}
    assert {len(group.trajectories) for group in groups} == {4}
    assert metrics["rollout/accuracy_mean"] < 0.25
    assert metrics["rollout/greedy_reward_mean"] == pytest.approx(1.0, abs=0.5)
    num_sampled = metrics["rollout/response_length_mean"] * 4 * metrics["groups/offered"]
    assert metrics["rollout/tokens"] > num_sampled
    samples = samples_of_groups(groups, run, 0)
    assert len(samples) == 16
    for group, part in zip(groups, samples.split([4] * 4), strict=True):
        starts = np.concatenate([[0], np.cumsum([len(one.columns) for one in part.split([1] * 4)])[:-1]])
        ends = starts + [len(one.columns) - 1 for one in part.split([1] * 4)]
        expected = [member.reward - group.greedy.reward for member in group.trajectories]
        assert part.columns.advantages[ends].tolist() == pytest.approx(expected)


def test_groups_with_greedy_responses_continue_from_a_checkpoint():
    run = config(algorithm=REMAX)
    whole = collector(ScriptedEngine(every_other), run)
    whole.collect(0)
    values, arrays = whole.state()
    values = json.loads(json.dumps(values))
    resumed = collector(ScriptedEngine(every_other), run)
    resumed.load_state(values, arrays)

    def ids(groups):
        return [[g.greedy.id, *(r.id for r in g.trajectories)] for g in groups]

    assert ids(resumed.collect(1)[0]) == ids(whole.collect(1)[0])


def test_the_length_reward_counts_as_much_as_the_step_says():
    # Lengths 3, 4, 5, 6 of requests 0 to 3, of which 0 and 2 are right: l = 1/2, 1/6, -1/6, -1/2, and a wrong one
    # never gains. At step 2 of a weight that grows from 0 at step 1 to 0.6 at step 4, the weight is 0.2.
    reward = {"length_weight": 0.6, "length_phase_in": [1, 4], "overlong_punishment": False}
    run = config(reward=reward)
    groups, _ = collector(ScriptedEngine(every_other), run).collect(1)
    first = next(g for g in groups if g.trajectories[0].id == 0)
    assert [member.reward for member in first.trajectories] == pytest.approx([1 + 0.1, -1, 1 - 0.2 / 6, -1 - 0.1])
    assert [member.accuracy_reward for member in first.trajectories] == [1, -1, 1, -1]
    for version, weight in ((0, 0.0), (3, 0.6), (9, 0.6)):
        assert run.reward.parts[-1].weight_at(version + 1) == pytest.approx(weight)
