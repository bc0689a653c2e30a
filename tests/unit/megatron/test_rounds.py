"""A replica's processes have about the same number of bytes to send."""

import random

import pytest

from dapo_mega.megatron.gathering import bucket_limit, rounds_of


@pytest.mark.parametrize("num_senders", [1, 2, 8, 32])
@pytest.mark.parametrize("seed", range(3))
def test_senders_get_every_bucket_once_and_equal_numbers_of_bytes(num_senders, seed):
    numbers = random.Random(seed)
    sizes = [numbers.randint(50, 100) for _ in range(10 * num_senders + seed)] + [300]
    totals = [0] * num_senders
    found = []
    for together in rounds_of(sizes, num_senders):
        assert len({sender for sender, _ in together}) == len(together)
        for sender, index in together:
            totals[sender] += sizes[index]
            found.append(index)
    assert sorted(found) == list(range(len(sizes)))
    assert max(totals) <= 1.1 * sum(totals) / num_senders


def test_a_rounds_buckets_are_of_similar_size():
    sizes = [1, 9, 2, 8, 1, 9, 2, 8]
    assert [sorted(sizes[index] for _, index in together) for together in rounds_of(sizes, 2)] == [
        [9, 9],
        [8, 8],
        [2, 2],
        [1, 1],
    ]


def test_fewer_buckets_than_senders_leave_some_without():
    assert list(rounds_of([5, 7], 4)) == [[(0, 1), (1, 0)]]
    assert list(rounds_of([], 4)) == []


@pytest.mark.parametrize(
    ("num_bytes", "num_senders", "expected"),
    [(2**40, 1, 2**28), (2**40, 8, 2**28), (10 * 2**30, 8, 10 * 2**30 // 80), (2**30, 8, 2**24), (2**20, 8, 2**24)],
)
def test_buckets_are_smaller_where_senders_would_have_unequal_numbers_of_bytes(num_bytes, num_senders, expected):
    assert bucket_limit(num_bytes, num_senders, 2**28) == expected
