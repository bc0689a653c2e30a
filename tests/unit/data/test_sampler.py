"""Which prompts training asks next: mixed by weights, ordered, retired, and the same after a resume."""

import json
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_mega.config import PromptSamplingConfig
from dapo_mega.data.cursor import PromptCursor
from dapo_mega.data.outcomes import GroupTally
from dapo_mega.data.sampler import Mixture, PromptSampler
from dapo_mega.errors import InputError
from dapo_mega.types import Prompt

TOKENS = np.array([1], np.int32)
WEIGHTS = st.lists(st.sampled_from([1.0, 2.0, 0.1, 0.01, 7.5, 100.0, 1 / 3]), min_size=1, max_size=7)


def dataset(size, name="", difficulties=None, first=0):
    values = difficulties or [None] * size
    return [Prompt(first + i, f"{name}{i}", TOKENS, "1", dataset=name, difficulty=values[i]) for i in range(size)]


def sampler(prompts, seed=3, weights=None, num_kept=1, **config):
    return PromptSampler(prompts, PromptSamplingConfig(**config), seed, weights, num_kept)


def outcome(index, num_right, size=4, request_id=0):
    return GroupTally(request_id, index, num_right, size)


def step(subject, outcomes):
    """A step in which groups of these prompts came out so."""
    for index, num_right in outcomes.items():
        subject.observe(outcome(index, num_right))
    subject.end_step()


@given(WEIGHTS)
@settings(max_examples=40)
def test_after_any_number_of_turns_each_dataset_has_had_its_share_to_within_one(weights):
    mixture = Mixture({str(i): weight for i, weight in enumerate(weights)})
    turns = [mixture.next() for _ in range(300)]
    for name, share in mixture.shares.items():
        had = list(accumulate((turn == name for turn in turns), initial=0))
        off = [had[t] - share * t for t in range(301)]
        assert max(map(abs, off)) <= (1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else 0)
        if len(weights) == 2:
            assert max(off) - min(off) <= 1, "any window is within one turn of its share"


def test_one_shuffled_dataset_is_asked_and_saved_as_it_always_was():
    subject, cursor = sampler(dataset(9)), PromptCursor(9, 3)
    assert subject.next(25) == cursor.next(25)
    step(subject, {0: 4})
    assert subject.state() == (cursor.state(), {})
    assert subject.metrics() == {}
    resumed = sampler(dataset(9))
    resumed.load_state(cursor.state(), {})
    assert resumed.next(25) == cursor.next(25)


def test_each_dataset_is_asked_once_per_epoch_of_its_own_and_begins_the_next_by_itself():
    prompts = [*dataset(3, "small"), *dataset(12, "large", first=3)]
    subject = sampler(prompts, weights={"small": 1.0, "large": 2.0})
    asked = subject.next(36)
    small, large = [i for i in asked if i < 3], [i for i in asked if i >= 3]
    assert [sorted(small[i : i + 3]) for i in range(0, 12, 3)] == [[0, 1, 2]] * 4
    assert [sorted(large[i : i + 12]) for i in (0, 12)] == [list(range(3, 15))] * 2
    assert subject.metrics() == {"sampling/epochs_small": 4.0, "sampling/epochs_large": 2.0}
    twins = sampler([*dataset(30, "a"), *dataset(30, "b", first=30)], weights={"a": 1.0, "b": 1.0}).next(60)
    assert [i for i in twins if i < 30] != [i - 30 for i in twins if i >= 30], "equal datasets have orders of their own"


SETTINGS = (
    {"order": "shuffle", "retire_after": 1},
    {"order": "curriculum", "stages": [0.5], "retire_after": 2},
    {"order": "prioritised", "floor": 0.05},
    {"order": "prioritised", "retire_after": 1},
)


