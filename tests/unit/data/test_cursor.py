"""The prompt cursor visits every prompt once per epoch, and a resumed walk equals an uninterrupted one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_mega.data.cursor import PromptCursor
from dapo_mega.errors import InputError

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)
batches = st.lists(st.integers(0, 90), max_size=8)


@given(sizes, seeds, batches)
def test_every_prompt_comes_once_per_epoch_however_batches_fall(num_prompts: int, seed: int, sizes: list[int]) -> None:
    cursor = PromptCursor(num_prompts, seed)
    walk = [index for size in sizes for index in cursor.next(size)]
    assert len(walk) == sum(sizes)
    assert cursor.epoch == len(walk) // num_prompts
    for start in range(0, len(walk) - num_prompts + 1, num_prompts):
        assert sorted(walk[start : start + num_prompts]) == list(range(num_prompts))
    assert len(set(walk[cursor.epoch * num_prompts :])) == len(walk) % num_prompts


@given(sizes, seeds, st.integers(0, 130), st.integers(0, 130))
def test_resuming_anywhere_equals_no_interruption(num_prompts: int, seed: int, before: int, after: int) -> None:
    uninterrupted = PromptCursor(num_prompts, seed)
    walk = uninterrupted.next(before + after)
    first = PromptCursor(num_prompts, seed)
    first.next(before)
    state = json.loads(json.dumps(first.state()))
    for elsewhere in (0, 7):
        resumed = PromptCursor(num_prompts, seed)
        resumed.next(elsewhere)
        resumed.load_state(state)
        assert resumed.next(after) == walk[before:]
        assert resumed.state() == uninterrupted.state()


@settings(max_examples=30)
@given(seeds, st.integers(0, 5))
def test_seeds_and_epochs_give_different_orders(seed: int, epoch: int) -> None:
    n = 200
    cursor, other = PromptCursor(n, seed), PromptCursor(n, seed + 1)
    orders = [cursor.next(n) for _ in range(epoch + 2)]
    assert orders[epoch] != orders[epoch + 1]
    assert orders[0] != other.next(n)
    assert orders[epoch] != list(range(n))


def test_the_order_of_a_saved_run_never_changes() -> None:
    # Written down once: a later version that shuffles differently would break the resumption of older checkpoints.
    assert PromptCursor(8, 3).next(16) == [0, 1, 2, 7, 5, 6, 4, 3, 5, 6, 3, 7, 0, 1, 2, 4]


@pytest.mark.parametrize(("num_prompts", "seed", "named"), [(9, 1, "num_prompts=10"), (10, 2, "seed=1")])
def test_a_state_of_other_data_or_seed_is_refused(num_prompts: int, seed: int, named: str) -> None:
    with pytest.raises(InputError, match=named):
        PromptCursor(num_prompts, seed).load_state(PromptCursor(10, 1).state())


@pytest.mark.parametrize(
    "change", [{"position": 10}, {"position": -1}, {"epoch": 1.0}, {"epoch": True}, {"seed": "1"}, {"extra": 1}]
)
def test_a_damaged_state_is_refused(change: dict) -> None:
    with pytest.raises(InputError):
        PromptCursor(10, 1).load_state({**PromptCursor(10, 1).state(), **change})


@pytest.mark.parametrize(("num_prompts", "seed"), [(0, 0), (3, -1)])
def test_nothing_to_ask_or_a_negative_seed_is_refused(num_prompts: int, seed: int) -> None:
    with pytest.raises(InputError):
        PromptCursor(num_prompts, seed)
