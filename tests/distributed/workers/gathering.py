"""Worker: gathers a model's weights under several layouts; rank 0 prints one JSON line per case.

Arguments: JSON. It lists cases {model, parallel, dtype, bucket_bytes, mixed}: `model` is the folder of a checkpoint,
`mixed` keeps norms in float32 in a bf16 model.
"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path


def main() -> None:
    from dapo_mega.megatron.repairs import cpu_accelerator

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
    from dapo_mega.megatron import gathering
    from dapo_mega.megatron.megatron_policy import ScoringModel
    from dapo_mega.megatron.model import unwrapped
    from dapo_mega.megatron.processes import start_processes

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
    gatherer = gathering.WeightGatherer(chunks, model.layout, processes)
    buckets = [list(bucket) for bucket in gatherer.buckets(case["bucket_bytes"])]
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
    stages = check_stage_buckets(gatherer, case["bucket_bytes"], expected, processes)
    parallel_state.destroy_model_parallel()
    return {
        "stages": stages,
        "all_exact": int(total[0]) == processes.world_size,
        "bytes_sent": int(total[1]),
        "minimum": int(total[2]),
        "bucket_bytes": [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets],
        "same_order": all(order == names[0] for order in names),
    }


def check_stage_buckets(gatherer, bucket_bytes, expected, processes):
    """What rank 0 finds over all processes: names by bucket, and whether data are where they should be and right."""
    import torch
    import torch.distributed as dist

    transfers = watch_transfers(gatherer)
    own = {parameter.untyped_storage().data_ptr() for parameter in gatherer._parameters.values()}
    # Closed early, by all processes after the same bucket.
    first_specs = next(iter(gatherer.buckets(bucket_bytes, per_stage=True))).specs
    described, data, sizes, num_own, most_alive = [], {}, [], 0, 0
    for bucket in gatherer.buckets(bucket_bytes, per_stage=True):
        described.append((bucket.stage, bucket.specs, bucket.is_last))
        for name, tensor in bucket:
            num_own += tensor.untyped_storage().data_ptr() in own
            data[name] = tensor.clone()
        if bucket.tensors is not None:
            sizes.append(bucket.num_bytes)
        most_alive = max(most_alive, sum(transfer() is not None for transfer in transfers))
    everyones: list = [None] * processes.world_size
    is_exact = all(expected[name].dtype == t.dtype and torch.equal(expected[name], t) for name, t in data.items())
    is_same = first_specs == described[0][1]
    mine = (described, list(data), is_exact, max(sizes, default=0), is_same, num_own, most_alive)
    dist.all_gather_object(everyones, mine, group=processes.control)
    names = [spec.name for bucket in described for spec in bucket[1]]
    stage_size = processes.world_size // processes.pipeline_size
    held = [
        [s.name for bucket in described if bucket[0] == stage for s in bucket[1]] for stage in range(len(everyones))
    ]
    return {
        "same_everywhere": all(each[0] == described for each in everyones),
        "complete": sorted(names) == sorted(expected),
        "only_on_stage_leaders": all(
            each[1] == (held[rank // stage_size] if rank % stage_size == 0 else [])
            for rank, each in enumerate(everyones)
        ),
        "exact": all(each[2] for each in everyones),
        "largest": max(each[3] for each in everyones),
        "same_after_early_end": all(each[4] for each in everyones),
        "not_copied": sum(each[5] for each in everyones),
        "most_transfers": max(each[6] for each in everyones),
        "only_last_is_last": [bucket[2] for bucket in described] == [False] * (len(described) - 1) + [True],
    }


def watch_transfers(gatherer):
    """References to all transfers from now on, which do not keep their memory."""
    start = gatherer._start
    transfers = []

    def watched(*arguments):
        transfer = start(*arguments)
        transfers.append(weakref.ref(transfer))
        return transfer

    gatherer._start = watched
    return transfers


if __name__ == "__main__":
    main()
