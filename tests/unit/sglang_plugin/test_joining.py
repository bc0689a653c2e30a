"""An engine does not wait for a trainer that is gone for longer than the trainer itself would wait."""

import threading
from datetime import timedelta

import pytest
import torch

from dapo_mega.distributed import accelerator
from dapo_mega.engines.sglang.weight_protocol import limit_of_group, limited_group
from dapo_mega.sglang_plugin import join_within_limit


@pytest.mark.parametrize("limit_s", [0.25, 20.0, 600.0])
def test_a_groups_name_states_the_limit(limit_s):
    assert limit_of_group(f"{limited_group('dapo-mega-0a1b-3-0', limit_s)}-2") == limit_s


@pytest.mark.parametrize("name", ["weight_update_group", "group-within-reach", ""])
def test_groups_of_others_have_no_limit(name):
    assert join_within_limit(lambda **group: group, group_name=name) == {"group_name": name}


@pytest.mark.parametrize(
    ("backend", "limit_s", "expected_s"), [("gloo", 20, 80), ("nccl", 20, 80), ("nccl", 600, 1800)]
)
def test_torch_gives_up_after_the_trainer(backend, limit_s, expected_s):
    group = join_within_limit(lambda **group: group, backend=backend, group_name=limited_group("group", limit_s))
    assert group["timeout"] == timedelta(seconds=expected_s)


def test_the_caller_gets_the_group_or_the_error():
    name = limited_group("group", 30.0)
    assert join_within_limit(lambda store, **_: store, "a store", group_name=name) == "a store"

    def refuse(**_):
        raise RuntimeError("connection refused")

    with pytest.raises(RuntimeError, match="connection refused"):
        join_within_limit(refuse, group_name=name)


def test_who_joins_has_this_engines_gpu_for_its_own(monkeypatch):
    """The current device is a thread's own."""
    chosen = []
    monkeypatch.setattr(accelerator, "device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(accelerator, "select", lambda number: chosen.append((number, threading.current_thread())))
    joining = join_within_limit(lambda **_: threading.current_thread(), group_name=limited_group("group", 30.0))
    assert chosen == [(3, joining)]


def test_a_store_that_never_answers_is_given_up_at_the_limit():
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"trainer at tcp://10\.0\.0\.1:7 did not come within 0\.1 s"):
        join_within_limit(
            lambda **_: never.wait(), init_method="tcp://10.0.0.1:7", group_name=limited_group("group", 0.1)
        )
    never.set()
