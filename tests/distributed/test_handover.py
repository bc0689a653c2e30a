"""Samples scattered to replicas of two processes equal those packed from the whole step, added columns included."""

from dataclasses import dataclass, field, fields

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.plan import PackingLayout, plan_step
from dapo_mega.batching.samples import Sample, column, flatten, single_turn
from dapo_mega.batching.scatter import ScatterGroups
from dapo_mega.batching.step import pack_step, plan_samples

from .launching import run_distributed
from .tiny import with_routes

pytestmark = pytest.mark.distributed

COMMON = {"seed": 0, "mini_batch_groups": 2, "group_size": 6, "budget": 80}


@dataclass(frozen=True, eq=False)
class NumberedSample(Sample):
    """A per-token column of a user's."""

    turn_ids: torch.Tensor = field(metadata=column(torch.int64, outside=-1))


def hand_over(cases):
    """What became of each case; a budget of 0 asks for mini-batches that the samples do not make up."""
    size = 2
    num_replicas = dist.get_world_size() // size
    leaders = dist.new_group([r * size for r in range(num_replicas)], backend="gloo")
    replicas = [dist.new_group([r * size, r * size + 1], backend="gloo") for r in range(num_replicas)]
    data_rank = dist.get_rank() // size
    groups = ScatterGroups(dist.group.WORLD, leaders, replicas[data_rank], data_rank)
    return [compare(case, num_replicas, groups) for case in cases]


def samples_of(case):
    rng = np.random.default_rng(case["seed"])
    samples = []
    for _ in range(4 * case["group_size"]):
        prompt, response = int(rng.integers(1, 11)), int(rng.integers(1, 31))
        tokens = rng.integers(0, 2**31 - 1, prompt + response).astype(np.int32)
        logprobs = rng.standard_normal(response).astype(np.float32)
        logprobs[rng.random(response) < 0.5] = -0.0
        plain = single_turn(
            tokens[:prompt],
            tokens[prompt:],
            logprobs,
            advantage=float(rng.standard_normal()),
            in_loss=bool(rng.random() < 0.7),
            num_off_policy=int(rng.integers(response + 1)),
            engine_ids=rng.integers(-1, 3, response) if case["seed"] % 2 else 1,
        )
        if case["seed"] % 2:
            (plain,) = with_routes([plain], layers=3, experts=8, per_token=2)
        samples.append(NumberedSample(**vars(plain), turn_ids=torch.arange(prompt + response) // 10))
    return flatten(samples, ["http://a", "http://b", "http://c"], groups=np.arange(len(samples)) // case["group_size"])


def compare(case, num_replicas, groups):
    """Every process: what it gets equals packing from the whole step, bit by bit. Returns the replicas' tokens and the
    step's."""
    whole = samples_of(case)
    layout = PackingLayout(num_replicas, multiple_of=8, attention_cost=0.01, segment_multiple=4)
    planning = {
        "token_budget": case["budget"],
        "groups_per_update": case["mini_batch_groups"],
    }
    packing = {"aggregation": "token_mean", "max_response_tokens": 30}
    given = plan_samples(whole, layout, **planning) if dist.get_rank() == 0 else None
    received = pack_step(given, layout, groups, **packing)
    plan = plan_step(whole.lengths.numpy(), layout, groups=whole.origins.groups.numpy(), **planning)
    assert received.stats == plan.stats
    assert received.engines == whole.engines
    tokens = 0
    for mini_batch, planned in zip(received.mini_batches, plan.mini_batches, strict=True):
        for mine, indices in zip(mini_batch, planned[groups.data_rank], strict=True):
            expected = pack(whole.select(indices), layout, **packing)
            assert_same_bits(mine, expected)
            assert type(mine.targets) is NumberedSample
            assert_same_bits(mine.targets, expected.targets)
            tokens += mine.num_tokens
            assert_columns_follow_their_tokens(mine, [whole.select([i]).columns for i in indices])
    counts = torch.zeros(num_replicas, dtype=torch.int64)
    counts[groups.data_rank] = tokens
    dist.all_reduce(counts)
    return (counts // 2).tolist(), int(whole.lengths.sum())


def assert_same_bits(mine, theirs):
    for f in fields(mine):
        a, b = getattr(mine, f.name), getattr(theirs, f.name)
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), f.name
            assert a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes(), f.name
        elif not isinstance(a, Sample):
            assert a == b, f.name


def assert_columns_follow_their_tokens(micro_batch, columns):
    """Position t has the row of the token at t + 1, whatever the column; a segment's last position has none."""
    for start, sample in zip(micro_batch.cu_seqlens.tolist(), columns, strict=False):
        for f in fields(sample):
            rows, targets = getattr(sample, f.name), getattr(micro_batch.targets, f.name)
            assert torch.equal(targets[start : start + len(rows) - 1], rows[1:]), f.name
            assert (targets[start + len(rows) - 1] == f.metadata["outside"]).all(), f.name


def test_every_replica_gets_its_samples_with_added_columns_exactly():
    cases = [
        COMMON,
        # Engines change from token to token, which makes no runs worth their lengths.
        {**COMMON, "seed": 1},
        {**COMMON, "seed": 2, "group_size": 2},
        {**COMMON, "seed": 3, "mini_batch_groups": 4},
    ]
    outcomes = run_distributed(hand_over, 4, cases, timeout_s=180)[0]
    for (first, second), total in outcomes:
        assert first + second == total
        assert 0 < first < total


def test_a_replica_without_samples_takes_part():
    # Mini-batches of two responses for three replicas.
    cases = [{**COMMON, "mini_batch_groups": 1, "group_size": 2}]
    ((counts, total),) = run_distributed(hand_over, 6, cases, timeout_s=180)[0]
    assert min(counts) == 0
    assert sum(counts) == total
