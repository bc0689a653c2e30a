"""No layout changes what a method learns: an update by each of them, one after the other, equals that of one process.

Methods that look at whole responses are what context parallelism could break, and those that look at the whole batch
what data parallelism could; the replicas here have unequal shares.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dapo_mega.algorithms.advantages import whitened
from dapo_mega.batching.samples import Sample, flatten
from dapo_mega.config import PRESETS, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from dapo_mega.megatron.covariance import choose_tokens
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch
from dapo_mega.megatron.processes import start_processes
from dapo_mega.megatron.token_advantages import (
    advantages_from_values,
    normalized,
    subtract_following_penalties,
    sums_of_trajectories,
    with_advantages_of,
)
from dapo_mega.samples.token_values import by_trajectory, runs_of

from .launching import REPOSITORY, run_distributed
from .tables import marked, run_now
from .tiny import make_model, make_samples, prompt_length

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NUM_SAMPLES = 13
LAYOUTS = {
    1: {"one": {}, "small_micro_batches": {"budget": 64}},
    2: {
        "data": {},
        "context": {"parallel": {"context": 2}},
        "pipeline": {"parallel": {"pipeline": 2}},
        "tensor": {"parallel": {"tensor": 2, "sequence": True}},
    },
    4: {"context_and_data": {"parallel": {"context": 2}}},
}
NAMES = [name for cases in LAYOUTS.values() for name in cases]
WHOLE_TABLE = {"data", "context"}  # The gate has them together.
OWN_CODE = REPOSITORY / "configs" / "recipes" / "own_loss" / "my_loss.py"
OWN_LOSSES = Path(__file__).with_name("own_losses.py")
# Of every policy loss and every weighting one; KL in the reward for whole responses and token by token.
METHODS = {
    **{preset: {"preset": preset} for preset in PRESETS if preset not in ("dapo", "grpo", "rloo", "dr_grpo", "ppo")},
    "clip_cov": {"preset": "clip_cov", "covariance_share": 0.1, "covariance_bounds": [0.0, 5.0]},
    "kl_cov": {"preset": "kl_cov", "covariance_share": 0.1},
    "sequence_importance": {"preset": "dapo", "importance_cap": 2.0, "importance_level": "sequence"},
    "engine_ratios": {"preset": "dapo", "old_policy": "engine", "entropy_coefficient": 0.01},
    "own": {"policy_loss": {"kind": "function", "path": f"{OWN_CODE}:tanh_loss", "settings": {"sharpness": 3}}},
    "own_of_responses": {"policy_loss": {"kind": "function", "path": f"{OWN_LOSSES}:tapered", "whole_responses": True}},
    "own_of_all_inputs": {
        "policy_loss": {
            "kind": "function",
            "path": f"{OWN_LOSSES}:Shifted",
            "settings": {"weight": 0.5},
            "inputs": ["entropy", "reference", "engine"],
        }
    },
    "kl_of_responses": {"preset": "grpo", "kl": {"coefficient": 0.1, "estimator": "k1", "placement": "reward"}},
    "kl_of_tokens": {"preset": "reinforce", "kl": {"coefficient": 0.1, "estimator": "k1", "placement": "reward"}},
    "kl_of_tokens_normalized": {"preset": "reinforce_pp"},
    "values": {"preset": "ppo", "gae_discount": 0.98, "gae_decay": 0.9, "kl": {"coefficient": 0.1}},
}


def updates_of(model_dir, cases):
    return {name: _updates(model_dir, case) for name, case in cases.items()}


def _updates(model_dir, case):
    parallel = ParallelConfig(**case.get("parallel", {}))
    processes = start_processes(parallel, 0)
    policy = MegatronPolicy(
        ModelConfig(path=str(model_dir), dtype="fp32"),
        parallel,
        # With a large epsilon the weights show the gradients themselves, not only their signs.
        OptimizerConfig(learning_rate=0.05, warmup_steps=0, weight_decay=0.0, epsilon=1.0, clip_grad=1.0),
        processes,
        temperature=0.9,
        updates_per_step=len(METHODS),
        num_steps=1,
    )
    scored = _scored_on_rank_zero(policy, processes, case)
    metrics = {name: _update(policy, processes, case, settings) for name, settings in METHODS.items()}
    weights = {name: tensor.clone() for bucket in policy.weights(1 << 14) for name, tensor in bucket}
    parallel_state.destroy_model_parallel()
    return metrics, weights, scored


def _scored_on_rank_zero(policy, processes, case):
    """The log-probs and advantages of every response, brought together from wherever the layout computes them."""
    samples = make_samples(NUM_SAMPLES)
    micro_batches = _numbered(policy, samples, case.get("budget", 150), "token_mean")
    scores = policy.score(micro_batches)
    own = None
    if processes.counts_outputs:
        advantages = [b.targets.advantages[b.targets.response_mask] for b in micro_batches]
        own = runs_of(micro_batches, [[s.logprobs for s in scores], advantages])
    prompts = [prompt_length(sample) for sample in samples]
    lengths = [len(sample) - prompt for sample, prompt in zip(samples, prompts, strict=True)]
    places = [(i, -prompt) for i, prompt in enumerate(prompts)]
    found = [None] * processes.world_size
    dist.all_gather_object(found, own)
    return by_trajectory([runs for runs in found if runs], 2, places, lengths)


def _numbered(policy, samples, budget, aggregation):
    """This rank's micro-batches of samples numbered in their order."""
    made = [
        Sample(**{**vars(sample), "sample_ids": torch.where(sample.response_mask, i, -1).int()})
        for i, sample in enumerate(samples)
    ]
    (micro_batches,) = policy.pack(
        flatten(made), token_budget=budget, aggregation=aggregation, max_response_tokens=40
    ).mini_batches
    return micro_batches


