import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_mega.packing import build_micro_batch, columns_from_samples, plan_micro_batches
from dapo_mega.types import Sample


def sample(prompt, response, advantage=1.0, in_loss=True, is_fresh=True):
    token_ids = np.array([*prompt, *response], dtype=np.int32)
    logprobs = -np.arange(1, len(response) + 1, dtype=np.float32)
    return Sample(token_ids, len(prompt), advantage, in_loss, logprobs, is_fresh)


def test_a_position_predicts_the_token_after_it():
    columns = columns_from_samples([sample([5, 6], [7, 8], 2.0), sample([1], [2, 3, 4], -1.0, False, False)])
    batch = build_micro_batch(columns, [0, 1], aggregation="token_mean", max_response_tokens=9, multiple_of=5)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 1, 2, 3, 4, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 8, 10]
    assert batch.response_mask.nonzero()[:, 0].tolist() == [1, 2, 4, 5, 6]
    assert batch.targets[batch.response_mask].tolist() == [7, 8, 2, 3, 4]
    assert batch.loss_mask.nonzero()[:, 0].tolist() == [1, 2]
    assert batch.fresh_mask.nonzero()[:, 0].tolist() == [1, 2]
    assert batch.advantages[batch.response_mask].tolist() == [2, 2, -1, -1, -1]
    assert batch.rollout_logprobs[batch.response_mask].tolist() == [-1, -2, -1, -2, -3]
    assert batch.token_weights[batch.response_mask].tolist() == [1, 1, 0, 0, 0]
    assert batch.denominator == 2
    assert (batch.num_tokens, batch.max_seqlen) == (8, 4)


@pytest.mark.parametrize(
    ("aggregation", "weights", "denominator"),
    [
        ("token_mean", [1, 1, 1, 1, 1], 5),
        ("sequence_mean_token_mean", [1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3], 2),
        ("sequence_mean_constant", [1, 1, 1, 1, 1], 18),
    ],
)
def test_weights_and_denominators_of_each_aggregation(aggregation, weights, denominator):
    columns = columns_from_samples([sample([5, 6], [7, 8]), sample([1], [2, 3, 4])])
    batch = build_micro_batch(columns, [0, 1], aggregation=aggregation, max_response_tokens=9)
    torch.testing.assert_close(batch.token_weights[batch.response_mask], torch.tensor(weights, dtype=torch.float32))
    assert batch.denominator == denominator


def test_an_empty_micro_batch_is_padding_that_counts_nowhere():
    columns = columns_from_samples([sample([5, 6], [7, 8])])
    batch = build_micro_batch(columns, [], aggregation="token_mean", max_response_tokens=9, multiple_of=2)
    assert batch.tokens.tolist() == [0, 0]
    assert not batch.response_mask.any()
    assert (batch.denominator, batch.num_tokens) == (0, 0)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    num_ranks=st.integers(1, 8),
    budget=st.integers(50, 200),
    attention_cost=st.sampled_from([0.0, 0.1]),
)
def test_a_plan_holds_every_sample_once_within_budget_and_equal_counts(lengths, num_ranks, budget, attention_cost):
    plan = plan_micro_batches(np.array(lengths), num_ranks, budget, attention_cost)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for rank in plan for bin_ in rank for i in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= budget for rank in plan for bin_ in rank)


def test_samples_of_a_long_tail_are_spread_evenly_over_ranks():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(8.0, 0.8, 8192), 20000).astype(np.int64)
    plan = plan_micro_batches(lengths, 16, 32768, 1 / (12 * 5120))
    cost = [sum(float(lengths[i]) * (1 + lengths[i] / (12 * 5120)) for b in rank for i in b) for rank in plan]
    assert max(cost) / (sum(cost) / len(cost)) < 1.03
    assert lengths.sum() / (16 * len(plan[0]) * 32768) > 0.95


def test_a_sample_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="30 tokens does not fit the budget of 20"):
        plan_micro_batches(np.array([3, 30]), 2, 20)


def test_a_loose_budget_still_gives_every_rank_its_share():
    plan = plan_micro_batches(np.array([10, 10, 1, 1]), 2, 100)
    assert sorted(sum([10, 10, 1, 1][i] for b in rank for i in b) for rank in plan) == [11, 11]
