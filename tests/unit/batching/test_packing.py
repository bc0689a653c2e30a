from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_mega.batching.balancing import best_fit_count, partition, partition_equal_count, rebalance
from dapo_mega.batching.microbatch import context_positions, context_slice, pack
from dapo_mega.batching.plan import (
    PackingLayout,
    padded_lengths,
    plan_micro_batches,
    sample_costs,
)
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.errors import InputError


def sample(prompt, response, advantage=1.0, in_loss=True, num_stale=0):
    logprobs = -np.arange(1, len(response) + 1, dtype=np.float32)
    return single_turn(prompt, response, logprobs, advantage=advantage, in_loss=in_loss, num_off_policy=num_stale)


def test_a_position_predicts_the_token_after_it():
    samples = flatten([sample([5, 6], [7, 8], 2.0), sample([1], [2, 3, 4], -1.0, False, 2)])
    batch = pack(samples, PackingLayout(multiple_of=5), max_response_tokens=9)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 1, 2, 3, 4, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 8, 10]
    assert batch.targets.response_mask.nonzero()[:, 0].tolist() == [1, 2, 4, 5, 6]
    assert batch.targets.token_ids[batch.targets.response_mask].tolist() == [7, 8, 2, 3, 4]
    assert batch.targets.loss_mask.nonzero()[:, 0].tolist() == [1, 2]
    assert batch.targets.fresh_mask.nonzero()[:, 0].tolist() == [1, 2, 6]
    assert batch.first_segments.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert batch.targets.advantages[batch.targets.response_mask].tolist() == [2, 2, -1, -1, -1]
    assert batch.targets.rollout_logprobs[batch.targets.response_mask].tolist() == [-1, -2, -1, -2, -3]
    assert batch.token_weights[batch.targets.response_mask].tolist() == [1, 1, 0, 0, 0]
    assert batch.denominator == 2
    assert (batch.num_tokens, batch.max_seqlen) == (8, 4)


def test_a_sample_of_several_turns_is_one_with_several_runs_of_its_masks():
    # Prompt 5, response 7, the tool's answer 8 and 9, response 6 and 4.
    turns = single_turn([5], [7, 8, 9, 6, 4], [-1, -2, -3, -4, -5], advantage=2.0)
    sampled = torch.tensor([False, True, False, False, True, True])
    batch = pack(flatten([replace(turns, response_mask=sampled, loss_mask=sampled)]), max_response_tokens=9)
    assert batch.targets.token_ids[batch.targets.response_mask].tolist() == [7, 6, 4]
    assert batch.token_weights.tolist() == [1, 0, 0, 1, 1, 0]
    assert batch.denominator == 3


def test_a_sample_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="first token of a sample cannot be predicted"):
        flatten([sample([], [1, 2])])


@pytest.mark.parametrize(
    ("aggregation", "weights", "denominator"),
    [
        ("token_mean", [1, 1, 1, 1, 1], 5),
        ("sequence_mean_token_mean", [1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3], 2),
        ("sequence_mean_constant", [1, 1, 1, 1, 1], 18),
    ],
)
def test_weights_and_denominators_of_each_aggregation(aggregation, weights, denominator):
    samples = flatten([sample([5, 6], [7, 8]), sample([1], [2, 3, 4])])
    batch = pack(samples, aggregation=aggregation, max_response_tokens=9)
    torch.testing.assert_close(
        batch.token_weights[batch.targets.response_mask], torch.tensor(weights, dtype=torch.float32)
    )
    assert batch.denominator == denominator


def test_an_empty_micro_batch_is_padding_that_counts_nowhere():
    nothing, _ = flatten([sample([5, 6], [7, 8])]).split([0, 1])
    batch = pack(nothing, PackingLayout(multiple_of=2), max_response_tokens=9)
    assert batch.tokens.tolist() == [0, 0]
    assert not batch.targets.response_mask.any()
    assert (batch.denominator, batch.num_tokens) == (0, 0)