@settings(max_examples=60)
@given(
    st.sampled_from(SETTINGS),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.booleans()), max_size=12),
    st.integers(0, 12),
    st.randoms(use_true_random=False),
)
def test_a_resume_anywhere_equals_no_interruption(config, is_mixed, steps, stop, rng):
    """Also in the middle of a step, with groups in flight and outcomes that are not counted yet."""
    difficulties = [i / 9 for i in range(10)]
    prompts = [*dataset(10, "a" if is_mixed else "", difficulties)]
    weights = {"a": 1.0, "b": 1.5} if is_mixed else None
    prompts += dataset(10, "b", difficulties, first=10) if is_mixed else []
    whole = sampler(prompts, weights=weights, num_kept=3, **config)
    resumed = None
    request_id = 0
    for i, (num_asked, num_right, ends) in enumerate(steps):
        if i == stop:
            values, arrays = whole.state()
            resumed = sampler(prompts, weights=weights, num_kept=3, **config)
            for _ in range(sum(ends for *_, ends in steps[:i])):
                step(resumed, {3: 1})
            resumed.next(2)  # What it did before does not count.
            resumed.load_state(json.loads(json.dumps(values)), arrays)
        asked = whole.next(num_asked)
        outcomes = [outcome(index, num_right + i % 2, 4, request_id + n) for n, index in enumerate(asked)]
        request_id += len(asked)
        for subject in [whole, resumed] if resumed else [whole]:
            if subject is resumed:
                assert subject.next(num_asked) == asked
                rng.shuffle(outcomes)  # Engines answer in any order.
            for each in outcomes:
                subject.observe(each)
            if ends:
                subject.end_step()
    if resumed:
        (values, arrays), (expected, expected_arrays) = resumed.state(), whole.state()
        assert sorted(values.pop("pending")) == sorted(expected.pop("pending"))
        assert values == expected
        assert all((arrays[name] == expected_arrays[name]).all() for name in expected_arrays)
        assert resumed.next(15) == whole.next(15)


def test_prompts_are_drawn_in_proportion_to_one_minus_their_success_rate_with_a_floor():
    subject = sampler(dataset(4), order="prioritised", floor=0.4)
    # Never asked: 1/2. Of 4 responses 4, 0 and 2 right: 5/6, 1/6 and 1/2.
    assert subject.metrics() == {"sampling/success_rate_train": 0.5}
    step(subject, {1: 4, 2: 0, 3: 2})
    assert subject.metrics()["sampling/success_rate_train"] == pytest.approx((1 / 2 + 5 / 6 + 1 / 6 + 1 / 2) / 4)
    weights = np.array([1 / 2, 0.4, 5 / 6, 1 / 2])
    num_draws = 4000
    first = []
    for _ in range(num_draws):
        first += subject.next(1)
        subject.end_step()
    expected = num_draws * weights / weights.sum()
    counts = np.bincount(first, minlength=4)
    assert np.all(np.abs(counts - expected) < 4 * np.sqrt(expected)), (counts, expected)


def test_a_step_asks_a_prompt_again_only_when_all_were_asked_and_old_outcomes_fade():
    subject = sampler(dataset(6), order="prioritised", floor=0)
    assert sorted(subject.next(6)) == sorted(subject.next(6)) == list(range(6))
    one = sampler(dataset(1), order="prioritised")
    for num_right, rate in ((4, 5 / 6), (0, (2 + 1) / (2 + 4 + 2)), (0, (1 + 1) / (3 + 4 + 2))):
        step(one, {0: num_right})
        assert one.metrics()["sampling/success_rate_train"] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("config", "stages"),
    [
        ({}, [{2, 5}, {0}, {1, 4}, {3}]),
        ({"easiest": "lowest"}, [{3}, {1, 4}, {0}, {2, 5}]),
        ({"stages": [0.5]}, [{2, 5}, {0, 1, 3, 4}]),
        ({"stages": [0.5, 0.1], "easiest": "lowest"}, [{3}, {1, 4}, {0, 2, 5}]),
    ],
)
def test_a_curriculum_goes_from_easy_to_hard_once_with_ties_shuffled(config, stages):
    prompts = dataset(6, difficulties=[0.5, 0.25, 1.0, 0.0, 0.25, 1.0])
    walks = [sampler(prompts, seed=seed, order="curriculum", **config) for seed in range(30)]
    orders = {tuple(walk.next(6)) for walk in walks}
    for order in orders:
        rest = list(order)
        for stage in stages:
            assert {rest.pop(0) for _ in stage} == stage
    assert len(orders) > 1
    later = {tuple(walk.next(6)) for walk in walks}
    assert len({order[0] for order in later}) > 3, "later epochs are shuffled"
    twice = sampler(prompts, order="curriculum", curriculum_epochs=2, **config)
    assert set(twice.next(12)[6 : 6 + len(stages[0])]) == stages[0]


