"""CPU time of a trainer's rank 0 for the calls of a weight update, with engines that answer but receive nothing."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from aiohttp import web
from pushing import IdleEngines, Pushing

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.types import Receivers, WeightBucket, WeightSpec
from dapo_mega.weight_sync.broadcast import BroadcastSender

T = TypeVar("T")
_TIMEOUT_S = 600.0
_CALLS = ("begin_weight_update", "end_weight_update", "init_weights_update_group", "update_weights_from_distributed")


@dataclass(frozen=True)
class UpdateCost:
    """Medians over some updates of rank 0's CPU and wall time, and the calls that an engine gets in each."""

    num_engines: int
    cpu_s: float
    wall_s: float
    calls_per_engine: float


def measure_updates(numbers: Sequence[int], num_buckets: int, num_tensors: int, rounds: int) -> list[UpdateCost]:
    """The cost for each of these numbers of engines; weights of `num_tensors` small tensors in each of the buckets."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with (
            patch("dapo_mega.weight_sync.broadcast.connect_store", lambda *_: dist.HashStore()),
            patch("dapo_mega.weight_sync.broadcast.join_group", lambda *_: _Group()),
        ):
            return [_measured(ours, port, number, num_buckets, num_tensors, rounds) for number in numbers]
    finally:
        dist.destroy_process_group()
        server.kill()
        server.join()


def _measured(
    server: Connection, port: int, num_engines: int, num_buckets: int, num_tensors: int, rounds: int
) -> UpdateCost:
    fleet = IdleEngines([f"http://127.0.0.1:{port}/{number}" for number in range(num_engines)], _TIMEOUT_S)
    processes, config = _one_process(), WeightSyncConfig(timeout_s=_TIMEOUT_S)
    sync = Pushing(processes, fleet, config, BroadcastSender(processes, config))
    policy = _Policy(num_buckets, num_tensors)
    sync.push(policy, 0)  # Engines join.
    before = _calls(server)
    cpu, wall = [], []
    for version in range(1, 1 + rounds):
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        sync.push(policy, version)
        cpu.append(time.process_time() - cpu_s)
        wall.append(time.perf_counter() - wall_s)
    calls = (_calls(server) - before) / rounds / num_engines
    sync.close()
    fleet.close()
    return UpdateCost(num_engines, statistics.median(cpu), statistics.median(wall), calls)


def _calls(server: Connection) -> int:
    server.send("calls")
    return int(server.recv())


def _serve(trainer: Connection) -> None:
    asyncio.run(_answer_all(trainer))


async def _answer_all(trainer: Connection) -> None:
    """All engines of one port, which count their calls and say yes."""
    num_calls = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal num_calls
        num_calls += 1
        await request.read()
        return web.json_response({"success": True, "message": ""})

    app = web.Application(client_max_size=2**26)
    for call in _CALLS:
        app.router.add_post(f"/{{engine}}/{call}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    trainer.send(runner.addresses[0][1])
    while True:
        await asyncio.to_thread(trainer.recv)
        trainer.send(num_calls)


class _Work:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class _Group:
    """A group with an engine that has received everything at once."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        return _Work()

    def abort(self) -> None: ...


class _Policy:
    """Buckets of small tensors on one process."""

    def __init__(self, num_buckets: int, num_tensors: int) -> None:
        self._tensor = torch.zeros(16, 16)
        self._buckets = [
            tuple(
                WeightSpec(f"model.layers.{bucket}.mlp.experts.{number}.down_proj.weight", torch.float32, (16, 16))
                for number in range(num_tensors)
            )
            for bucket in range(num_buckets)
        ]

    def weight_plan(self, bucket_bytes: int) -> list[list[WeightBucket]]:
        return [[WeightBucket(0, specs, None, is_last=False)] for specs in self._buckets]

    def weights(
        self, bucket_bytes: int, to: Receivers = "senders", replicas: Collection[int] | None = None
    ) -> Iterator[WeightBucket]:
        for specs in self._buckets:
            yield WeightBucket(0, specs, [self._tensor] * len(specs), is_last=False)


def _one_process() -> Processes:
    kinds = ("data", "tensor", "pipeline", "context", "expert")
    places: dict[str, Any] = {f"{kind}_size": 1 for kind in kinds} | {f"{kind}_rank": 0 for kind in kinds}
    group = dist.group.WORLD
    assert group
    return Processes(
        rank=0, world_size=1, **places, device=torch.device("cpu"), control=group, leaders=group, replica=group
    )
