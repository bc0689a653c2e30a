"""Worker: gathers a model's weights under several layouts; rank 0 prints one JSON line per case.

Arguments: JSON. It lists cases {model, parallel, dtype, bucket_bytes, mixed}: `model` is the folder of a checkpoint,
`mixed` keeps norms in float32 in a bf16 model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from dapo_mega.policy import cpu_accelerator

    cpu_accelerator.install()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for case in json.loads(sys.argv[1]):
        report = run_case(case)
        if dist.get_rank() == 0:
            print(json.dumps(report), flush=True)
    dist.destroy_process_group()


def run_case(case):
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from safetensors.torch import load_file

    from dapo_mega.config import ModelConfig, ParallelConfig
    from dapo_mega.policy.megatron_policy import ScoringModel
    from dapo_mega.policy.model import unwrapped
    from dapo_mega.policy.processes import start_processes
    from dapo_mega.policy.weights import WeightGatherer

    parallel = ParallelConfig(**case["parallel"])
    processes = start_processes(parallel, 0)
    model = ScoringModel(ModelConfig(path=case["model"], dtype=case["dtype"]), parallel, processes, 1.0)
    chunks = [unwrapped(chunk) for chunk in model.chunks]
    expected = load_file(Path(case["model"]) / "model.safetensors")
    dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float32
    expected = {name: tensor.to(dtype) for name, tensor in expected.items()}
    if case.get("mixed"):
        expected.update({name: tensor.float() for name, tensor in expected.items() if "norm" in name})
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if "norm" in name:
                    parameter.data = parameter.data.float()
    gatherer = WeightGatherer(chunks, model.layout, processes)
    buckets = list(gatherer.buckets(case["bucket_bytes"]))
    got = dict(pair for bucket in buckets for pair in bucket)
    if processes.is_leader:
        exact = got.keys() == expected.keys() and all(
            got[name].dtype == tensor.dtype and torch.equal(got[name], tensor) for name, tensor in expected.items()
        )
    else:
        exact = not got
    model_bytes = sum(tensor.nbytes for tensor in expected.values())
    held_bytes = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    # What a leader does not hold must reach it once; nobody else needs anything.
    counts = [int(exact), gatherer.bytes_sent, model_bytes - held_bytes if processes.is_leader else 0]
    total = torch.tensor(counts, dtype=torch.int64)
    dist.all_reduce(total, group=processes.control)
    names: list = [None] * processes.data_size
    if processes.is_leader:
        dist.all_gather_object(names, [name for bucket in buckets for name, _ in bucket], group=processes.leaders)
    parallel_state.destroy_model_parallel()
    return {
        "all_exact": int(total[0]) == processes.world_size,
        "bytes_sent": int(total[1]),
        "minimum": int(total[2]),
        "bucket_bytes": [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets],
        "same_order": all(order == names[0] for order in names),
    }


if __name__ == "__main__":
    main()