def test_a_prompt_retires_when_it_was_right_as_a_whole_so_many_times_in_a_row():
    subject = sampler(dataset(8), retire_after=2)
    for num_right in (4, 3, 4):
        step(subject, {5: num_right, 6: 0})
    assert 5 in subject.next(8)
    step(subject, {5: 4})
    assert 5 not in subject.next(70)
    metrics = subject.metrics()
    assert (metrics["sampling/retired_train"], metrics["sampling/left_train"]) == (1, 7)
    assert metrics["sampling/epochs_train"] == 11


def test_one_steps_prompts_are_never_retired_each_dataset_its_share_of_them(caplog):
    prompts = [*dataset(9, "a"), *dataset(9, "b", first=9)]
    subject = sampler(prompts, weights={"a": 3.0, "b": 1.0}, num_kept=6, retire_after=1)
    for index in reversed(range(18)):  # The order of requests counts, not that of answers.
        subject.observe(outcome(index, 4, request_id=index))
    subject.end_step()
    assert sorted(set(subject.next(80))) == [4, 5, 6, 7, 8, 16, 17], "5 of 4.5, and 2 of 1.5"
    (record,) = caplog.records
    assert "all prompts of data.mixture.a are solved and retired but the last 5" in record.getMessage()


def test_what_is_retired_follows_the_settings_of_a_resume():
    """Prompts 0 to 3 were solved twice in a row, 4 to 6 once."""
    saved = sampler(dataset(10), num_kept=2, retire_after=2)
    for solved in (range(7), range(4)):
        for index in solved:
            saved.observe(outcome(index, 4, request_id=index))
        saved.end_step()
    state = saved.state()
    cases = {
        (2, 2): {0, 1, 2, 3}, (1, 2): {0, 1, 2, 3, 4, 5, 6}, (1, 6): {0, 1, 2, 3}, (2, 8): {0, 1}, (3, 2): set(),
        (None, 2): set(),
    }  # fmt: skip
    for (retire_after, num_kept), retired in cases.items():
        resumed = sampler(dataset(10), num_kept=num_kept, retire_after=retire_after)
        resumed.load_state(json.loads(json.dumps(state[0])), state[1])
        assert set(range(10)) - set(resumed.next(40)) == retired, (retire_after, num_kept)


def test_changed_settings_continue_from_what_is_known_and_other_datasets_are_refused():
    prompts = [*dataset(20, "a"), *dataset(20, "b", first=20)]
    saved = sampler(prompts, weights={"a": 1.0, "b": 1.0})
    saved.next(11)
    values, arrays = saved.state()
    reweighted = sampler(prompts, weights={"a": 1.0, "b": 3.0})
    reweighted.load_state(values, arrays)
    coming = reweighted.next(8)
    assert sum(i < 20 for i in coming) == 2, "the new weights count from here on"
    assert not {i for i in coming if i < 20} & {i for i in sampler(prompts, weights={"a": 1.0, "b": 1.0}).next(11)}
    plain = sampler(dataset(20))
    plain.next(13)
    other_order = sampler(dataset(20), order="prioritised")
    other_order.load_state(*plain.state())
    assert sorted(other_order.next(20)) == list(range(20)), "another order begins with a new epoch"
    with pytest.raises(InputError, match=r"place in data\.mixture\.a, data\.mixture\.b, this run .* of data\.train;"):
        sampler(dataset(40)).load_state(values, arrays)
