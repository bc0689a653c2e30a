"""Worker: log-probs fused with the output layer on this rank's slice of the vocabulary; every rank writes its results.

Arguments: OUTPUT_DIR. The cases are those of `tests/distributed/fused_cases.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    from dapo_mega.megatron.fused_logprobs import output_logprobs

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from fused_cases import CASES, inputs, loss

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = {}
    for case in CASES:
        hidden, weight, targets = inputs(case)
        hidden.requires_grad_()
        part = weight.chunk(world_size)[rank].clone().requires_grad_()
        logprobs, entropy = output_logprobs(
            hidden,
            part,
            targets,
            temperature=case.temperature,
            vocab_size=case.vocab,
            group=dist.group.WORLD,
            with_entropy=case.with_entropy,
            chunk_positions=case.chunk,
        )
        loss(logprobs, entropy).backward()
        results[case.name] = [logprobs.detach(), entropy.detach(), hidden.grad, part.grad]
    torch.save(results, Path(sys.argv[1]) / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
