"""Three optimizer updates of the same mini-batches, under whichever layout."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from dapo_mega.batching.samples import flatten
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.config import AlgorithmConfig, ComputeConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch
from dapo_mega.megatron.processes import start_processes
from tests import te_cpu

from .launching import run_distributed
from .tiny import make_samples, with_routes

SAMPLES = (12, 18, 10)
"""Of each update. The number of micro-batches varies, as packing makes it vary."""
NUM_UPDATES = len(SAMPLES)


def three_updates(world_size, cases, models, checkpoints):
    """{name: what the case left behind}, from one start of so many processes.

    A case has `parallel` and `compute`, sections of the configuration; `budget`; `dtype`; `layers`, "auto" if none are
    given; `samples`, the numbers of the updates, SAMPLES if none are given; `routes`, whether tokens go to experts that
    were drawn; `mtp`, whether a layer of multi-token prediction learns. With `save_after` a checkpoint is written
    to `checkpoints` after so many updates; with `resume` (the name of an earlier case) the updates after its checkpoint
    are done. `within` is a function that makes a context for it. `models` has each case's checkpoint.
    """
    return run_distributed(_run_cases, world_size, cases, models, checkpoints, timeout_s=600)[0]


def _run_cases(cases, models, checkpoints):
    results = {}
    for name, case in cases.items():
        with case.get("within", contextlib.nullcontext)():
            results[name] = _three_updates(name, case, models[name], checkpoints)
    return results


def _three_updates(name, case, model, checkpoints):
    torch.use_deterministic_algorithms(False)
    parallel = ParallelConfig(**case.get("parallel", {}))
    processes = start_processes(parallel, 0)
    policy = MegatronPolicy(
        ModelConfig(
            path=str(model),
            dtype=case.get("dtype", "fp32"),
            layer_implementation=case.get("layers", "auto"),
            train_mtp=case.get("mtp", False),
        ),
        parallel,
        # With a large epsilon Adam is a smooth function of the gradients, lr * m / (sqrt(v) + eps), so that the updated
        # weights show the gradients themselves and not only their signs.
        OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.01, epsilon=1.0, clip_grad=1.0),
        processes,
        temperature=0.9,
        updates_per_step=1,
        num_steps=NUM_UPDATES,
        compute=ComputeConfig(**case.get("compute", {})),
        lora=LoraConfig(**case["lora"]) if "lora" in case else None,
    )
    before = dict(pair for bucket in policy.selected("whole").weights(1 << 14) for pair in bucket)
    before = {name: tensor.clone() for name, tensor in before.items()}
    algorithm = AlgorithmConfig(**case.get("algorithm", {}))
    metrics, scores, counts = [], [], []
    done = 0
    if "resume" in case:
        store = CheckpointStore(checkpoints / case["resume"], keep_last=1)
        done = store.load(policy, store.latest()).step
    for update in range(done, NUM_UPDATES):
        samples = case.get("samples", SAMPLES)[update]
        samples = make_samples(samples, seed=update, vocab_size=policy.arch.vocab_size)
        if case.get("routes"):
            experts = policy.arch.experts
            samples = with_routes(samples, policy.arch.num_layers, experts.number, experts.per_token, seed=update)
        samples = flatten(samples)
        (micro_batches,) = policy.pack(
            samples, token_budget=case.get("budget", 150), aggregation=algorithm.aggregation, max_response_tokens=40
        ).mini_batches
        counts.append(len(micro_batches))
        if update == done:
            # Sums over all tokens tell whether every token was scored, wherever it was.
            own, routing = counting_routes(policy, micro_batches)
            scores = [
                float(sum(s.logprobs.double().sum() for s in own)),
                float(sum(s.entropy.double().sum() for s in own)),
            ]
            scores = all_processes_sum(policy, scores)
        # Old log-probs off by a fixed pattern, so that clipping on both sides is in play.
        batches = [
            TokenBatch(b, b.targets.rollout_logprobs[b.targets.response_mask] * 0.1 - 4.0)
            if processes.is_last_stage
            else TokenBatch(b)
            for b in micro_batches
        ]
        metrics.append(policy.update(batches, PolicyGradient(algorithm.resolved(engine_differs=False))))
        if case.get("save_after") == update + 1:
            state = LoopState(update + 1, {}, {})
            CheckpointStore(checkpoints / name, keep_last=1).save(policy, state, state.step)
    after = dict(pair for bucket in policy.selected("whole").weights(1 << 14) for pair in bucket)
    after = {name: tensor.clone() for name, tensor in after.items()}
    buckets = policy.selected("adapters").weights(1 << 14) if "lora" in case else ()
    adapters = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
    biases = expert_biases(policy)
    deterministic = torch.are_deterministic_algorithms_enabled()
    parallel_state.destroy_model_parallel()
    te_cpu.forget_models()
    if processes.rank != 0:
        return None
    return {
        "metrics": metrics,
        "scores": scores,
        "before": before,
        "after": after,
        "adapters": adapters,
        "counts": counts,
        "expert_biases": biases,
        "resumed": done > 0,
        "deterministic": deterministic,
        "routing": routing,
    }


def relative_error(got, expected):
    """Norm of the difference over the norm of what is expected, all tensors together."""
    squares = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    errors = sum(float((got[name].double() - tensor.double()).square().sum()) for name, tensor in expected.items())
    return math.sqrt(errors / squares)


def learnt(result):
    return {name: result["after"][name].double() - result["before"][name].double() for name in result["after"]}


def counting_routes(policy, micro_batches):
    """Scores, and how many tokens of all processes each layer's router sent to each expert [layers, experts]."""

    experts = policy.arch.experts.number if policy.arch.experts else 1
    counts = torch.zeros(policy.arch.num_layers, experts, dtype=torch.int64)

    def count(router, inputs, output):
        counts[router.layer_number - 1] += output[1].sum(0)

    routers = [module for chunk in policy.chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    handles = [router.register_forward_hook(count) for router in routers]
    scores = policy.score(micro_batches)
    for handle in handles:
        handle.remove()
    dist.all_reduce(counts, group=policy.processes.control)
    return scores, counts


def all_processes_sum(policy, values):
    """Sum over the processes that hold log-probs: one per context and data rank."""

    total = torch.tensor(values, dtype=torch.float64)
    if policy.processes.tensor_rank != 0:
        total.zero_()
    dist.all_reduce(total, group=policy.processes.control)
    return total.tolist()


def expert_biases(policy):
    return [
        module.expert_bias.clone()
        for chunk in policy.chunks
        for module in chunk.modules()
        if getattr(module, "expert_bias", None) is not None
    ]
