"""Advantages from penalties and values, in one process, by hand; layouts are in distributed/test_methods.py."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.token_advantages import (
    advantages_from_values,
    normalized,
    subtract_following_penalties,
    sums_of_trajectories,
    with_advantages_of,
)

# Two micro-batches; three responses of 2, 1 and 3 tokens with rewards 1, -1 and 2. The second is out of the loss.
LENGTHS, REWARDS = [[2, 1], [3]], [[1.0, -1.0], [2.0]]
PENALTIES = [torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.1, 0.2, 0.3])]


@pytest.fixture
def processes():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    yield Processes(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, torch.device("cpu"), world, world, world)
    dist.destroy_process_group()


def batches():
    number = 0
    for lengths, rewards in zip(LENGTHS, REWARDS, strict=True):
        samples = [
            single_turn([1], np.arange(length), advantage=reward, in_loss=length != 1)
            for length, reward in zip(lengths, rewards, strict=True)
        ]
        yield pack(flatten(samples, trajectories=range(number, number + len(samples))), max_response_tokens=8)
        number += len(samples)


def advantages(micro_batches):
    return [micro.targets.advantages[micro.targets.response_mask].tolist() for micro in micro_batches]


def test_a_token_pays_for_itself_and_what_follows(processes):
    changed = subtract_following_penalties(list(batches()), PENALTIES, processes)
    first, second = advantages(changed)
    assert first == pytest.approx([1 - 0.3, 1 - 0.2, -1 - 0.4])
    assert second == pytest.approx([2 - 0.6, 2 - 0.5, 2 - 0.3])


def test_a_trajectory_of_several_samples_is_one_sequence_in_time(processes):
    # Turns of 2 and 3 tokens: in one sample, with an observation between them, or each with its history in its own.
    rewards, values, penalties = (
        2.0,
        torch.tensor([0.5, 0.25, 0.125, 1.0, -1.0]),
        torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]),
    )
    plain = single_turn([1], np.arange(9), advantage=rewards)
    sampled = torch.tensor([0, 1, 1, 0, 0, 0, 0, 1, 1, 1]).bool()
    noise = torch.where(sampled, plain.advantages, torch.randn(10))
    masks = [sampled], [sampled & (torch.arange(10) < 5), sampled & (torch.arange(10) > 5)]
    found = []
    for of_samples in masks:
        samples = [replace(plain, response_mask=mask, loss_mask=mask, advantages=noise) for mask in of_samples]
        micro = pack(flatten(samples, trajectories=[0] * len(samples)), max_response_tokens=9)
        changed, returns = advantages_from_values([micro], [values], [penalties], processes, discount=0.5, decay=0.5)
        paid = subtract_following_penalties([micro], [penalties], processes)
        sums = sums_of_trajectories([micro], [penalties], processes).tolist()
        found.append([*advantages(changed), returns[0].tolist(), *advantages(paid), sums])
    assert found[0] == found[1]
    assert found[0][3] == pytest.approx([1.5])


def test_penalties_are_summed_over_a_response_and_its_tokens_get_one_advantage(processes):
    assert sums_of_trajectories(list(batches()), PENALTIES, processes) == pytest.approx([0.3, 0.4, 0.6])
    changed = with_advantages_of(list(batches()), np.array([10.0, 20.0, 30.0]))
    assert advantages(changed) == [[10, 10, 20], [30, 30, 30]]


def test_advantages_are_normalized_over_the_tokens_in_the_loss(processes):
    # 1, 1, 2, 2, 2 count: mean 1.6, deviation sqrt((2 x 0.36 + 3 x 0.16) / 5) = sqrt(0.24).
    first, second = advantages(normalized(list(batches()), processes))
    assert first == pytest.approx([-0.6 / math.sqrt(0.24)] * 2 + [-2.6 / math.sqrt(0.24)])
    assert second == pytest.approx([0.4 / math.sqrt(0.24)] * 3)


def test_equal_advantages_become_zero_and_not_noise(processes):
    micro = pack(flatten([single_turn([1], np.arange(7), advantage=0.1)] * 3), max_response_tokens=8)
    assert advantages(normalized([micro], processes)) == [[0.0] * 21]
    # The root of a variance of 1e-12 + 1e-8 divides.
    noise = pack(flatten([single_turn([1], [2], advantage=a) for a in (1e-6, -1e-6)]), max_response_tokens=8)
    assert advantages(normalized([noise], processes))[0] == pytest.approx([0.01, -0.01], rel=1e-3)


def test_values_make_advantages_and_returns(processes):
    # gamma = lambda = 1/2. First response: values 0.5, 0.25, rewards 0 and 1 at its end, penalties 0.1 and 0.2:
    # delta_1 = 0.8 - 0.25 = 0.55; delta_0 = -0.1 + 0.125 - 0.5 = -0.475; A_0 = -0.475 + 0.55 / 4 = -0.3375.
    values = [torch.tensor([0.5, 0.25, 0.0]), torch.zeros(3)]
    changed, returns = advantages_from_values(list(batches()), values, PENALTIES, processes, discount=0.5, decay=0.5)
    first, second = advantages(changed)
    assert first == pytest.approx([-0.3375, 0.55, -1.4])
    assert second == pytest.approx([-0.1 - 0.2 / 4 + 1.7 / 16, -0.2 + 1.7 / 4, 1.7])
    assert returns[0].tolist() == pytest.approx([0.1625, 0.8, -1.4])
    assert returns[1].tolist() == pytest.approx(second)
