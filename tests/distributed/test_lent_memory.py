"""What models and optimizers hold is the same after their memory was lent, and none of it is there meanwhile."""

import pytest
import torch
from megatron.core import parallel_state

from dapo_mega.batching.samples import flatten
from dapo_mega.config import ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.megatron.lent_memory import LentMemory
from dapo_mega.megatron.megatron_policy import MegatronPolicy, ScoringModel
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes
from dapo_mega.megatron.value_loss import ValueLoss
from dapo_mega.megatron.value_model import ValueModel

from .allocations import gradient_buffers, optimizer_bytes, storage_bytes
from .launching import run_distributed
from .test_value_model import with_returns
from .tiny import make_dense_experts_and_value, make_samples

pytestmark = [pytest.mark.distributed]

CASES = {
    "data": ("dense", "bf16", {}),
    "experts": ("experts", "fp32", {"expert": 2}),
    "pipeline": ("dense", "fp32", {"pipeline": 2}),
}


def run_cases(models):
    return {name: [learnt(models, *case, lends=lends) for lends in (True, False)] for name, case in CASES.items()}


def learnt(models, model, dtype, layout, *, lends):
    """All tensors after three updates, those of the weights while they were alone on the device, and what was on it:
    [beside the weights, while lent, afterwards]."""
    parallel = ParallelConfig(**layout)
    processes = start_processes(parallel, 0)
    settings = (parallel, OptimizerConfig(learning_rate=0.1, warmup_steps=0), processes)
    sizes = {"updates_per_step": 1, "num_steps": 9}
    policy = MegatronPolicy(ModelConfig(path=str(models[model]), dtype=dtype), *settings, **sizes, temperature=1.0)
    others = [ScoringModel(ModelConfig(path=str(models[model]), dtype=dtype), parallel, processes, 1.0)]
    if model == "dense":
        others.append(ValueModel(ModelConfig(path=str(models["value"]), dtype=dtype), *settings, **sizes))
    trained = [policy, *others[1:]]
    alone, held = {}, []
    lent = LentMemory(policy, others, processes.device)
    if lends:  # Before the optimizer has its state.
        for what in ("weights", "nothing", "all"):
            lent.hold(what)
    for seed in range(3):
        packed = policy.pack(
            flatten(make_samples(9, seed=seed)), token_budget=150, aggregation="token_mean", max_response_tokens=40
        )
        batches = packed.mini_batches[0]
        policy.update([TokenBatch(batch) for batch in batches], SupervisedLoss())
        for critic in others[1:]:
            critic.update([with_returns(batch) for batch in batches], ValueLoss())
        if lends:
            lent.hold("weights")
            alone = weights_of(policy)
            held.append(lent.num_bytes)
            lent.hold("nothing")
            held.append(lent.num_bytes)
            assert not [s for s in map(torch.Tensor.untyped_storage, states_of(trained)) if s.nbytes()]
            if seed == 0:  # An update that failed: the weights are wanted again.
                lent.hold("weights")
                assert all(torch.equal(tensor, alone[name]) for name, tensor in weights_of(policy).items())
                lent.hold("nothing")
            lent.hold("all")
            held.append(lent.num_bytes)
            assert not any(buffer.grad_data.any() for buffer in gradient_buffers(policy))
    gradients = [buffer.grad_data for subject in trained for buffer in gradient_buffers(subject)]
    planned = storage_bytes(gradients) + sum(map(optimizer_bytes, trained))
    tensors = [*weights_of(policy).values()]
    for subject in (*trained, *others[:1]):
        tensors += [weight.detach().clone() for chunk in subject.chunks for weight in chunk.parameters()]
    tensors += [value.clone() for value in states_of(trained)]
    num_weights = storage_bytes(weight for chunk in policy.chunks for weight in chunk.parameters())
    of_others = storage_bytes(w for other in others for chunk in other.chunks for w in chunk.parameters())
    parallel_state.destroy_model_parallel()
    return tensors, alone, held, (num_weights, of_others, planned)


def states_of(trained):
    parts = [part for subject in trained for part in subject.optimizer.chained_optimizers]
    states = [state for part in parts for state in part.optimizer.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def weights_of(policy):
    return {name: t.clone() for bucket in policy.weights(1 << 14) for name, t in bucket}


def test_models_learn_the_same_while_their_memory_is_lent_between_updates(tmp_path):
    models = make_dense_experts_and_value(tmp_path)
    for results in run_distributed(run_cases, 2, models, timeout_s=300):
        for name, ((tensors, alone, held, sizes), (expected, _, _, _)) in results.items():
            assert len(tensors) > 20
            assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True)), name
            assert all(torch.equal(a, b) for a, b in zip(alone.values(), tensors, strict=False)), name
            num_weights, of_others, planned = sizes
            assert held == [num_weights, 0, num_weights + of_others + planned] * 3, (name, sizes)
