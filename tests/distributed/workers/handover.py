"""Worker: hands steps over to replicas of two processes each and compares with packing from whole columns.

Arguments: JSON list of cases {seed, mini_batch_groups, group_size, budget, piece_words}; a budget of 0 asks for
mini-batches that the samples do not make up. Rank 0 prints one line per case.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields

import numpy as np
import torch
import torch.distributed as dist


def main() -> None:
    from dapo_mega.batching.handover import HandoverGroups

    dist.init_process_group("gloo")
    size = 2
    num_replicas = dist.get_world_size() // size
    leaders = dist.new_group([r * size for r in range(num_replicas)], backend="gloo")
    replicas = [dist.new_group([r * size, r * size + 1], backend="gloo") for r in range(num_replicas)]
    data_rank = dist.get_rank() // size
    groups = HandoverGroups(dist.group.WORLD, leaders, replicas[data_rank])
    for case in json.loads(sys.argv[1]):
        if case["budget"]:
            compare(case, data_rank, num_replicas, groups)
        else:
            refuse(case, data_rank, num_replicas, groups)
    dist.destroy_process_group()


def configuration(case):
    from dapo_mega.config import RunConfig

    return RunConfig.model_validate(
        {
            "output_dir": "unused",
            "num_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": {"path": "unused"}, "max_prompt_tokens": 10},
            "rollout": {"max_response_tokens": 30},
            "reward": {"overlong_punishment": False},
            "batch": {
                "groups_per_step": 4,
                "mini_batch_groups": case["mini_batch_groups"],
                "group_size": case["group_size"],
                "tokens_per_microbatch": case["budget"] or 40,
            },
        }
    )


def columns_of(case):
    from dapo_mega.batching.packing import columns_from_samples
    from dapo_mega.types import Sample

    rng = np.random.default_rng(case["seed"])
    samples = []
    for _ in range(4 * case["group_size"]):
        prompt, response = int(rng.integers(1, 11)), int(rng.integers(1, 31))
        tokens = rng.integers(0, 2**31 - 1, prompt + response).astype(np.int32)
        logprobs = rng.standard_normal(response).astype(np.float32)
        in_loss, stale = bool(rng.random() < 0.7), int(rng.integers(response + 1))
        engine = (int(rng.integers(-1, 3)), int(rng.integers(response + 1)))
        samples.append(Sample(tokens, prompt, float(rng.standard_normal()), in_loss, logprobs, stale, *engine))
    return columns_from_samples(samples)


def compare(case, data_rank, num_replicas, groups):
    """Every process: its hand-over equals packing from the whole columns, bit by bit."""
    from dapo_mega.batching import handover
    from dapo_mega.batching.packing import MicroBatch
    from dapo_mega.batching.step import PackingLayout, hand_over_step, pack_step

    handover._PIECE_WORDS = case["piece_words"]
    config, whole = configuration(case), columns_of(case)
    layout = PackingLayout(num_replicas, multiple_of=8, attention_cost=0.01, segment_multiple=4)
    given = whole if dist.get_rank() == 0 else None
    received = hand_over_step(given, config, layout, data_rank=data_rank, groups=groups)
    expected = pack_step(
        whole,
        config,
        data_rank=data_rank,
        data_size=num_replicas,
        multiple_of=8,
        attention_cost=0.01,
        segment_multiple=4,
    )
    assert received.packing_efficiency == expected.packing_efficiency
    pairs = [
        pair
        for mini_batches in zip(received.mini_batches, expected.mini_batches, strict=True)
        for pair in zip(*mini_batches, strict=True)
    ]
    for mine, theirs in pairs:
        for field in fields(MicroBatch):
            a, b = getattr(mine, field.name), getattr(theirs, field.name)
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype, field.name
                assert a.numpy().tobytes() == b.numpy().tobytes(), field.name
            else:
                assert a == b, field.name
    counts = torch.zeros(num_replicas, dtype=torch.int64)
    counts[data_rank] = sum(mine.num_tokens for mine, _ in pairs)
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print("tokens", *(counts // 2).tolist(), "of", int(whole.lengths.sum()), flush=True)


def refuse(case, data_rank, num_replicas, groups):
    """Columns that do not make whole mini-batches are refused on every process, and all go on together."""
    from dapo_mega.batching.step import PackingLayout, hand_over_step

    bigger = configuration({**case, "group_size": case["group_size"] + 3})
    given = columns_of(case) if dist.get_rank() == 0 else None
    message = ""
    try:
        hand_over_step(given, bigger, PackingLayout(num_replicas), data_rank=data_rank, groups=groups)
    except ValueError as error:
        message = str(error)
    refused = torch.tensor([int("do not make whole mini-batches" in message)])
    dist.all_reduce(refused)
    if dist.get_rank() == 0:
        print("refused on", int(refused), flush=True)


if __name__ == "__main__":
    main()
