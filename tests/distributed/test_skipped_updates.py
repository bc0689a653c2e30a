"""An update whose gradient is not finite changes nothing on any rank, or ends the run on all, in every layout."""

import dataclasses
import math

import pytest
import torch
from megatron.core import parallel_state

from dapo_mega.batching.samples import flatten
from dapo_mega.config import AlgorithmConfig, ComputeConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.errors import InputError, at_step
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import PolicyGradient, SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes
from dapo_mega.megatron.value_loss import ValueLoss
from dapo_mega.megatron.value_model import ValueModel

from .launching import run_distributed
from .test_value_model import full_weights, with_returns
from .tiny import make_dense_experts_and_value, make_samples

pytestmark = [pytest.mark.distributed]

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CASES = {
    "tp2": ("policy", "dense", {"tensor": 2, "sequence": True}, {}),
    "pp2": ("policy", "dense", {"pipeline": 2}, {}),
    "dp2_overlap": ("policy", "dense", {}, OVERLAP),
    "ep2": ("policy", "experts", {"expert": 2}, {}),
    "sft_cp2": ("sft", "dense", {"context": 2}, {}),
    "critic_tp2": ("critic", "value", {"tensor": 2}, {}),
}


def run_cases(models):
    return {
        name: skipped_and_refused(models[model], what, layout, compute)
        for name, (what, model, layout, compute) in CASES.items()
    }


def skipped_and_refused(model, what, layout, compute):
    """Whether a bad update left all as it was, the metrics of bad and good updates, and the error of too many."""
    parallel = ParallelConfig(**layout)
    processes = start_processes(parallel, 0)
    optimizer = OptimizerConfig(learning_rate=0.1, warmup_steps=0, max_skipped_updates=2)
    settings = (ModelConfig(path=str(model), dtype="fp32"), parallel, optimizer, processes)
    sizes = {"updates_per_step": 1, "num_steps": 9, "compute": ComputeConfig(**compute)}
    subject = (
        ValueModel(*settings, **sizes) if what == "critic" else MegatronPolicy(*settings, **sizes, temperature=1.0)
    )

    def update(factor):
        samples = make_samples(9, seed=1, all_in_loss=True)
        samples[0] = dataclasses.replace(samples[0], advantages=samples[0].advantages * factor)
        packed = subject.pack(flatten(samples), token_budget=150, aggregation="token_mean", max_response_tokens=40)
        micro_batches = list(packed.mini_batches[0])
        if what == "critic":
            batches = [with_returns(batch) for batch in micro_batches]
            if processes.is_last_stage and processes.rank == 0:
                batches[0] = dataclasses.replace(batches[0], returns=batches[0].returns * factor)
            return subject.update(batches, ValueLoss())
        if what == "sft":
            if processes.rank == 0:
                weights = micro_batches[0].token_weights * factor
                micro_batches[0] = dataclasses.replace(micro_batches[0], token_weights=weights)
            return subject.update([TokenBatch(batch) for batch in micro_batches], SupervisedLoss())
        objective = PolicyGradient(AlgorithmConfig().resolved(engine_differs=False))
        old = [batch.targets.rollout_logprobs[batch.targets.response_mask] for batch in micro_batches]
        batches = zip(micro_batches, old, strict=True)
        return subject.update(
            [
                TokenBatch(batch, logprobs) if processes.is_last_stage else TokenBatch(batch)
                for batch, logprobs in batches
            ],
            objective,
        )

    metrics = [update(1.0)]
    before = state(subject)
    metrics += [update(math.inf), update(math.inf)]
    is_same = all(torch.equal(a, b) for a, b in zip(before, state(subject), strict=True))
    metrics.append(update(1.0))
    has_learnt = not all(torch.equal(a, b) for a, b in zip(before, state(subject), strict=True))
    metrics += [update(math.inf), update(math.inf)]
    try:
        with at_step(7):
            update(math.inf)
        error = ""
    except InputError as caught:
        error = str(caught)
    parallel_state.destroy_model_parallel()
    return is_same, has_learnt, metrics, error


def state(model):
    """All weights and this rank's part of the optimizer's state, as copies."""
    moments = [
        t for part in model.optimizer.chained_optimizers for s in part.optimizer.state.values() for t in s.values()
    ]
    return [*full_weights(model).values(), *(t.clone() for t in moments if isinstance(t, torch.Tensor))]


def test_a_gradient_that_is_not_finite_changes_nothing_or_ends_the_run_on_all_ranks(tmp_path):
    models = make_dense_experts_and_value(tmp_path)
    for rank, results in enumerate(run_distributed(run_cases, 2, models, timeout_s=300)):
        for name, (is_same, has_learnt, metrics, error) in results.items():
            assert (is_same, has_learnt) == (True, True), (rank, name)
            role = "critic" if "critic" in name else "policy"
            assert [m[f"{role}/skipped_update_share"] for m in metrics] == [0, 1, 1, 0, 1, 1], (rank, name)
            assert all(math.isfinite(value) for m in metrics for value in m.values()), (rank, name, metrics)
            assert [f"{role}/grad_norm" in m for m in metrics] == [True, False, False, True, False, False], (rank, name)
            assert error.startswith(
                f"step 7: the {role}'s gradient is not finite after 2 skipped in a row: its norm"
            ), error
            assert "optimizer.max_skipped_updates" in error, error
            assert "of process " in error, error
