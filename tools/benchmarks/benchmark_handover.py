"""Times handing a step's samples from rank 0 to the replicas, against bare transfers of the same bytes.

python tools/benchmark.py handover --processes 4 --replica-size 2

Processes run on this machine and talk over its loopback, so the rates are those of copying, not of a network. The bare
transfer sends each leader one tensor of its replica's size, which it broadcasts in its replica.
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

from dapo_mega.batching.plan import PackingLayout, plan_step
from dapo_mega.batching.samples import FlatSamples, flatten, single_turn
from dapo_mega.batching.scatter import ScatterGroups, encode, scatter

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
    groups = ScatterGroups(control, leaders, replicas[rank // size], rank // size)
    samples = _samples(options.responses) if rank == 0 else None
    num_bytes = torch.tensor([0 if samples is None else len(encode(samples)[1])])
    dist.broadcast(num_bytes, src=0)
    transfers = {
        "hand-over": partial(_hand_over, samples, groups, num_replicas),
        "bare transfer": partial(_bare, int(num_bytes) // num_replicas, groups, num_replicas),
    }
    seconds = {name: min(barrier_timed(transfer, options.repeats)) for name, transfer in transfers.items()}
    return {**seconds, "bytes": float(num_bytes)}


def _samples(num_responses: int) -> FlatSamples:
    rng = np.random.default_rng(0)
    response = _FULL_LENGTH - _PROMPT
    return flatten(
        [
            single_turn(
                rng.integers(0, 150_000, _PROMPT, dtype=np.int32),
                rng.integers(0, 150_000, response, dtype=np.int32),
                rng.random(response, dtype=np.float32),
                advantage=1.0,
                engine_ids=0,
            )
            for _ in range(num_responses)
        ]
    )


def _hand_over(samples: FlatSamples | None, groups: ScatterGroups, num_replicas: int) -> None:
    plan = None
    if samples is not None:
        plan = plan_step(samples.lengths.numpy(), PackingLayout(num_replicas), token_budget=32768)
    scatter(samples, plan, groups)


def _bare(num_bytes: int, groups: ScatterGroups, num_replicas: int) -> None:
    body = torch.zeros(num_bytes, dtype=torch.uint8)
    if dist.get_rank() == 0:
        sends = [
            dist.isend(body, dst=dist.get_global_rank(groups.leaders, other), group=groups.leaders)
            for other in range(1, num_replicas)
        ]
        for work in sends:
            assert work is not None
            work.wait()
    elif dist.get_rank(groups.replica) == 0:
        dist.recv(body, src=0, group=groups.leaders)
    dist.broadcast(body, src=dist.get_global_rank(groups.replica, 0), group=groups.replica)


def _report(options: argparse.Namespace, seconds: dict[str, float]) -> list[str]:
    moved = seconds.pop("bytes")
    full = moved / options.responses * _FULL_RESPONSES
    per_token = moved / (options.responses * _FULL_LENGTH)
    num_replicas = options.processes // options.replica_size
    lines = [
        f"{options.responses} samples of {_FULL_LENGTH} tokens, {moved / 1e6:.1f} MB, "
        f"{per_token:.2f} bytes per token, to {num_replicas} replicas "
        f"of {options.replica_size} processes on this machine ({os.cpu_count()} cores)",
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
