"""Times handing a step's samples from rank 0 to the replicas, against bare transfers of the same bytes.

python tools/benchmark_handover.py --processes 4 --replica-size 2

Processes run on this machine and talk over its loopback, so the rates are those of copying, not of a network. The bare
transfer sends each leader one tensor of its replica's size, which it broadcasts in its replica; the broadcast sends
all columns to every process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from benchmark_processes import barrier_timed, run_processes

from dapo_mega.batching.handover import HandoverGroups, broadcast_columns, broadcast_headers, distribute_samples
from dapo_mega.batching.packing import SampleColumns, plan_micro_batches

_TIMEOUT_S = 60
_FULL_RESPONSES, _FULL_LENGTH, _PROMPT = 8192, 20480, 480


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark handover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--replica-size", type=int, default=2, help="processes of one replica")
    parser.add_argument("--responses", type=int, default=256, help=f"of {_FULL_LENGTH} tokens each")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    parser.add_argument("--network-gbit", type=float, default=25.0, help="rank 0's network, for the extrapolation")
    options = parser.parse_args(argv)
    if options.processes % options.replica_size:
        parser.error(f"--replica-size {options.replica_size} does not divide --processes {options.processes}")
    print("\n".join(run(options)))


def run(options: argparse.Namespace) -> list[str]:
    """The report's lines."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = run_processes(_measure, options.processes, Path(folder), options, timeout_s=_TIMEOUT_S)
    return _report(options, seconds)


def _measure(options: argparse.Namespace) -> dict[str, float]:
    """The fastest seconds of each way to hand the samples over."""
    rank, size = dist.get_rank(), options.replica_size
    num_replicas = options.processes // size
    leaders = dist.new_group([r * size for r in range(num_replicas)])
    replicas = [dist.new_group(list(range(r * size, (r + 1) * size))) for r in range(num_replicas)]
    control = dist.group.WORLD
    assert control is not None
    groups = HandoverGroups(control, leaders, replicas[rank // size])
    columns = _columns(options.responses) if rank == 0 else None
    return {
        name: min(barrier_timed(partial(transfer, columns, groups, rank // size, num_replicas), options.repeats))
        for name, transfer in (("hand-over", _hand_over), ("bare transfer", _bare), ("broadcast to all", _broadcast))
    }


def _columns(num_responses: int) -> SampleColumns:
    rng = np.random.default_rng(0)
    return SampleColumns(
        token_ids=rng.integers(0, 150_000, num_responses * _FULL_LENGTH, dtype=np.int32),
        lengths=np.full(num_responses, _FULL_LENGTH, dtype=np.int64),
        prompt_lengths=np.full(num_responses, _PROMPT, dtype=np.int64),
        advantages=np.ones(num_responses, dtype=np.float32),
        in_loss=np.ones(num_responses, dtype=np.uint8),
        off_policy_tokens=np.zeros(num_responses, dtype=np.int64),
        engines=np.zeros(num_responses, dtype=np.int64),
        engine_starts=np.zeros(num_responses, dtype=np.int64),
        rollout_logprobs=rng.random(num_responses * (_FULL_LENGTH - _PROMPT), dtype=np.float32),
    )


def _hand_over(columns: SampleColumns | None, groups: HandoverGroups, replica: int, num_replicas: int) -> None:
    headers = broadcast_headers(columns, groups.control)
    plan = plan_micro_batches(headers.lengths, num_replicas, 32768)
    samples = [np.array([i for indices in rank for i in indices], dtype=np.int64) for rank in plan]
    distribute_samples(columns, headers, samples, data_rank=replica, groups=groups)


def _bare(columns: SampleColumns | None, groups: HandoverGroups, replica: int, num_replicas: int) -> None:
    size = torch.tensor([0 if columns is None else _num_bytes(len(columns)) // 4 // num_replicas])
    dist.broadcast(size, src=0, group=groups.control)
    words = torch.zeros(int(size), dtype=torch.int32)
    if columns is not None:
        sends = [
            dist.isend(words, dst=dist.get_global_rank(groups.leaders, other), group=groups.leaders)
            for other in range(1, num_replicas)
        ]
        for work in sends:
            assert work is not None
            work.wait()
    elif dist.get_rank(groups.replica) == 0:
        dist.recv(words, src=0, group=groups.leaders)
    dist.broadcast(words, src=dist.get_global_rank(groups.replica, 0), group=groups.replica)


def _broadcast(columns: SampleColumns | None, groups: HandoverGroups, replica: int, num_replicas: int) -> None:
    broadcast_columns(columns, groups.control)


def _num_bytes(num_responses: int) -> int:
    """Token ids and log-probs, 4 bytes each."""
    return 4 * num_responses * (2 * _FULL_LENGTH - _PROMPT)


def _report(options: argparse.Namespace, seconds: dict[str, float]) -> list[str]:
    moved, full = _num_bytes(options.responses), _num_bytes(_FULL_RESPONSES)
    num_replicas = options.processes // options.replica_size
    lines = [
        f"{options.responses} samples of {_FULL_LENGTH} tokens, {moved / 1e6:.0f} MB, to {num_replicas} replicas of "
        f"{options.replica_size} processes on this machine ({os.cpu_count()} cores)",
        "",
        "| transfer | seconds | MB/s | time over the bare transfer's |",
        "|---|---|---|---|",
    ]
    for name, value in seconds.items():
        share = value / seconds["bare transfer"]
        lines.append(f"| {name} | {value:.3f} | {moved / value / 1e6:.0f} | {share:.2f} |")
    rate = moved / seconds["hand-over"]
    network = options.network_gbit * 1e9 / 8
    return [
        *lines,
        "",
        f"Extrapolated to {_FULL_RESPONSES} samples, {full / 1e9:.2f} GB, in proportion to the bytes: "
        f"{full / rate:.1f} s at the rate measured here; at least {full / min(rate, network):.1f} s with a network of "
        f"{options.network_gbit:g} Gbit/s. Assumes that rank 0, which sends every byte once, is the bottleneck "
        f"whatever the number of replicas, and that replicas pass on their shares meanwhile.",
    ]


if __name__ == "__main__":
    main()
