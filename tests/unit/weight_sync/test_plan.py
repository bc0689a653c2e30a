"""Engines take the buckets of a plan in turns in which they do not meet, and know all of it from its text."""

import pytest
import torch

from dapo_mega.engines.sglang.weight_protocol import PlannedBucket, UpdatePlan
from dapo_mega.types import WeightSpec


def plan_of(num_senders, *rounds):
    return UpdatePlan(
        num_senders,
        2**40,
        tuple(
            tuple(PlannedBucket(s, (WeightSpec(f"{number}/{s}", torch.bfloat16, (2, 3)),), (1,)) for s in senders)
            for number, senders in enumerate(rounds)
        ),
    )


def senders_in_turn(plan, turn):
    return [bucket.sender for bucket in plan.in_turn(turn)]


@pytest.mark.parametrize(("num_engines", "most"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_engines_in_step_spread_over_the_senders(num_engines, most):
    plan = plan_of(4, range(4), range(4))
    orders = [senders_in_turn(plan, turn) for turn in range(num_engines)]
    for together in zip(*orders, strict=True):
        assert max(together.count(sender) for sender in range(4)) == most


def test_every_engine_gets_all_of_a_round_before_the_next():
    plan = plan_of(3, (0, 1, 2), (0, 2), (1,))
    for turn in range(4):
        names = [bucket.specs[0].name for bucket in plan.in_turn(turn)]
        assert [name[0] for name in names] == list("000112")
        assert len(set(names)) == 6
    assert senders_in_turn(plan, 1) == [1, 2, 0, 2, 0, 1]


def test_plans_of_other_tensors_have_other_digests():
    plan = plan_of(2, (0, 1))
    assert UpdatePlan.parse(plan.text) == plan
    assert UpdatePlan.parse(plan.text).digest == plan.digest
    assert len({plan_of(2, (0, 1)).digest, plan_of(2, (1, 0)).digest, plan_of(3, (0, 1)).digest}) == 3
