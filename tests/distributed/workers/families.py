"""Worker: every model family in several layouts. Writes what was loaded, scored and learnt in one supervised step.

Arguments: OUTPUT_DIR JSON. The JSON lists layouts {name, parallel, dtype, learns, models}, where `models` maps names to
folders of checkpoints. Files are OUTPUT_DIR/<layout>/<model>.<rank>.pt with the keys

- `weights` (leader): the full tensors by name; `updated`: the same after the step, where the layout `learns`;
- `logprobs` (the last stage's first tensor-parallel process): of all response tokens that this process holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from dapo_mega.megatron import cpu_accelerator

    cpu_accelerator.install()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from dapo_mega.config import ParallelConfig
    from dapo_mega.megatron.processes import start_processes

    torch.set_num_threads(1)
    for layout in json.loads(sys.argv[2]):
        parallel = ParallelConfig(**layout["parallel"])
        processes = start_processes(parallel, 0)
        folder = Path(sys.argv[1]) / layout["name"]
        folder.mkdir(exist_ok=True)
        for name, model in layout["models"].items():
            result = load_score_and_learn(model, layout, parallel, processes)
            torch.save(result, folder / f"{name}.{processes.rank}.pt")
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def load_score_and_learn(model, layout, parallel, processes):
    from dapo_mega.batching.microbatch import pack
    from dapo_mega.batching.samples import flatten
    from dapo_mega.config import ModelConfig, OptimizerConfig
    from dapo_mega.megatron.megatron_policy import MegatronPolicy
    from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tiny import make_samples

    policy = MegatronPolicy(
        ModelConfig(path=model, dtype=layout["dtype"]),
        parallel,
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0, weight_decay=0.0, epsilon=1.0, clip_grad=0.0),
        processes,
        temperature=1.0,
        updates_per_step=1,
        num_steps=2,
    )
    samples = [sample for sample in make_samples(12) if sample.loss_mask.any()]
    # Every replica gets all samples, so that their mean is the same under data parallelism.
    batch = pack(flatten(samples), policy.packing_layout, max_response_tokens=64)
    share = policy.context_shard(batch)
    result = {}
    weights = full_weights(policy)
    if processes.is_leader:
        result["weights"] = weights
    scores = policy.score([share])[0]
    if processes.is_last_stage and processes.tensor_rank == 0 and processes.data_rank == 0:
        result["logprobs"] = scores.logprobs
    if layout["learns"]:
        policy.update([TokenBatch(share)], SupervisedLoss())
        result["updated"] = full_weights(policy)
    return result


def full_weights(policy):
    return {name: tensor.clone() for bucket in policy.weights(1 << 14) for name, tensor in bucket}


if __name__ == "__main__":
    main()
