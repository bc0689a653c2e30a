"""Memory for buckets of weights."""

from types import SimpleNamespace

import pytest
import torch

from dapo_mega.megatron.gathering import WeightGatherer


@pytest.fixture
def gatherer():
    gatherer = WeightGatherer.__new__(WeightGatherer)
    gatherer._kept = []
    gatherer._processes = SimpleNamespace(device=torch.device("cpu"))
    return gatherer


@pytest.mark.parametrize(("sizes", "expected"), [([], []), ([3], [3]), ([3, 5, 4], [5, 5]), ([0, 0, 0], [0, 0])])
def test_buckets_take_turns_in_memory_for_the_largest(gatherer, sizes, expected):
    for _ in range(2):
        assert [len(buffer) for buffer in gatherer._buffers(sizes)] == expected


def test_memory_is_kept_while_buckets_are_of_the_same_sizes(gatherer):
    kept = [buffer.data_ptr() for buffer in gatherer._buffers([3, 5])]
    assert [buffer.data_ptr() for buffer in gatherer._buffers([5, 2, 1])] == kept
    assert [len(buffer) for buffer in gatherer._buffers([6])] == [6]
