"""Measures gathering a sharded model's weights on the replicas' leaders: bytes sent, and time against a bare send.

python tools/benchmark.py gather --processes 4 --megabytes 200

The least that can be sent is what each leader does not hold itself, once. The bare send moves the same bytes between
the same processes in one message each. Processes run on this machine and talk over its loopback, so the rates are those
of copying, not of a network.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from benchmark_processes import barrier_timed, run_processes

from dapo_mega.config import ModelConfig, ParallelConfig
from dapo_mega.megatron.core.repairs import cpu_accelerator

_TIMEOUT_S = 300
_LAYOUTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "TP 2": ("dense", {"tensor": 2}),
    "PP 2": ("dense", {"pipeline": 2}),
    "TP 2 x PP 2": ("dense", {"tensor": 2, "pipeline": 2}),
    "PP 2 x 2 chunks": ("dense", {"pipeline": 2, "virtual_pipeline": 2}),
    "CP 2": ("dense", {"context": 2}),
    "EP 4": ("experts", {"expert": 4}),
    "TP 2 x EP 2": ("experts", {"tensor": 2, "sequence": True, "expert": 2}),
    "EP 2 x expert TP 2": ("experts", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}),
}


@dataclass(frozen=True)
class Measurement:
    """Sums over all processes, in bytes; seconds are the fastest repeat's, until the last process is done."""

    num_leaders: int
    model_bytes: int
    sent_bytes: int
    minimum_bytes: int
    seconds: float
    bare_seconds: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark gather", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4, help="a multiple of 4; data parallelism is what remains")
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the models, in bf16")
    parser.add_argument("--bucket-mib", type=float, default=32.0)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    parser.add_argument("--layouts", nargs="+", choices=_LAYOUTS, default=list(_LAYOUTS), help="in quotes")
    options = parser.parse_args(argv)
    if options.processes % 4:
        parser.error(f"--processes {options.processes} is not a multiple of 4")
    print("\n".join(run(options)))


def run(options: argparse.Namespace) -> list[str]:
    """The report's lines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, options.megabytes)
        imports = ["dapo_mega.megatron.megatron_policy"]
        measured = run_processes(
            _measure_all, options.processes, folder, options, folder, timeout_s=_TIMEOUT_S, imports=imports
        )
    return _report(options, measured)


def write_models(folder: Path, megabytes: float) -> None:
    """Random Hugging Face checkpoints of about this size in bf16, `folder/dense` and `folder/experts`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = {
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    embeddings = 2 * 8192 * 512
    per_layer = {"dense": 512 * 512 * 3 + 3 * 512 * 1536, "experts": 512 * 512 * 3 + 8 * 3 * 512 * 256}
    layers = {kind: max(round((megabytes * 5e5 - embeddings) / size / 4), 1) * 4 for kind, size in per_layer.items()}
    dense = Qwen2Config(**shape, intermediate_size=1536, num_hidden_layers=layers["dense"])
    experts = Qwen3MoeConfig(
        **shape,
        intermediate_size=1536,
        moe_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        head_dim=64,
        num_hidden_layers=layers["experts"],
    )
    Qwen2ForCausalLM(dense).bfloat16().save_pretrained(folder / "dense")
    Qwen3MoeForCausalLM(experts).bfloat16().save_pretrained(folder / "experts")


def _measure_all(options: argparse.Namespace, folder: Path) -> dict[str, Measurement]:
    cpu_accelerator.install()
    return {
        name: _measure(folder / model, ParallelConfig(**parallel), options)
        for name, (model, parallel) in _LAYOUTS.items()
        if name in options.layouts
    }


def _measure(path: Path, parallel: ParallelConfig, options: argparse.Namespace) -> Measurement:
    from dapo_mega.megatron.core.decoder import unwrapped
    from dapo_mega.megatron.core.groups import stop_groups
    from dapo_mega.megatron.gathering import WeightGatherer
    from dapo_mega.megatron.megatron_policy import ScoringModel
    from dapo_mega.megatron.processes import start_processes

    processes = start_processes(parallel, 0)
    model = ScoringModel(ModelConfig(path=str(path), dtype="bf16"), parallel, processes, 1.0)
    chunks = [unwrapped(chunk) for chunk in model.chunks]
    gatherer = WeightGatherer(chunks, model.layout, processes)
    model_bytes = 0

    def gather() -> None:
        nonlocal model_bytes
        buckets = gatherer.weights(int(options.bucket_mib * 2**20))
        model_bytes = sum(tensor.nbytes for bucket in buckets for _, tensor in bucket)

    with _recorded_messages() as messages:
        gather()
    sent_bytes = gatherer.bytes_sent
    held = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    totals = torch.tensor([processes.is_leader, sent_bytes, model_bytes - held if processes.is_leader else 0])
    dist.all_reduce(totals, group=processes.control)
    num_leaders, all_sent, minimum = totals.tolist()
    buffers = {message: torch.empty(size, dtype=torch.uint8) for message, size in messages.items()}
    seconds = min(barrier_timed(gather, options.repeats))
    bare_seconds = min(barrier_timed(lambda: _send_bare(buffers), options.repeats))
    stop_groups()
    return Measurement(num_leaders, model_bytes, all_sent, minimum, seconds, bare_seconds)


_Message = tuple[Callable[..., Any], int]


@contextmanager
def _recorded_messages() -> Iterator[Counter[_Message]]:
    """Counts the bytes that go through torch's batched sends, by direction and peer."""
    messages: Counter[_Message] = Counter()
    original = dist.batch_isend_irecv

    def recording(operations: list[dist.P2POp]) -> list[dist.Work]:
        for operation in operations:
            messages[operation.op, operation.peer] += operation.tensor.nbytes
        return original(operations)

    with patch.object(dist, "batch_isend_irecv", recording):
        yield messages


def _send_bare(buffers: Mapping[_Message, torch.Tensor]) -> None:
    operations = [dist.P2POp(operation, tensor, peer) for (operation, peer), tensor in buffers.items()]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def _report(options: argparse.Namespace, measured: Mapping[str, Measurement]) -> list[str]:
    lines = [
        f"{options.processes} processes on this machine ({os.cpu_count()} cores), buckets of {options.bucket_mib:g} "
        f"MiB",
        "",
        "| layout | leaders | model, MB | sent / leaders x model | sent / least possible | MB/s | time / bare send's |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, m in measured.items():
        share = m.sent_bytes / (m.num_leaders * m.model_bytes)
        over = f"{m.sent_bytes / m.minimum_bytes:.4f}" if m.minimum_bytes else "nothing to send"
        slowdown = f"{m.seconds / m.bare_seconds:.2f}" if m.sent_bytes else "-"
        lines.append(
            f"| {name} | {m.num_leaders} | {m.model_bytes / 1e6:.0f} | {share:.3f} | {over} | "
            f"{m.sent_bytes / m.seconds / 1e6:.0f} | {slowdown} |"
        )
    return lines


if __name__ == "__main__":
    main()
