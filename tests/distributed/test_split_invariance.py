"""Loss and gradient of one optimizer step do not depend on how the global batch was split (property 1)."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from dapo_mega.batching.samples import flatten, samples_of_groups, single_turn
from dapo_mega.config import AlgorithmConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.mismatch import measure_mismatch
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch
from dapo_mega.megatron.processes import start_processes
from dapo_mega.types import Group, Prompt, Response
from tests.made_trajectories import scored_answer

from .launching import run_distributed
from .tiny import make_model, make_moe_model, make_samples, prompt_length

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# In a gap between the responses' geometric means: 9 of 19 are below, the one response of a single token is above.
MASKED = {"tensor": 1, "pipeline": 1, "algorithm": {"sequence_mask": [0.19, 2.0]}}
SEQUENCES = {"policy_loss": "gspo", "sequence_mask": [0.3, 3.0], "importance_cap": 2.0, "importance_level": "sequence"}
TURNS = {
    "turns": {},
    "turns_grpo": {"aggregation": "sequence_mean_token_mean", "importance_cap": None},
    "turns_gspo": {**SEQUENCES, "aggregation": "sequence_mean_token_mean", "clip_low": 0.2, "clip_high": 0.2},
}
# Trajectories of one to five turns, in one sample each or divided into up to three, in every layout.
TURN_CASES = {
    1: {
        "whole": {"budget": 4096, "groups": "turns"},
        "noise": {"budget": 4096, "groups": "noise"},
        "divided": {"budget": 4096, "groups": "divided"},
        "divided_small": {"budget": 150, "groups": "divided"},
    },
    2: {
        "divided_dp2": {"budget": 150, "groups": "divided"},
        "divided_pp2": {"pipeline": 2, "budget": 150, "groups": "divided"},
        "divided_tp2": {"tensor": 2, "sequence": True, "budget": 150, "groups": "divided"},
        "divided_cp2": {"context": 2, "budget": 150, "groups": "divided"},
    },
}
WORLDS = {
    1: [
        {"name": "one", "tensor": 1, "pipeline": 1, "budget": 4096},
        {"name": "small_budget", "tensor": 1, "pipeline": 1, "budget": 64},
        {"name": "middle_budget", "tensor": 1, "pipeline": 1, "budget": 150},
        {
            "name": "grpo_one",
            "tensor": 1,
            "pipeline": 1,
            "budget": 4096,
            "algorithm": {"aggregation": "sequence_mean_token_mean"},
        },
        {
            "name": "grpo_small",
            "tensor": 1,
            "pipeline": 1,
            "budget": 64,
            "algorithm": {"aggregation": "sequence_mean_token_mean"},
        },
        {
            "name": "entropy_one",
            "tensor": 1,
            "pipeline": 1,
            "budget": 4096,
            "algorithm": {"entropy_coefficient": 0.1, "importance_cap": 2.0},
        },
        {"name": "groups", "tensor": 1, "pipeline": 1, "budget": 150, "groups": "as made"},
        {"name": "shuffled_groups", "tensor": 1, "pipeline": 1, "budget": 150, "groups": "shuffled"},
        {"name": "doubled_groups", "tensor": 1, "pipeline": 1, "budget": 150, "groups": "doubled"},
        {**MASKED, "name": "masked_one", "budget": 4096},
        {**MASKED, "name": "masked_small", "budget": 64},
        {"name": "bf16_one", "tensor": 1, "pipeline": 1, "budget": 4096, "dtype": "bf16"},
    ],
    2: [
        {"name": "dp2", "tensor": 1, "pipeline": 1, "budget": 150},
        {"name": "pp2", "tensor": 1, "pipeline": 2, "budget": 150},
        {
            "name": "grpo_dp2",
            "tensor": 1,
            "pipeline": 1,
            "budget": 150,
            "algorithm": {"aggregation": "sequence_mean_token_mean"},
        },
        {
            "name": "entropy_tp2",
            "tensor": 2,
            "pipeline": 1,
            "budget": 4096,
            "algorithm": {"entropy_coefficient": 0.1, "importance_cap": 2.0},
        },
        {**MASKED, "name": "masked_dp2", "budget": 150},
        {**MASKED, "name": "masked_cp2", "budget": 150, "context": 2},
        {"name": "bf16_dp2", "tensor": 1, "pipeline": 1, "budget": 150, "dtype": "bf16"},
    ],
}
PAIRS = [
    ("one", "small_budget"),
    ("one", "middle_budget"),
    ("one", "dp2"),
    ("one", "pp2"),
    ("grpo_one", "grpo_small"),
    ("grpo_one", "grpo_dp2"),
    ("entropy_one", "entropy_tp2"),
    ("masked_one", "masked_small"),
    ("masked_one", "masked_dp2"),
    ("masked_one", "masked_cp2"),
    # Groups in another order, and responses within them; every response twice.
    ("groups", "shuffled_groups"),
    ("groups", "doubled_groups"),
    *((f"{method}_whole", f"{method}_{name}") for method in TURNS for of in TURN_CASES.values() for name in of),
]
for world_size, cases in TURN_CASES.items():
    WORLDS[world_size] += [
        {"name": f"{method}_{name}", "tensor": 1, "pipeline": 1, **case, "algorithm": algorithm}
        for method, algorithm in TURNS.items()
        for name, case in cases.items()
    ]
EXPERTS = {"tensor": 1, "pipeline": 1, "model": "experts"}
WORLDS[1].append({**EXPERTS, "name": "experts_whole", "budget": 4096, "groups": "turns"})
WORLDS[2].append({**EXPERTS, "name": "experts_divided_ep2", "expert": 2, "budget": 150, "groups": "divided"})
PAIRS.append(("experts_whole", "experts_divided_ep2"))


def outcomes_of(models, cases):
    """The metrics of one update and the weights' change by it, by the cases' names."""
    return {case["name"]: run_case(models[case.get("model", "tied")], case) for case in cases}


def run_case(model_dir, case):
    algorithm = AlgorithmConfig(**case.get("algorithm", {}))
    parallel = ParallelConfig(
        tensor=case["tensor"],
        pipeline=case["pipeline"],
        context=case.get("context", 1),
        expert=case.get("expert", 1),
        sequence=case.get("sequence", False),
    )
    processes = start_processes(parallel, 0)
    # With a large epsilon one Adam step is a smooth function of the gradient, lr * g / (|g| + eps), so that the
    # updated weights show the gradient itself and not only its sign.
    optimizer = OptimizerConfig(learning_rate=1.0, warmup_steps=0, weight_decay=0.0, epsilon=1.0, clip_grad=1.0)
    policy = MegatronPolicy(
        ModelConfig(path=str(model_dir), dtype=case.get("dtype", "fp32")),
        parallel,
        optimizer,
        processes,
        temperature=0.9,
        updates_per_step=1,
        num_steps=1,
    )
    before = {name: tensor.clone() for bucket in policy.weights(1 << 14) for name, tensor in bucket}
    (micro_batches,) = policy.pack(
        samples_of(case.get("groups"), algorithm),
        token_budget=case["budget"],
        aggregation=algorithm.aggregation,
        max_response_tokens=40,
        whole_trajectories="gspo" in case["name"],
    ).mini_batches
    scores = policy.score(micro_batches)
    # Old log-probs off by a fixed pattern, so that clipping on both sides is in play.
    batches = [
        TokenBatch(b, s.logprobs + 0.4 * torch.sin(b.targets.rollout_logprobs[b.targets.response_mask] * 7))
        if processes.is_last_stage
        else TokenBatch(b)
        for b, s in zip(micro_batches, scores, strict=True)
    ]
    settings = algorithm.resolved(engine_differs=False)
    counted = zip(micro_batches, scores, strict=True) if processes.counts_outputs else ()
    scored = [(micro, score.logprobs) for micro, score in counted]
    mismatch = measure_mismatch(scored, settings, control=processes.control, context_group=processes.context)
    metrics = mismatch | policy.update(batches, PolicyGradient(settings, processes.context))
    after = dict(pair for bucket in policy.weights(1 << 14) for pair in bucket)
    parallel_state.destroy_model_parallel()
    if processes.rank != 0:
        return None
    change = {name: (after[name] - before[name]).clone() for name in after}
    return {
        "metrics": metrics,
        "change": change,
        "num_micro_batches": len(micro_batches),
    }


def samples_of(arrangement, algorithm):
    """Some samples; or those of groups, in an arrangement: as made, shuffled, or doubled."""

    if arrangement is None:
        return flatten(make_samples(19))
    if arrangement in ("turns", "divided", "noise"):
        return trajectories(arrangement)
    samples, rng = make_samples(20), random.Random(0)
    groups = []
    for first in range(0, len(samples), 4):
        prompt = samples[first].token_ids[: prompt_length(samples[first])].numpy()
        members = []
        for sample in samples[first : first + 4]:
            sampled = sample.response_mask
            ids, logprobs = sample.token_ids[sampled].numpy(), sample.rollout_logprobs[sampled].numpy()
            finish = "stop" if sample.loss_mask.any() else "length"
            reward = rng.choice([-1.0, 0.3, 1.0])
            members.append(scored_answer(Response(0, ids, logprobs, finish, 0), "", True, reward, reward))
        groups.append(Group(Prompt(0, "", prompt, ""), tuple(members)))
    if arrangement == "shuffled":
        groups = [Group(g.prompt, tuple(rng.sample(g.trajectories, 4))) for g in rng.sample(groups, len(groups))]
    if arrangement == "doubled":
        groups = groups * 2
    config = RunConfig.model_validate(
        {
            "output_dir": "o",
            "num_steps": 1,
            "model": {"path": "m"},
            "data": {"train": {"path": "d"}},
            "algorithm": {"advantage": algorithm.advantage},
            "reward": {"overlong_filtering": True},
        }
    )
    return samples_of_groups(groups, config, 0)


def trajectories(arrangement):
    """Nine of one to five turns; `divided`: the turns of a trajectory are those of several samples, each of which has
    all its tokens; `noise`: the columns of what was not sampled are."""
    rng, generator, found, numbers = np.random.default_rng(0), torch.Generator().manual_seed(0), [], []
    for number in range(9):
        ids = rng.integers(1, 60, int(rng.integers(30, 60)))
        first = int(rng.integers(1, 5))
        plain = single_turn(ids[:first], ids[first:], -rng.exponential(3.0, len(ids) - first), advantage=rng.normal())
        num_turns = int(rng.integers(1, 6))
        cuts = np.sort(rng.choice(np.arange(first + 1, len(ids)), 2 * num_turns - 1, replace=False))
        turn_of = torch.from_numpy(np.searchsorted(cuts, np.arange(len(ids)), side="right"))
        sampled = (turn_of % 2 == 0) & plain.response_mask  # Every other piece is an observation.
        num_samples = min(1 + number % 3, num_turns) if arrangement == "divided" else 1
        of_sample = (turn_of // 2) % num_samples
        for k in range(num_samples):
            mask = sampled & (of_sample == k)
            sample = replace(plain, response_mask=mask, loss_mask=mask & (number != 4), fresh_mask=mask)
            sample = replace(sample, turns=(turn_of // 2 * mask).to(torch.int8))
            if arrangement == "noise":
                noise = torch.randn(2, len(ids), generator=generator)
                sample = replace(
                    sample,
                    advantages=torch.where(mask, plain.advantages, noise[0]),
                    rollout_logprobs=torch.where(mask, plain.rollout_logprobs, noise[1]),
                    fresh_mask=mask | (noise[0] > 0),
                    engine_ids=torch.where(mask, 0, 7).short(),
                    turns=torch.where(mask, sample.turns, 3),
                )
            found.append(sample)
            numbers.append(number)
    return flatten(found, trajectories=numbers, groups=numbers)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of a model with tied embeddings, and of a mixture; the table of test_parallel_parity.py is of an untied one."""
    folder = tmp_path_factory.mktemp("models")
    models = {"tied": make_model(folder / "tied", tied=True), "experts": make_moe_model(folder / "experts")}
    found = {}
    for world_size, cases in WORLDS.items():
        found.update(run_distributed(outcomes_of, world_size, models, cases)[0])
    return found


