"""Worker: converted checkpoints, loaded by the policy and by Megatron itself, equal the ones they were made from.

Argument: JSON, a list of {model, converted, resharded, parallel}: a Hugging Face folder, two Megatron folders with the
same model, and the layout to load them at.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from dapo_mega.megatron import cpu_accelerator

    cpu_accelerator.install()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for case in json.loads(sys.argv[1]):
        check(case)
    dist.destroy_process_group()


def check(case):
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    from dapo_mega.config import ModelConfig, ParallelConfig
    from dapo_mega.megatron.megatron_policy import ScoringModel
    from dapo_mega.megatron.model import unwrapped
    from dapo_mega.megatron.processes import start_processes

    parallel = ParallelConfig(**case["parallel"])
    processes = start_processes(parallel, 0)

    def tensors_of(model):
        return {
            f"{number}.{name}": tensor.clone()
            for number, chunk in enumerate(model.chunks)
            for name, tensor in unwrapped(chunk).state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }

    def load(path):
        return ScoringModel(ModelConfig(path=path, dtype="fp32"), parallel, processes, temperature=1.0)

    model = load(case["model"])
    chunks = {f"model{number}": unwrapped(chunk) for number, chunk in enumerate(model.chunks)}
    expected = tensors_of(model)
    assert_equal(tensors_of(load(case["converted"])), expected, (case, "by the policy"))
    for tensor in (tensor for chunk in chunks.values() for tensor in chunk.state_dict().values()):
        if tensor is not None:
            tensor.fill_(float("nan"))
    loaded = dist_checkpointing.load(
        {name: chunk.sharded_state_dict() for name, chunk in chunks.items()}, case["resharded"]
    )
    for name, chunk in chunks.items():
        chunk.load_state_dict(loaded[name])
    assert_equal(tensors_of(model), expected, (case, "by Megatron"))
    parallel_state.destroy_model_parallel()


def assert_equal(found, expected, what):
    import torch

    assert found.keys() == expected.keys(), what
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different, (what, different)


if __name__ == "__main__":
    main()