def test_samples_are_padded_inside_their_own_segments():
    samples = flatten([sample([5, 6], [7, 8, 9], 2.0), sample([1], [2, 3, 4])]).select([1, 0])
    batch = pack(samples, PackingLayout(multiple_of=8, segment_multiple=4), max_response_tokens=9)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 4, 12, 16]
    assert batch.max_seqlen == 8
    assert batch.targets.response_mask.nonzero()[:, 0].tolist() == [0, 1, 2, 5, 6, 7]
    assert batch.targets.token_ids[batch.targets.response_mask].tolist() == [2, 3, 4, 7, 8, 9]
    assert batch.targets.rollout_logprobs[batch.targets.response_mask].tolist() == [-1, -2, -3, -1, -2, -3]
    assert (batch.num_tokens, batch.denominator) == (9, 6)


def samples_of_lengths(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return flatten(
        [
            sample(
                rng.integers(1, 1000, prompt),
                rng.integers(1, 1000, response),
                float(rng.normal()),
                bool(rng.integers(2)),
                int(rng.integers(response + 1)),
            )
            for prompt, response in lengths
        ]
    )


some_lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=8)


@settings(max_examples=30)
@given(lengths=some_lengths, segment_multiple=st.sampled_from([1, 2, 6]))
def test_padding_of_samples_changes_nothing_but_positions_in_the_batch(lengths, segment_multiple):
    samples = samples_of_lengths(lengths)
    common = {"aggregation": "sequence_mean_token_mean", "max_response_tokens": 30}
    plain = pack(samples, **common)
    layout = PackingLayout(multiple_of=2 * segment_multiple, segment_multiple=segment_multiple)
    padded = pack(samples, layout, **common)
    assert not (np.diff(padded.cu_seqlens) % segment_multiple).any()
    assert len(padded.tokens) % (2 * segment_multiple) == 0
    assert (padded.denominator, padded.num_tokens) == (plain.denominator, plain.num_tokens)
    scored, padded_scored = plain.targets.response_mask, padded.targets.response_mask
    for name in ("tokens", "positions", "first_segments", "token_weights"):
        assert torch.equal(getattr(padded, name)[padded_scored], getattr(plain, name)[scored]), name
    assert not padded.token_weights[~padded_scored].any()
    for name, column in vars(padded.targets).items():
        assert torch.equal(column[padded_scored], getattr(plain.targets, name)[scored]), name
        if name not in ("token_ids", "engine_ids", "sample_ids", "teachers"):
            assert not column[~padded_scored].any(), name