def _update(policy, processes, case, settings):
    values = {"output_dir": "x", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d"}}}
    algorithm = RunConfig(**values, algorithm=settings).algorithm
    micro_batches = _numbered(policy, make_samples(NUM_SAMPLES), case.get("budget", 150), algorithm.aggregation)
    scores = policy.score(micro_batches)
    if algorithm.has_token_rewards:
        micro_batches = _with_penalties(micro_batches, scores, algorithm, processes)
    # Log-probs off by a fixed pattern, so that ratios are on both sides of every bound.
    batches = [
        TokenBatch(b, s.logprobs + 0.4 * torch.sin(b.targets.rollout_logprobs[b.targets.response_mask] * 7), s.logprobs)
        if processes.is_last_stage
        else TokenBatch(b)
        for b, s in zip(micro_batches, scores, strict=True)
    ]
    settings = algorithm.resolved(engine_differs=False)
    if algorithm.policy_loss.chooses_tokens:
        batches = choose_tokens(batches, algorithm.policy_loss, processes, seed=5)
    return policy.update(batches, PolicyGradient(settings, processes.context))


def _with_penalties(micro_batches, scores, algorithm, processes):
    penalties = [0.1 * s.logprobs.abs() for s in scores]
    if algorithm.preset == "grpo":
        sums = sums_of_trajectories(micro_batches, penalties, processes)
        return with_advantages_of(micro_batches, whitened(sums, np.arange(1, len(sums) + 1)))
    if algorithm.advantage.uses_critic:
        values = [torch.sin(s.logprobs) for s in scores]
        changed, returns = advantages_from_values(
            micro_batches,
            values,
            penalties,
            processes,
            discount=algorithm.advantage.discount,
            decay=algorithm.advantage.decay,
        )
        assert [len(r) for r in returns] == [len(v) for v in values]
    else:
        changed = subtract_following_penalties(micro_batches, penalties, processes)
    return normalized(changed, processes) if algorithm.normalize_advantages else changed


@pytest.fixture(scope="module")
def results(tmp_path_factory, pytestconfig):
    model = make_model(tmp_path_factory.mktemp("methods") / "model", tied=False, num_layers=2)
    found = {}
    for world_size, cases in run_now(LAYOUTS, WHOLE_TABLE, pytestconfig).items():
        found |= run_distributed(updates_of, world_size, model, cases, timeout_s=300)[0]
    return found


@pytest.mark.parametrize("layout", marked((name for name in NAMES if name != "one"), WHOLE_TABLE))
def test_every_method_learns_the_same_under_every_layout(results, layout):
    expected, got = results["one"], results[layout]
    for method in METHODS:
        for metric in ("policy/loss", "policy/grad_norm"):
            assert got[0][method][metric] == pytest.approx(expected[0][method][metric], rel=1e-5, abs=1e-6), method
    for name, tensor in expected[1].items():
        torch.testing.assert_close(
            got[1][name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("layout", marked(NAMES, WHOLE_TABLE))
def test_every_tokens_log_prob_reaches_its_place_in_the_samples(results, layout):
    for i, (sample, got, expected) in enumerate(
        zip(make_samples(NUM_SAMPLES), results[layout][2], results["one"][2], strict=True)
    ):
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6, err_msg=f"sample {i}")
        assert (got[1] == sample.advantages[prompt_length(sample) :].numpy()).all()


def test_the_wanted_share_of_tokens_is_held_back(results):
    for found in results.values():
        tokens = found[0]["kl_cov"]["policy/loss_tokens"]
        assert found[0]["kl_cov"]["policy/covariance_share"] == pytest.approx(int(0.1 * tokens) / tokens)
        assert (
            found[0]["clip_cov"]["policy/covariance_share"] == results["one"][0]["clip_cov"]["policy/covariance_share"]
        )
        assert 0.05 < found[0]["clip_cov"]["policy/covariance_share"] < 0.15


def test_no_method_stands_still(results):
    """A method whose gradient vanished would be the same under every layout too."""
    metrics = results["one"][0]
    assert min(metrics[method]["policy/grad_norm"] for method in METHODS) > 1e-4
    assert len({round(metrics[method]["policy/grad_norm"], 9) for method in METHODS}) == len(METHODS)
