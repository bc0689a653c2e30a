"""A function is called in several processes of one group, and its failures and its end come back."""

import time
from multiprocessing import active_children

import pytest
import torch
import torch.distributed as dist

from .launching import run_distributed

pytestmark = pytest.mark.distributed


def total_of_ranks(start):
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on_the_second(_):
    if dist.get_rank() == 1:
        raise KeyError("what the second process lacks")
    dist.barrier()


def hang():
    time.sleep(1000)


def test_results_come_back_by_rank():
    assert run_distributed(total_of_ranks, 3, 10) == [(rank, torch.tensor(33)) for rank in range(3)]


def test_a_failure_carries_the_traceback_of_its_process():
    with pytest.raises(AssertionError, match=r"(?s)--- rank 1.*in fail_on_the_second.*what the second process lacks"):
        run_distributed(fail_on_the_second, 2, None)


def test_processes_are_killed_when_time_is_up():
    run_distributed(total_of_ranks, 1, 0)  # So that what all are forks of is there.
    before = active_children()
    with pytest.raises(AssertionError, match="exit statuses"):
        run_distributed(hang, 2, timeout_s=2)
    assert active_children() == before
