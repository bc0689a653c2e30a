"""Which tokens Clip-Cov and KL-Cov hold back, in one process; layouts are in distributed/test_methods.py."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.config import AlgorithmConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.covariance import choose_tokens
from dapo_mega.megatron.objectives import TokenBatch

NUM_RESPONSES, LENGTH = 12, 5


@pytest.fixture
def processes():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    yield Processes(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, torch.device("cpu"), world, world, world)
    dist.destroy_process_group()


def chosen(processes, advantages, logprobs, order, num_parts, **settings):
    """Which tokens [NUM_RESPONSES, LENGTH] are chosen where the responses are packed in this order into so many
    micro-batches."""
    batches = []
    for part in np.array_split(order, num_parts):
        samples = [single_turn([1], np.arange(LENGTH), advantage=advantages[i], sample_id=int(i)) for i in part]
        micro = pack(flatten(samples), max_response_tokens=8)
        batches.append(TokenBatch(micro, torch.tensor(np.concatenate([logprobs[i] for i in part]))))
    found = np.zeros((NUM_RESPONSES, LENGTH), bool)
    for batch in choose_tokens(batches, AlgorithmConfig(policy_loss=settings).policy_loss, processes, seed=3):
        mask = batch.micro_batch.targets.response_mask
        ids = batch.micro_batch.targets.sample_ids[mask].long().numpy()
        found[ids, batch.micro_batch.positions[mask].numpy()] = batch.chosen.numpy()
    return found


@pytest.mark.parametrize("kind", ["kl_cov", "clip_cov"])
def test_as_many_tokens_as_wanted_are_chosen_in_every_split(processes, kind):
    """Also where covariances are equal: half of the responses with A = 1, and tokens of two log-probs."""
    advantages = np.where(np.arange(NUM_RESPONSES) % 2, 1.0, -1.0)
    logprobs = np.where(np.arange(LENGTH) % 2, -1.0, -3.0) * np.ones((NUM_RESPONSES, 1))
    for share, number in ((0.02, 1), (0.1, 6), (0.2, 12)):
        settings = {"kind": kind, "share": share} | ({"bounds": (0.5, 5.0)} if kind == "clip_cov" else {})
        expected = chosen(processes, advantages, logprobs, np.arange(NUM_RESPONSES), 1, **settings)
        assert expected.sum() == number
        for order, num_parts in ((np.arange(NUM_RESPONSES), 4), (np.arange(NUM_RESPONSES)[::-1], 3)):
            assert (chosen(processes, advantages, logprobs, order, num_parts, **settings) == expected).all()
    # Of the highest covariance are log p = -1 with A = 1: (-1 + 2.2) x 1.
    assert kind == "clip_cov" or not expected[::2].any()
    assert kind == "clip_cov" or expected[1::2, 1::2].sum() == 12


def test_without_covariance_no_token_is_chosen(processes):
    """Groups of equal rewards have no gradient, and choosing all of their tokens would give them one."""
    logprobs = np.random.default_rng(0).normal(size=(NUM_RESPONSES, LENGTH))
    for kind, advantage in (("kl_cov", 0.0), ("kl_cov", 0.1), ("clip_cov", 0.1)):
        found = chosen(
            processes,
            [advantage] * NUM_RESPONSES,
            logprobs,
            np.arange(NUM_RESPONSES),
            2,
            kind=kind,
            share=0.2,
        )
        assert not found.any(), (kind, advantage)
