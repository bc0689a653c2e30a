import numpy as np
import pytest

from dapo_mega.batching.packing import columns_from_samples
from dapo_mega.batching.step import PackingLayout, engines_of, pack_step, plan_step, unweighted_sample
from dapo_mega.config import RunConfig
from dapo_mega.types import Prompt, Response, Sample


def config(group_size=2, mini_batch_groups=2, budget=40):
    return RunConfig.model_validate(
        {
            "output_dir": "unused",
            "num_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": {"path": "unused"}, "max_prompt_tokens": 1},
            "rollout": {"max_response_tokens": 20},
            "reward": {"overlong_punishment": False},
            "batch": {
                "groups_per_step": 4,
                "mini_batch_groups": mini_batch_groups,
                "group_size": group_size,
                "tokens_per_microbatch": budget,
            },
        }
    )


def columns(lengths):
    return columns_from_samples(
        [Sample(np.arange(1, n + 1, dtype=np.int32), 1, 1.0, True, np.zeros(n - 1, dtype=np.float32)) for n in lengths]
    )


def test_measures_of_a_step_by_hand():
    # First update: 20 and 10 tokens on one rank, 20 and 10 on the other. Second: 4 samples of 10.
    plan = plan_step(np.array([20, 10, 20, 10, 10, 10, 10, 10]), config(), PackingLayout(2))
    assert [sorted(len(i) for rank in p for i in rank) for p in plan.mini_batches] == [[2, 2], [2, 2]]
    assert plan.packing_efficiency == 100 / (2 * 30 + 2 * 20)
    assert plan.budget_fill == 100 / (4 * 40)
    assert plan.rank_imbalance == pytest.approx(0)


def test_a_longer_micro_batch_costs_efficiency_and_a_dearer_rank_balance():
    # First update: 20 + 1 + 1 + 1 on two ranks cannot be even: 20 against 3. Second: 10 + 10 against 10 + 10.
    plan = plan_step(np.array([20, 1, 1, 1, 10, 10, 10, 10]), config(), PackingLayout(2))
    assert plan.packing_efficiency == 63 / (2 * 20 + 2 * 20)
    assert plan.rank_imbalance == pytest.approx((20 + 20) / ((23 + 40) / 2) - 1)


def test_padding_of_segments_counts_as_lost():
    # Samples of 9 take 12; every micro-batch holds two.
    plan = plan_step(np.full(8, 9), config(), PackingLayout(2, segment_multiple=6))
    assert plan.packing_efficiency == 72 / (4 * 24)
    assert plan.budget_fill == 72 / (4 * 40)


def test_every_sample_is_planned_once_and_in_its_own_mini_batch():
    lengths = np.random.default_rng(0).integers(2, 21, 16)
    plan = plan_step(lengths, config(group_size=4), PackingLayout(3))
    for number, mini_batch in enumerate(plan.mini_batches):
        members = sorted(i for rank in mini_batch for indices in rank for i in indices)
        assert members == list(range(8 * number, 8 * number + 8))
    everyone = np.concatenate([plan.samples_of(rank) for rank in range(3)])
    assert sorted(everyone.tolist()) == list(range(16))


def test_ranks_pack_the_whole_step_between_them():
    lengths = np.random.default_rng(1).integers(2, 21, 16)
    steps = [
        pack_step(
            columns(lengths),
            config(group_size=4),
            data_rank=rank,
            data_size=2,
            multiple_of=4,
            attention_cost=0.0,
            count_multiple=3,
            segment_multiple=4,
        )
        for rank in range(2)
    ]
    for number in range(2):
        batches = [step.mini_batches[number] for step in steps]
        assert {len(batch) for batch in batches} == {3}
        assert sum(micro.num_tokens for batch in batches for micro in batch) == lengths[8 * number :][:8].sum()
        assert sum(micro.denominator for batch in batches for micro in batch) == (lengths - 1)[8 * number :][:8].sum()
    assert steps[0].packing_efficiency == steps[1].packing_efficiency
    assert steps[0].rank_imbalance == steps[1].rank_imbalance


def test_samples_that_make_no_whole_mini_batches_are_refused():
    with pytest.raises(ValueError, match="7 samples do not make whole mini-batches of 4"):
        plan_step(np.full(7, 9), config(), PackingLayout(2))


def test_samples_name_the_engine_that_sampled_their_end():
    def response(*spans):
        return Response(0, np.zeros(5, np.int32), np.zeros(5, np.float32), "stop", 2, ((1, 3), (2, 5)), spans)

    responses = [response(("b", 5)), response(("a", 1), ("c", 4), ("b", 5)), response(("a", 2), ("d", 5)), response()]
    engines = engines_of(responses)
    assert engines == ("b", "d")
    prompt = Prompt(0, "", np.zeros(3, np.int32), "")
    samples = [unweighted_sample(prompt, r, 2, engines) for r in responses]
    assert [(s.engine, s.engine_start, s.num_stale_tokens) for s in samples] == [
        (0, 0, 3),
        (0, 4, 3),
        (1, 2, 3),
        (-1, 0, 3),
    ]
    assert all(len(s.token_ids) == 8 and not s.in_loss for s in samples)