def test_a_context_rank_holds_a_front_and_a_back_chunk_of_each_segment():
    cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert context_positions(cu_seqlens, 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert context_positions(cu_seqlens, 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("size", [2, 3])
def test_context_positions_are_those_of_megatrons_rotary_embedding(size):
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    segments = [12, 24, 12, 36]
    cu_seqlens = torch.tensor([0, *np.cumsum(segments)], dtype=torch.int32)
    within = torch.cat([torch.arange(n) for n in segments])
    for rank in range(size):
        expected = torch.cat(
            [_get_thd_freqs_on_this_cp_rank(rank, size, torch.empty(n // size), torch.arange(n)) for n in segments]
        )
        assert torch.equal(within[context_positions(cu_seqlens, rank, size)], expected)


@settings(max_examples=30)
@given(lengths=some_lengths, size=st.integers(1, 4))
def test_context_slices_divide_a_micro_batch_and_keep_its_sums(lengths, size):
    layout = PackingLayout(multiple_of=2 * size, segment_multiple=2 * size)
    whole = pack(samples_of_lengths(lengths), layout, max_response_tokens=30)
    slices = [context_slice(whole, rank, size) for rank in range(size)]
    positions = [context_positions(whole.cu_seqlens, rank, size) for rank in range(size)]
    assert torch.cat(positions).sort().values.tolist() == list(range(len(whole.tokens)))
    assert len({len(part.tokens) for part in slices}) == 1
    assert sum(part.denominator for part in slices) == whole.denominator
    assert sum(part.num_tokens for part in slices) == whole.num_tokens
    assert sum(float(part.token_weights.sum()) for part in slices) == float(whole.token_weights.sum())
    for part, held in zip(slices, positions, strict=True):
        assert torch.equal(part.cu_seqlens, whole.cu_seqlens)
        assert part.max_seqlen == whole.max_seqlen
        # The token after a chunk's last one is on another rank; the target must be it all the same.
        scored = part.targets.response_mask
        assert torch.equal(part.targets.token_ids[scored].long(), whole.tokens[held[scored] + 1])
        assert torch.equal(part.targets.advantages, whole.targets.advantages[held])
    if size == 1:
        assert slices[0] is whole


def tokens_of(lengths, plan, segment_multiple=1):
    sizes = padded_lengths(np.asarray(lengths), segment_multiple)
    return np.array([[sizes[indices].sum() for indices in rank] for rank in plan])


def rank_costs(lengths, plan, attention_cost):
    costs = sample_costs(np.asarray(lengths), attention_cost)
    return np.array([sum(costs[indices].sum() for indices in rank) for rank in plan])


def log_normal_lengths(num_samples, sigma, seed, mean=4000, longest=20000):
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, 2 * num_samples)
    return np.maximum(drawn[drawn <= longest][:num_samples], 1).astype(np.int64)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    num_ranks=st.integers(1, 8),
    budget=st.integers(50, 200),
    attention_cost=st.sampled_from([0.0, 0.1]),
    count_multiple=st.integers(1, 4),
    segment_multiple=st.sampled_from([1, 4, 6]),
)
def test_a_plan_holds_every_sample_once_within_budget_and_equal_counts(
    lengths, num_ranks, budget, attention_cost, count_multiple, segment_multiple
):
    layout = PackingLayout(
        num_ranks,
        attention_cost=attention_cost,
        count_multiple=count_multiple,
        segment_multiple=segment_multiple,
    )
    plan = plan_micro_batches(np.array(lengths), layout, budget)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % count_multiple == 0
    assert sorted(i for rank in plan for bin_ in rank for i in bin_) == list(range(len(lengths)))
    rounded_budget = -(-budget // segment_multiple) * segment_multiple
    assert tokens_of(lengths, plan, segment_multiple).max() <= rounded_budget


# At 8 ranks the budget is tight; at 64 two quantities must be even over 32 samples a rank. With two micro-batches per
# rank and a small model, where attention weighs most, there are too few samples for that.
@pytest.mark.parametrize(
    ("num_ranks", "hidden_size", "unevenness"),
    [(8, 5120, 0.03), (8, 896, 0.03), (64, 5120, 0.03), (64, 896, 0.03), (128, 5120, 0.03), (128, 896, 0.05)],
)
def test_long_tailed_samples_fill_micro_batches_and_ranks_evenly(num_ranks, hidden_size, unevenness):
    lengths = log_normal_lengths(2048, 0.9, seed=num_ranks)
    attention_cost = 1 / (12 * hidden_size)
    plan = plan_micro_batches(lengths, PackingLayout(num_ranks, attention_cost=attention_cost), 32768)
    tokens, costs = tokens_of(lengths, plan), rank_costs(lengths, plan, attention_cost)
    assert tokens.mean() / tokens.max() >= 1 - unevenness
    assert costs.max() / costs.mean() <= 1 + unevenness
    fewest = max(1, -(-int(lengths.sum()) // (32768 * num_ranks)))
    assert len(plan[0]) <= fewest + 1
    assert num_ranks == 8 or len(plan[0]) == fewest


def test_micro_batches_fit_a_budget_that_leaves_no_room_to_spare():
    # Ten times 1..19 are 1900 tokens: twenty micro-batches of 95 must all be full.
    lengths = np.tile(np.arange(1, 20), 10)
    plan = plan_micro_batches(lengths, PackingLayout(4), 95)
    assert len(plan[0]) == 5
    assert tokens_of(lengths, plan).tolist() == [[95] * 5] * 4


def test_padding_to_segments_counts_against_the_budget():
    # Five samples of 5 tokens take 8 each: two fit into 16, not three.
    plan = plan_micro_batches(np.full(6, 5), PackingLayout(1, segment_multiple=8), 16)
    assert [len(indices) for indices in plan[0]] == [2, 2, 2]


def test_counts_are_rounded_up_to_their_multiple():
    lengths = np.full(20, 10)
    assert len(plan_micro_batches(lengths, PackingLayout(2), 20)[0]) == 5
    assert len(plan_micro_batches(lengths, PackingLayout(2, count_multiple=4), 20)[0]) == 8


def test_a_plan_evens_out_cost_where_it_differs_from_length():
    # L * (1 + L) is 72, 20 and 6 for 8, 4 and 2: 248 in all, and each rank takes half of every kind.
    lengths = np.array([8, 8, 4, 4, 4, 4, 2, 2, 2, 2])
    plan = plan_micro_batches(lengths, PackingLayout(2, attention_cost=1.0), 100)
    assert rank_costs(lengths, plan, 1.0).tolist() == [124.0, 124.0]


def test_a_ranks_micro_batches_rise_in_cost_and_then_fall():
    lengths = log_normal_lengths(200, 0.9, seed=5)
    attention_cost = 1 / (12 * 896)
    for rank in plan_micro_batches(lengths, PackingLayout(2, attention_cost=attention_cost), 32768):
        costs = [sample_costs(lengths[indices], attention_cost).sum() for indices in rank]
        top = int(np.argmax(costs))
        assert costs[: top + 1] == sorted(costs[: top + 1])
        assert costs[top:] == sorted(costs[top:], reverse=True)
        assert 0 < top < len(costs) - 1


def test_best_fit_puts_an_item_where_it_leaves_least_room():
    # 7 and 4 open bins of 10; 3 fits both and fills the first up, which leaves 6 its place beside the 4.
    assert best_fit_count(np.array([7, 4, 3]), 10) == 2
    assert best_fit_count(np.array([6, 6, 6]), 10) == 3
    assert best_fit_count(np.array([7, 4, 3, 6]), 10) == 2


def test_samples_of_over_half_the_budget_get_a_micro_batch_each():
    plan = plan_micro_batches(np.full(64, 20), PackingLayout(2), 32)
    assert [len(indices) for rank in plan for indices in rank] == [1] * 64


def test_the_longest_item_goes_first_into_the_emptiest_part():
    # 5, then 4, then 3 joins the 4 with 3 (7 against 5), 2 joins the 5 (7), and 1 the first of the two.
    assert partition(np.array([1, 3, 5, 2, 4]), 2) == [[2, 3, 0], [4, 1]]


def test_parts_of_equal_count_get_their_largest_items_by_need():
    # 9 and 1, then the part of 1 gets 6 and the other 5; no part gets a third.
    parts = partition_equal_count(np.array([9.0, 6.0, 5.0, 1.0]), 2)
    assert sorted(map(sorted, parts)) == [[0, 3], [1, 2]]


def test_a_search_moves_or_swaps_items_until_no_bin_is_over_a_limit():
    sizes = np.array([[4.0], [2.0], [1.0], [1.0]])
    moved = rebalance([[0, 1], [2, 3]], sizes, np.array([4.0]))
    assert sorted(map(sorted, moved)) == [[0], [1, 2, 3]]
    # Both bins hold 6 of 6 tokens; the costs 5 + 3 and 1 + 1 allow 5 + 1 and 3 + 1 alone.
    sizes = np.array([[3.0, 5.0], [3.0, 3.0], [3.0, 1.0], [3.0, 1.0]])
    swapped = rebalance([[0, 1], [2, 3]], sizes, np.array([6.0, 6.0]))
    assert sorted(sizes[indices].sum(axis=0).tolist() for indices in swapped) == [[6.0, 4.0], [6.0, 6.0]]


def test_bins_of_one_rank_share_their_costs_but_not_their_tokens():
    # Two ranks of two bins with one item each: costs 4 + 4 and 1 + 1 become 4 + 1 twice, whichever bins they are in.
    sizes = np.array([[1.0, 4.0], [1.0, 4.0], [1.0, 1.0], [1.0, 1.0]])
    bins = rebalance([[0], [1], [2], [3]], sizes, np.array([1.0, 5.0]), bins_per_rank=2)
    assert [len(indices) for indices in bins] == [1, 1, 1, 1]
    assert [sizes[bins[first] + bins[first + 1], 1].sum() for first in (0, 2)] == [5, 5]


def test_a_sample_over_the_budget_is_refused():
    with pytest.raises(InputError, match="30 tokens does not fit the budget of 20"):
        plan_micro_batches(np.array([3, 30]), PackingLayout(2), 20)


def test_a_loose_budget_still_gives_every_rank_its_share():
    plan = plan_micro_batches(np.array([10, 10, 1, 1]), PackingLayout(2), 100)
    assert sorted(sum([10, 10, 1, 1][i] for b in rank for i in b) for rank in plan) == [11, 11]
