"""Measures weight updates over hosts whose interfaces have one rate, in a box of network namespaces; needs root.

python tools/benchmark.py senders
python tools/benchmark.py senders --layout context=8 --rate 50mbit
python tools/benchmark.py senders --layout data=2 --engines 2 4 8 --mib 48 --bucket-mib 8

The trainer's processes (as many as --layout says) send to engines, each on a host of its own. The trainer is
`FleetWeightSync` with its broadcasts and real HTTP calls; weights lie in memory and are not gathered. Engines are light
processes with the plugin's receiving code, which compare what they get. `allowed` is the time that the rate allows an
engine for the payload; `one group` broadcasts the same chunks from one process to all engines in one group. The first
update of a row, in which engines join, does not count. CPU is of all processes of the benchmark, as a share of the
machine's cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pushing import IdleEngines, Pushing
from receiving_engine import CPU, PORT, TIMEOUT_S, ReceivingEngine, cpu_s, value_of

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.distributed.stores import connect_store, local_address, open_store
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.engines.sglang.fleet_client import SyncTarget
from dapo_mega.engines.sglang.weight_protocol import PlanFormat, PlannedBucket, UpdatePlan, group_with, join_group
from dapo_mega.errors import InputError
from dapo_mega.types import Receivers, WeightBucket, WeightSpec
from dapo_mega.weight_sync.broadcast import BroadcastSender

T = TypeVar("T")
_REPOSITORY = Path(__file__).resolve().parents[2]
_START_S = 120.0
_TENSOR_BYTES = 2**18
_KINDS = ("tensor", "context", "data", "pipeline")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark senders", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", nargs="+", default=["data=8"], help="of the processes, such as data=4 tensor=2")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rate", default="100mbit", help="of every interface, as tc writes it")
    parser.add_argument("--mib", type=int, default=48, help="size of the weights")
    parser.add_argument("--bucket-mib", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--role", choices=("engine", "sender"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    parser.add_argument("--urls", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.role == "engine":
        ReceivingEngine(options.store).serve()
    elif options.role == "sender":
        _send(options)
    else:
        print("\n".join(run(options)))


def run(options: argparse.Namespace) -> list[str]:
    """The report's lines."""
    sys.path.insert(0, str(_REPOSITORY))
    from tools.cluster_in_a_box import Box, Link

    sizes = _sizes(options.layout)
    most, num_senders = max(options.engines), math.prod(sizes.values())
    with tempfile.TemporaryDirectory() as name, Box(num_senders + most, Path(name), Link(rate=options.rate)) as box:
        variables = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_REPOSITORY)}
        program = [sys.executable, __file__, *_common(options)]
        hosts = [num_senders + number for number in range(most)]
        commands = [
            box.start(host, [*program, "--role", "engine", "--store", box.address(host)], variables=variables)
            for host in hosts
        ]
        urls = [f"http://{box.address(host)}:{PORT}" for host in hosts]
        commands += [
            box.start(
                rank,
                [*program, "--role", "sender", "--rank", str(rank), "--store", box.address(0), "--urls", *urls],
                variables=variables,
            )
            for rank in range(num_senders)
        ]
        rate = Link(rate=options.rate).bytes_per_second
        assert rate
        lines = [
            f"{options.mib} MiB to {most} engines from {num_senders} processes ({_described(sizes)}), every interface "
            f"{options.rate}, buckets of {options.bucket_mib} MiB, {os.cpu_count()} cores",
            "",
            "| engines | allowed, s | update, s | of allowed | over 1 engine | busiest sender over mean | "
            "one group, s | CPU |",
            "|---|---|---|---|---|---|---|---|",
        ]
        return lines + _rows(options, commands[-num_senders], commands, rate)


def _common(options: argparse.Namespace) -> list[str]:
    return [
        *("--layout", *options.layout, "--engines", *map(str, options.engines), "--mib", str(options.mib)),
        *("--bucket-mib", str(options.bucket_mib), "--rounds", str(options.rounds)),
    ]


def _sizes(layout: Sequence[str]) -> dict[str, int]:
    sizes = dict.fromkeys(_KINDS, 1)
    for part in layout:
        kind, _, size = part.partition("=")
        if kind not in sizes or not size.isdigit():
            raise InputError(f"--layout {part} is not one of {', '.join(f'{kind}=N' for kind in _KINDS)}")
        sizes[kind] = int(size)
    return sizes


