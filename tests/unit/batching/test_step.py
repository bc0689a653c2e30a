from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dapo_mega.batching.plan import PackingLayout, plan_step
from dapo_mega.batching.samples import Sample, flatten, samples_of_groups, samples_to_score, single_turn
from dapo_mega.batching.scatter import ScatterGroups
from dapo_mega.batching.step import pack_step, plan_samples
from dapo_mega.config import RunConfig
from dapo_mega.errors import InputError
from dapo_mega.samples.token_values import TokenRuns, by_trajectory
from dapo_mega.types import Group, Prompt, Response, ScoredTrajectory, Trajectory, Turn

FOUR = {"token_budget": 40, "groups": np.arange(8) // 4, "groups_per_update": 1}
EIGHT = {"token_budget": 40, "groups": np.arange(16) // 4, "groups_per_update": 2}


def test_measures_of_a_step_by_hand():
    # First update: 20 and 10 tokens on one rank, 20 and 10 on the other. Second: 4 samples of 10.
    plan = plan_step(np.array([20, 10, 20, 10, 10, 10, 10, 10]), PackingLayout(2), **FOUR)
    assert [sorted(len(i) for rank in p for i in rank) for p in plan.mini_batches] == [[2, 2], [2, 2]]
    assert plan.stats.packing_efficiency == 100 / (2 * 30 + 2 * 20)
    assert plan.stats.budget_fill == 100 / (4 * 40)
    assert plan.stats.rank_imbalance == pytest.approx(0)


def test_a_longer_micro_batch_costs_efficiency_and_a_dearer_rank_balance():
    # First update: 20 + 1 + 1 + 1 on two ranks cannot be even: 20 against 3. Second: 10 + 10 against 10 + 10.
    plan = plan_step(np.array([20, 1, 1, 1, 10, 10, 10, 10]), PackingLayout(2), **FOUR)
    assert plan.stats.packing_efficiency == 63 / (2 * 20 + 2 * 20)
    assert plan.stats.rank_imbalance == pytest.approx((20 + 20) / ((23 + 40) / 2) - 1)


def test_padding_of_segments_counts_as_lost():
    # Samples of 9 take 12; every micro-batch holds two.
    plan = plan_step(np.full(8, 9), PackingLayout(2, segment_multiple=6), **FOUR)
    assert plan.stats.packing_efficiency == 72 / (4 * 24)
    assert plan.stats.budget_fill == 72 / (4 * 40)


def test_every_sample_is_planned_once_and_in_its_own_mini_batch():
    lengths = np.random.default_rng(0).integers(2, 21, 16)
    plan = plan_step(lengths, PackingLayout(3), **EIGHT)
    for number, mini_batch in enumerate(plan.mini_batches):
        members = sorted(i for rank in mini_batch for indices in rank for i in indices)
        assert members == list(range(8 * number, 8 * number + 8))
    everyone = [i for rank in range(3) for i in plan.samples_of(rank)]
    assert sorted(everyone) == list(range(16))


def test_micro_batches_hold_the_whole_step():
    lengths = np.random.default_rng(1).integers(2, 21, 16)
    samples = flatten([single_turn([1], np.arange(1, n)) for n in lengths], groups=EIGHT["groups"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        layout = PackingLayout(1, multiple_of=4, count_multiple=3, segment_multiple=4)
        step = pack_step(
            plan_samples(samples, layout, token_budget=40, groups_per_update=2),
            layout,
            ScatterGroups(world, world, world, 0),
            aggregation="token_mean",
            max_response_tokens=20,
        )
    finally:
        dist.destroy_process_group()
    assert [len(mini_batch) for mini_batch in step.mini_batches] == [3, 3]
    for number, mini_batch in enumerate(step.mini_batches):
        assert sum(micro.num_tokens for micro in mini_batch) == lengths[8 * number :][:8].sum()
        assert sum(micro.denominator for micro in mini_batch) == (lengths - 1)[8 * number :][:8].sum()
    assert 0 < step.stats.packing_efficiency <= 1


def test_groups_that_make_no_whole_mini_batches_are_refused():
    with pytest.raises(InputError, match="3 groups do not fill whole mini-batches of 2"):
        plan_step(np.full(9, 9), PackingLayout(2), token_budget=40, groups=np.arange(9) // 3, groups_per_update=2)


def test_samples_of_a_trajectory_stay_together_where_they_must():
    lengths = np.array([9, 8, 7, 20, 6, 5, 4, 3])
    together = np.array([0, 0, 0, 1, 2, 3, 3, 4])
    plan = plan_step(lengths, PackingLayout(2, segment_multiple=4), token_budget=24, together=together)
    (mini_batch,) = plan.mini_batches
    found = [indices for rank in mini_batch for indices in rank]
    assert sorted(i for indices in found for i in indices) == list(range(8))
    assert all(set(together[indices]).isdisjoint(np.delete(together, indices)) for indices in found)
    assert all(indices == sorted(indices) for indices in found)
    with pytest.raises(InputError, match="a trajectory of 3 samples, which this method needs together, with 24 tokens"):
        plan_step(lengths, PackingLayout(2), token_budget=23, together=together)


def test_tokens_name_the_engine_that_sampled_them_and_if_fresh():
    def response(*spans):
        answer = Response(0, np.zeros(5, np.int32), np.zeros(5, np.float32), "stop", 2, ((1, 3), (2, 5)), spans)
        return Trajectory.of(answer)

    responses = [response(("b", 5)), response(("a", 1), ("", 4), ("b", 5)), response()]
    samples = samples_to_score([(Prompt(0, "", np.zeros(3, np.int32), ""), r) for r in responses], 2)
    assert samples.engines == ("a", "b")
    assert samples.lengths.tolist() == [8, 8, 8]
    columns = samples.columns
    assert columns.engine_ids.view(3, 8)[:, 3:].tolist() == [[1] * 5, [0, -1, -1, -1, 1], [-1] * 5]
    assert columns.fresh_mask.view(3, 8).tolist() == [[False] * 6 + [True] * 2] * 3
    assert columns.response_mask.view(3, 8).tolist() == [[False] * 3 + [True] * 5] * 3
    assert not columns.loss_mask.any()


def test_a_trajectory_of_several_turns_is_its_tokens_with_a_mask():
    # Two turns around an observation of 2 tokens; then the history is written anew in 3 tokens, before a turn of 1.
    sampled = np.array([1, 1, 0, 0, 1, 0, 0, 0, 1], bool)
    ids, logprobs = np.arange(9, dtype=np.int32), np.where(sampled, -np.arange(9) / 8, 0).astype(np.float32)
    turns = (Turn(2, "stop"), Turn(5, "stop"), Turn(9, "stop"))
    spans = ((3, 2), (4, 9)), (("a", 4), ("b", 9))
    verdict = {"text": "", "correct": True, "accuracy_reward": 1.0}
    found = [
        ScoredTrajectory(number, ids, logprobs, sampled, turns, *spans, (5, 9), **verdict, reward=reward)
        for number, reward in ((0, 1.0), (1, 0.0))
    ]
    found[0] = replace(found[0], routes=np.arange(11, dtype=np.int16).reshape(11, 1, 1))
    prompt = Prompt(0, "", np.array([7, 8], np.int32), "")
    paths = {"output_dir": "o", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d"}}}
    config = RunConfig.model_validate({**paths, "algorithm": {"advantage": "group_mean"}})
    samples = samples_of_groups([Group(prompt, tuple(found))] * 2, config, version=4)
    assert samples.origins.trajectories.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert samples.origins.groups.tolist() == [0] * 4 + [1] * 4
    assert samples.origins.leads.tolist() == [1, 0] * 4
    assert samples.origins.loss_tokens.tolist() == [4] * 8
    first, second, without_routes, *_ = samples.split([1] * 8)
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    plain = single_turn(
        prompt.token_ids, ids[:5], logprobs[:5], advantage=0.5, num_off_policy=2, engine_ids=[0, 0, 0, 0, 1]
    )
    plain = replace(plain, turns=torch.tensor([0, 0, 0, 0, 0, 0, 1], dtype=torch.int8))
    for f in (f for f in fields(Sample) if getattr(plain, f.name).dim() == 1):
        outside = torch.full_like(getattr(plain, f.name), f.metadata["outside"])
        expected = plain.token_ids if f.name == "token_ids" else torch.where(mask, getattr(plain, f.name), outside)
        assert torch.equal(getattr(first.columns, f.name), expected), f.name
    assert second.columns.token_ids.tolist() == [5, 6, 7, 8]
    assert second.columns.response_mask.tolist() == [False, False, False, True]
    assert second.columns.rollout_logprobs.tolist() == [0, 0, 0, -1]
    assert second.columns.sample_ids.tolist() == [-1, -1, -1, 1]
    assert second.columns.turns.tolist() == [0, 0, 0, 2]
    # What a teacher said of each row; of a folder's nothing is known yet.
    top = {"teacher_top_ids": np.arange(18, dtype=np.int32), "teacher_top_logprobs": -np.arange(18, dtype=np.float32)}
    distillation = {"teachers": {"default": {"path": "t"}}, "top_k": 2}
    taught = RunConfig.model_validate({**paths, "distillation": distillation})
    asked = samples_of_groups([Group(prompt, (replace(found[0], **top), found[1]))], taught, version=4)
    first, second, without, _ = asked.split([1] * 4)
    assert first.columns.teacher_top_ids.tolist() == [[-1, -1]] * 2 + [[0, 1], [2, 3]] + [[-1, -1]] * 2 + [[8, 9]]
    assert second.columns.teacher_top_logprobs[-1].tolist() == [-16, -17]
    assert (second.columns.teacher_top_logprobs[:-1] == -1e30).all()
    assert (without.columns.teacher_top_ids == -1).all()
    # A position that predicts a token went through the experts of the token before; no position predicts a first one.
    assert first.columns.routes.flatten().tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert second.columns.routes.flatten().tolist() == [-1, 7, 8, 9]
    assert without_routes.columns.routes.tolist() == [[[-1]]] * 7
    # What processes computed of the samples finds its way back to the trajectory's rows.
    runs = TokenRuns(np.array([[0, 2, 2], [1, 3, 1], [0, 6, 1]], np.int32), np.array([[1.0, 2, 4, 3]], np.float32))
    (values,) = by_trajectory([runs], 1, [(0, -2), (0, 5)], [9])
    assert np.array_equal(values[0][sampled], [1, 2, 3, 4])
    assert np.isnan(values[0][~sampled]).all()


def test_parts_of_joined_samples_are_the_samples():
    samples = [single_turn([1, 2], range(n), range(n)) for n in (3, 1, 2)]
    joined = flatten(samples)
    chosen = joined.select([2, 0])
    assert chosen.lengths.tolist() == [4, 5]
    for part, expected in zip(joined.split([1, 1, 1]), samples, strict=True):
        assert all(torch.equal(column, vars(expected)[name]) for name, column in vars(part.columns).items())
    for part, expected in zip(chosen.split([1, 1]), (samples[2], samples[0]), strict=True):
        assert torch.equal(part.columns.rollout_logprobs, expected.rollout_logprobs)
