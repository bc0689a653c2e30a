"""Processes that torchrun has started again find each other, and not those that have ended."""

import os

import pytest
import torch.distributed as dist

from dapo_mega.distributed.stores import agreed_attempt, attempt_prefix, open_store

from .launching import run_distributed

pytestmark = pytest.mark.distributed

# How many starts the torchruns of two machines have counted: one that ends its processes because the other machine's
# are started again does not count that.
COUNTED = [("0", "0"), ("0", "1"), ("1", "1")]


def prefixes(port):
    """What the keys of this process begin with at each start."""
    rank = dist.get_rank()
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2", "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(torchrun, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    found = []
    for counts in COUNTED:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = counts[rank]
        agreed_attempt.cache_clear()  # As in a new process.
        found.append([attempt_prefix(), attempt_prefix()])
        dist.barrier()  # torchrun ends all processes of an attempt first.
    return found


def test_machines_whose_torchruns_count_differently_join_the_same_attempt():
    store = open_store("127.0.0.1", 60)
    first, second = run_distributed(prefixes, 2, store.port, timeout_s=60)
    assert first == second
    assert [once == again for once, again in first] == [True] * len(COUNTED)
    assert len({once for once, _ in first}) == len(COUNTED), first