def _described(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{kind} {size}" for kind, size in sizes.items() if size > 1) or "data 1"


def _rows(options: argparse.Namespace, sent: Any, commands: Sequence[Any], rate: float) -> list[str]:
    """Waits for rank 0's figures, which it prints (`sent`) as lines of JSON."""
    deadline = time.monotonic() + _START_S + 60 * options.rounds * len(options.engines) * 4
    while sent.poll() is None and time.monotonic() < deadline:
        if failed := next((command for command in commands if command.poll() not in (None, 0)), None):
            raise InputError(f"a process of the benchmark failed: {failed.text()[-2000:]}")
        time.sleep(0.2)
    text = sent.text()
    figures = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if len(figures) != len(options.engines):
        raise InputError(f"the senders did not end: {text[-2000:]}")
    first = figures[0]["update_s"]
    rows = []
    for each in figures:
        allowed = options.mib * 2**20 / rate
        cells = [f"{each['engines']}", f"{allowed:.2f}", f"{each['update_s']:.2f}", f"{allowed / each['update_s']:.2f}"]
        cells += [f"{each['update_s'] / first:.2f}", f"{each['balance']:.3f}"]
        cells += [f"{each['one_group_s']:.2f}", f"{each['cpu']:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


class _Policy:
    """Weights in memory, in buckets of one size; every process has those that it sends."""

    def __init__(self, options: argparse.Namespace, processes: Processes) -> None:
        self._processes = processes
        self._per_stage = processes.tensor_size * processes.context_size
        num_buckets = options.mib // options.bucket_mib
        self.version = 0
        per_round = processes.pipeline_size * self._per_stage
        if num_buckets == 0 or num_buckets % per_round:
            raise InputError(f"{num_buckets} buckets are not the same number for {per_round} processes; change --mib")
        tensors_per_bucket = options.bucket_mib * 2**20 // _TENSOR_BYTES
        self._specs = [
            tuple(
                WeightSpec(str(number), torch.uint8, (_TENSOR_BYTES,))
                for number in range(bucket * tensors_per_bucket, (bucket + 1) * tensors_per_bucket)
            )
            for bucket in range(num_buckets)
        ]
        self._per_round = per_round

    @property
    def specs(self) -> list[WeightSpec]:
        return [spec for bucket in self._specs for spec in bucket]

    def tensors(self, specs: Sequence[WeightSpec]) -> Iterator[torch.Tensor]:
        for spec in specs:
            yield torch.full(spec.shape, value_of(spec.name, self.version), dtype=torch.uint8)

    def weight_plan(self, bucket_bytes: int) -> list[list[WeightBucket]]:
        starts = range(0, len(self._specs), self._per_round)
        return [
            [
                WeightBucket(sender // self._per_stage, specs, None, start == starts[-1], sender)
                for sender, specs in enumerate(self._specs[start : start + self._per_round])
            ]
            for start in starts
        ]

    def weights(
        self, bucket_bytes: int, to: Receivers = "senders", replicas: Collection[int] | None = None
    ) -> Iterator[WeightBucket]:
        processes = self._processes
        mine = processes.pipeline_rank * self._per_stage + processes.rank % self._per_stage
        for buckets in self.weight_plan(bucket_bytes):
            bucket = buckets[mine]
            yield (
                replace(bucket, tensors=self.tensors(bucket.specs))
                if processes.data_rank in (replicas or ())
                else bucket
            )


def _send(options: argparse.Namespace) -> None:
    """One process of the trainer."""
    torch.set_num_threads(1)
    sizes = _sizes(options.layout)
    store = open_store(options.store, _START_S, port=PORT) if options.rank == 0 else _connected(options.store, _START_S)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=math.prod(sizes.values()))
    processes = _processes(options.rank, sizes)
    fleet = IdleEngines(options.urls, TIMEOUT_S) if options.rank == 0 else None
    if fleet:
        _wait_for_engines(fleet)
    config = WeightSyncConfig(timeout_s=TIMEOUT_S)
    transport = BroadcastSender(processes, config, towards=options.urls[0].split("/")[2].split(":")[0])
    sync = Pushing(processes, fleet, config, transport)
    policy = _Policy(options, processes)
    for num_engines in options.engines:
        if fleet:
            fleet.num_engines = num_engines
        times, balances = [], []
        busy = _busy_s(fleet, processes)
        for number in range(1 + options.rounds):
            if number == 1:
                busy, began = _busy_s(fleet, processes), time.perf_counter()
            policy.version += 1
            before = _sent_bytes(processes)
            dist.barrier()
            started = time.perf_counter()
            sync.push(policy, policy.version)
            dist.barrier()
            times.append(time.perf_counter() - started)
            sent = _sent_bytes(processes) - before
            active = sent[sent > options.mib * 2**20 / processes.world_size / 4]
            balances.append(float(active.max() / active.mean()))
        wall = time.perf_counter() - began
        cpu = (_busy_s(fleet, processes) - busy) / wall / (os.cpu_count() or 1)
        one_group_s = _one_group(fleet, policy, options, num_engines)
        if options.rank == 0:
            figures = {
                "engines": num_engines,
                "update_s": statistics.median(times[1:]),
                "balance": statistics.median(balances[1:]),
                "one_group_s": one_group_s,
                "cpu": cpu,
            }
            print(json.dumps(figures), flush=True)
    dist.barrier()
    os._exit(0)  # Engines keep connections open.


def _connected(address: str, timeout_s: float) -> dist.Store:
    """Rank 0's store, as soon as it is there."""
    return connect_store(address, PORT, timeout_s)


def _processes(rank: int, sizes: Mapping[str, int]) -> Processes:
    places: dict[str, Any] = {f"{kind}_size": size for kind, size in sizes.items()}
    rest = rank
    for kind in _KINDS:  # As Megatron numbers processes.
        rest, places[f"{kind}_rank"] = divmod(rest, sizes[kind])
    group = dist.group.WORLD
    assert group
    return Processes(
        rank=rank,
        world_size=dist.get_world_size(),
        **places,
        expert_rank=0,
        expert_size=1,
        device=CPU,
        control=group,
        leaders=group,
        replica=group,
    )


def _sent_bytes(processes: Processes) -> torch.Tensor:
    """[senders]: bytes that each one's interface has sent, headers included."""
    sent = torch.zeros(processes.world_size, dtype=torch.float64)
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line)
    sent[processes.rank] = int(line.partition(":")[2].split()[8])
    dist.all_reduce(sent)
    return sent


def _busy_s(fleet: IdleEngines | None, processes: Processes) -> float:
    """CPU seconds of all senders and engines, on every process."""
    seconds = torch.tensor(cpu_s(), dtype=torch.float64)
    if fleet:
        for answer in _ask(fleet, "/cpu_s", {}, len(fleet.targets(False))):
            seconds += answer["seconds"]
    dist.all_reduce(seconds)
    return float(seconds)


def _wait_for_engines(fleet: IdleEngines) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            _ask(fleet, "/cpu_s", {}, len(fleet._clients))
            return
        except EngineError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _ask(fleet: IdleEngines, path: str, body: Mapping[str, Any], num_engines: int) -> list[Any]:
    async def ask(client: EngineClient) -> Any:
        return json.loads(await client._request("POST", path, dict(body), TIMEOUT_S))

    targets = [SyncTarget(url, 1) for url in list(fleet._clients)[:num_engines]]
    return list(fleet.start_call(targets, ask, TIMEOUT_S).result().values())


def _one_group(fleet: IdleEngines | None, policy: _Policy, options: argparse.Namespace, num_engines: int) -> float:
    """Seconds of broadcasting the weights from rank 0 to all engines in one group, in chunks of a bucket."""
    if not fleet:
        return 0.0
    name = f"one-group-{secrets.token_hex(4)}"
    address = local_address(options.urls[0].split("/")[2].split(":")[0])
    store = open_store(address, TIMEOUT_S)
    urls = list(fleet._clients)[:num_engines]
    targets = [SyncTarget(url, 1) for url in urls]
    specs = policy.specs
    per_chunk = options.bucket_mib * 2**20 // _TENSOR_BYTES
    bucket = PlannedBucket(0, tuple(specs), (per_chunk,) * (len(specs) // per_chunk))
    plan = UpdatePlan(1, 4 * options.bucket_mib * 2**20, ((bucket,),))

    async def join(client: EngineClient) -> None:
        await client.command(
            "init_weights_update_group", master_address=address, master_port=store.port,
            rank_offset=1 + urls.index(client.url), world_size=1 + num_engines, group_name=group_with(name, 0),
            backend="gloo",
        )  # fmt: skip

    async def receive(client: EngineClient) -> None:
        await client.command(
            "update_weights_from_distributed", names=(), dtypes=(), shapes=(), group_name=name,
            weight_version=str(policy.version), flush_cache=False,
            load_format=str(PlanFormat(plan.digest, 0, plan.text)),
        )  # fmt: skip

    joined = fleet.start_call(targets, join, TIMEOUT_S)
    connected = connect_store(address, store.port, TIMEOUT_S)
    group = join_group(connected, group_with(name, 0), 1 + num_engines, CPU, address, TIMEOUT_S)
    joined.result()
    started = time.perf_counter()
    received = fleet.start_call(targets, receive, TIMEOUT_S)
    for start in range(0, len(specs), per_chunk):
        group.broadcast(torch.cat(list(policy.tensors(specs[start : start + per_chunk]))), 0).wait()
    received.result()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