@pytest.mark.parametrize(("reference", "split"), PAIRS)
def test_loss_and_gradient_do_not_depend_on_the_split(results, reference, split):
    found = results
    expected, got = found[reference], found[split]
    for name in ("policy/loss", "policy/grad_norm", "policy/clip_low_share", "policy/clip_high_share"):
        assert got["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-5), name
    assert got["change"].keys() == expected["change"].keys()
    squares = {name: float(change.double().square().sum()) for name, change in expected["change"].items()}
    errors = {
        name: float((got["change"][name] - change).double().square().sum())
        for name, change in expected["change"].items()
    }
    assert math.sqrt(sum(errors.values()) / sum(squares.values())) < 1e-5
    for name in squares:
        # Single tensors with a tiny gradient (key biases) show the rounding of weights of order 0.1 at 1e-8.
        assert math.sqrt(errors[name] / squares[name]) < 1e-4, name


def test_what_was_not_sampled_moves_no_metric(results):
    for method in TURNS:
        assert results[f"{method}_noise"]["metrics"] == results[f"{method}_whole"]["metrics"]


def test_a_divided_trajectory_is_measured_as_a_whole(results):
    whole = results["turns_gspo_whole"]["metrics"]
    assert 0 < whole["mismatch/masked_response_share"] < 1
    assert len([name for name in whole if "_turn_" in name]) == 5
    for of in TURN_CASES.values():
        for name in of:
            found = results[f"turns_gspo_{name}"]["metrics"]
            assert found == pytest.approx(whole, rel=1e-4, abs=1e-6), name


def test_the_batch_really_was_split_and_clipped(results):
    found = results
    assert found["one"]["num_micro_batches"] == 1
    assert found["small_budget"]["num_micro_batches"] > 6
    for side in ("low", "high"):
        assert 0.01 < found["one"]["metrics"][f"policy/clip_{side}_share"] < 0.5


def test_the_mask_takes_responses_out_of_loss_but_not_denominator(results):
    found = results
    masked, whole = found["masked_one"]["metrics"], found["one"]["metrics"]
    assert masked["policy/loss"] != pytest.approx(whole["policy/loss"], rel=0.01)
    assert 0.1 < masked["policy/grad_norm"] / whole["policy/grad_norm"] < 0.99
    assert masked["policy/loss_tokens"] == whole["policy/loss_tokens"]


def test_bf16_agrees_with_itself_over_ranks_within_its_precision(results):
    found = results
    one, two = found["bf16_one"]["metrics"], found["bf16_dp2"]["metrics"]
    assert two["policy/loss"] == pytest.approx(one["policy/loss"], rel=0.02, abs=0.002)
    assert two["policy/grad_norm"] == pytest.approx(one["policy/grad_norm"], rel=0.02)
