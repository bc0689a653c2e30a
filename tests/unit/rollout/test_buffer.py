from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_mega.algorithms.filters import ScoreThresholdFilter, UnequalScoresFilter
from dapo_mega.rollout.admission import max_offered
from dapo_mega.rollout.buffer import GroupBuffer
from dapo_mega.rollout.group_state import dataset_fingerprint, pack_groups, unpack_groups
from dapo_mega.types import Group, Prompt, Response
from tests.made_trajectories import scored_answer

PROMPTS = [Prompt(i, f"{i}", np.array([i, i + 1], np.int32), str(i)) for i in range(32)]


def group(index, correct, rewards=None, version=0):
    rewards = rewards or [1.0 if c else -1.0 for c in correct]
    responses = tuple(
        scored_answer(
            Response(index * 100 + i, np.arange(i + 1, dtype=np.int32), -np.ones(i + 1, np.float32), "stop", version),
            f"text \u00e9 {i}",
            c,
            1.0 if c else -1.0,
            r,
        )
        for i, (c, r) in enumerate(zip(correct, rewards, strict=True))
    )
    return Group(PROMPTS[index], responses)


def test_the_filter_looks_at_correctness_and_not_at_the_shaped_reward():
    buffer = GroupBuffer()
    assert not buffer.offer(group(0, [False, False], rewards=[-1.0, -1.7]))
    assert not buffer.offer(group(1, [True, True], rewards=[1.0, 0.2]))
    assert buffer.offer(group(2, [True, False], rewards=[0.0, 0.0]))
    assert len(buffer) == 1


def test_scores_that_differ_by_rounding_are_no_signal():
    for scores, keeps in (([0.1 + 0.2, 0.3], False), ([0.3, 0.3001], True), ([0.3, 0.5], True)):
        members = group(0, [True] * len(scores)).trajectories
        scored = tuple(replace(m, accuracy_reward=score) for m, score in zip(members, scores, strict=True))
        of_scores = Group(PROMPTS[0], scored)
        assert GroupBuffer(filter=UnequalScoresFilter()).keeps(of_scores) == keeps, scores
        at_threshold = GroupBuffer(filter=ScoreThresholdFilter(threshold=max(scores)))
        assert at_threshold.keeps(of_scores) == keeps, scores


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=5), max_size=20))
def test_every_offered_group_is_counted_once(patterns):
    buffer = GroupBuffer()
    for i, pattern in enumerate(patterns):
        buffer.offer(group(i, pattern))
    counts = buffer.counts
    assert counts.offered == len(patterns)
    assert counts.kept + counts.all_right + counts.all_wrong == counts.offered
    assert counts.kept == len(buffer) == sum(0 < sum(p) < len(p) for p in patterns)


def test_without_dynamic_sampling_every_group_is_kept():
    buffer = GroupBuffer(dynamic_sampling=False)
    assert buffer.offer(group(0, [False, False]))
    assert buffer.counts.all_wrong == 1


def test_groups_of_older_weights_leave_first():
    buffer = GroupBuffer()
    for i, version in enumerate([4, 3, 4, 3]):
        buffer.offer(group(i, [True, False], version=version))
    assert [g.prompt.index for g in buffer.take(3)] == [1, 3, 0]
    assert [g.prompt.index for g in buffer.groups] == [2]


def test_the_share_kept_lately_outlives_the_counts_of_a_step():
    buffer = GroupBuffer()
    assert buffer.recent_kept_share() == 1
    for i in range(30):
        buffer.offer(group(i, [True, i % 3 == 0]))
    assert buffer.recent_kept_share() == pytest.approx(2 / 3, abs=0.02)
    buffer.pop_counts()
    assert buffer.recent_kept_share() == pytest.approx(2 / 3, abs=0.03)


@given(st.integers(1, 600), st.floats(0.01, 1))
def test_of_the_most_groups_offered_hardly_ever_more_are_kept_than_wanted(num_kept, share):
    offered = max_offered(num_kept, share)
    assert offered >= num_kept
    if offered > num_kept:
        assert offered * share + 3 * (offered * share * (1 - share)) ** 0.5 <= num_kept + 1e-6
        offered += 1
        assert offered * share + 3 * (offered * share * (1 - share)) ** 0.5 > num_kept - 1e-6
    assert max_offered(num_kept, 1.0) == num_kept


def test_groups_leave_in_the_order_they_were_asked_and_surplus_stays():
    buffer = GroupBuffer()
    for i in (3, 1, 4, 0, 2):
        buffer.offer(group(i, [True, False]))
    assert [g.prompt.index for g in buffer.take(3)] == [0, 1, 2]
    assert [g.prompt.index for g in buffer.groups] == [3, 4]
    with pytest.raises(ValueError, match="holds 2"):
        buffer.take(3)
    assert len(buffer) == 2


def test_only_groups_that_are_too_stale_are_dropped_and_counted():
    buffer = GroupBuffer(max_staleness=1)
    for i, version in enumerate([3, 4, 5]):
        buffer.offer(group(i, [True, False], version=version))
    assert buffer.evict_stale(5) == 1
    assert [g.weight_version for g in buffer.groups] == [4, 5]
    assert buffer.counts.stale == 1


def test_counts_start_afresh_when_taken():
    buffer = GroupBuffer()
    buffer.offer(group(0, [True, False]))
    assert buffer.pop_counts().kept == 1
    assert buffer.counts.kept == 0


@pytest.mark.parametrize("num_groups", [0, 1, 3])
def test_groups_survive_a_round_trip_through_a_checkpoint(num_groups):
    groups = [group(i, [True, False, i % 2 == 0], version=i) for i in range(num_groups)]
    records, arrays = pack_groups(groups, "buffer")
    restored = unpack_groups(records, arrays, PROMPTS, "buffer")
    assert len(restored) == num_groups
    for before, after in zip(groups, restored, strict=True):
        assert after.prompt is before.prompt
        assert after.weight_version == before.weight_version
        for old, new in zip(before.trajectories, after.trajectories, strict=True):
            assert (old.text, old.correct, old.accuracy_reward, old.reward) == (
                new.text,
                new.correct,
                new.accuracy_reward,
                new.reward,
            )
            assert old.id == new.id
            assert old.finish_reason == new.finish_reason
            np.testing.assert_array_equal(old.token_ids, new.token_ids)
            np.testing.assert_array_equal(old.logprobs, new.logprobs)


def test_the_fingerprint_sees_order_prompt_and_answer():
    base = dataset_fingerprint(PROMPTS[:3])
    assert base == dataset_fingerprint(PROMPTS[:3])
    assert base != dataset_fingerprint([PROMPTS[1], PROMPTS[0], PROMPTS[2]])
    changed = Prompt(2, "2", PROMPTS[2].token_ids, "7")
    assert base != dataset_fingerprint([*PROMPTS[:2], changed])
