"""Worker: one optimizer update of the same mini-batch under several layouts; rank 0 writes what came out.

Arguments: MODEL_DIR OUTPUT_DIR JSON. The JSON lists cases {name, tensor, pipeline, context, sequence, budget,
algorithm, dtype, groups}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from dapo_mega.megatron.repairs import cpu_accelerator

    cpu_accelerator.install()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    model_dir, output_dir, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    for case in cases:
        result = run_case(model_dir, case)
        if result is not None:
            torch.save(result, output_dir / f"{case['name']}.pt")
    dist.destroy_process_group()


def run_case(model_dir, case):
    import torch
    from megatron.core import parallel_state

    from dapo_mega.config import AlgorithmConfig, ModelConfig, OptimizerConfig, ParallelConfig
    from dapo_mega.megatron.megatron_policy import MegatronPolicy
    from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch
    from dapo_mega.megatron.processes import start_processes

    algorithm = AlgorithmConfig(**case.get("algorithm", {}))
    parallel = ParallelConfig(
        tensor=case["tensor"],
        pipeline=case["pipeline"],
        context=case.get("context", 1),
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
    ).mini_batches
    scores = policy.score(micro_batches)
    # Old log-probs off by a fixed pattern, so that clipping on both sides is in play.
    batches = [
        TokenBatch(b, s.logprobs + 0.4 * torch.sin(b.targets.rollout_logprobs[b.targets.response_mask] * 7))
        if processes.is_last_stage
        else TokenBatch(b)
        for b, s in zip(micro_batches, scores, strict=True)
    ]
    metrics = policy.update(batches, PolicyGradient(algorithm.loss_settings(engine_differs=False), processes.context))
    after = dict(pair for bucket in policy.weights(1 << 14) for pair in bucket)
    parallel_state.destroy_model_parallel()
    if processes.rank != 0:
        return None
    change = {name: (after[name] - before[name]).clone() for name in after}
    return {
        "metrics": metrics,
        "change": change,
        "num_micro_batches": len(micro_batches),
        "before": before,
    }


def samples_of(arrangement, algorithm):
    """Some samples; or those of groups, in an arrangement: as made, shuffled, or doubled."""
    import random

    from dapo_mega.batching.samples import flatten, samples_of_groups
    from dapo_mega.config import RunConfig
    from dapo_mega.types import Group, Prompt, Response, ScoredResponse

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tiny import make_samples, prompt_length

    if arrangement is None:
        return flatten(make_samples(19))
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
            members.append(ScoredResponse(Response(0, ids, logprobs, finish, 0), "", True, reward, reward))
        groups.append(Group(Prompt(0, "", prompt, ""), tuple(members), 0))
    if arrangement == "shuffled":
        groups = [Group(g.prompt, tuple(rng.sample(g.responses, 4)), 0) for g in rng.sample(groups, len(groups))]
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


if __name__ == "__main__":
    main()
