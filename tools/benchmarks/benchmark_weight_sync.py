"""Measures a weight update of a real SGLang server against bare broadcasts of the same bytes in the same chunks.

python tools/benchmark.py weight_sync --model MODEL
python tools/benchmark.py weight_sync --model MODEL --url http://127.0.0.1:30000

Without --url it starts a server itself, on the CPU. One at --url must serve MODEL in float32; its API key is read from
DAPO_MEGA_API_KEY. The trainer is one process; the bare broadcasts go from it to another process over the same kind of
group. That process has memory for all chunks; as `receive + copy` it takes each into the same memory and copies it to
where it belongs before it takes the next, which is what SGLang does without the plugin. Memory is what the trainer's
grows by at its peak in the first update, connections included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from benchmark_timing import measure, median_wall, speed_ratio, take_turns
from pushing import Pushing

from dapo_mega.config import ModelConfig, ParallelConfig, WeightSyncConfig
from dapo_mega.distributed.stores import connect_store, open_store
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.engines.sglang.event_loop import LoopThread
from dapo_mega.engines.sglang.fleet_client import SyncTarget
from dapo_mega.engines.sglang.weight_protocol import join_group
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.repairs import cpu_accelerator
from dapo_mega.types import Receivers, WeightBucket
from dapo_mega.weight_sync.broadcast import BroadcastSender

T = TypeVar("T")
_REPOSITORY = Path(__file__).resolve().parents[2]
_SGLANG_PYTHON = Path(os.environ.get("DAPO_MEGA_SGLANG_PYTHON", _REPOSITORY / ".venv-sglang" / "bin" / "python"))
_API_KEY = "DAPO_MEGA_API_KEY"
_ADDRESS = "127.0.0.1"
_TIMEOUT_S = 120.0


class _OneEngine:
    """A fleet of one idle engine."""

    def __init__(self, url: str, key: str) -> None:
        self._thread = LoopThread("engine")
        self._client = EngineClient(url, key)
        info = self._thread.run(self._client.info())
        self._target = SyncTarget(url, info.tp_size, has_plugin=info.has_plugin)
        self._is_stale = True

    def targets(self, only_outdated: bool) -> list[SyncTarget]:
        return [replace(self._target, is_outdated=self._is_stale)] if self._is_stale or not only_outdated else []

    def start_call(
        self, targets: Sequence[SyncTarget], method: Callable[[EngineClient], Awaitable[T]], timeout_s: float
    ) -> Future[dict[str, T | EngineError]]:
        async def call() -> dict[str, T | EngineError]:
            return {target.url: await method(self._client) for target in targets}

        return self._thread.start(call())

    def pause_generation(self, targets: Sequence[SyncTarget]) -> list[SyncTarget]:
        return list(targets)

    def resume_generation(self, targets: Sequence[SyncTarget]) -> None: ...

    def synced(self, url: str, version: int) -> None:
        self._is_stale = False

    def failed(self, url: str, reason: str) -> None:
        raise EngineError(url, reason)

    def disagrees(self, url: str, reason: str) -> None:
        raise EngineError(url, reason)

    def make_stale(self) -> None:
        self._is_stale = True

    def close(self) -> None:
        self._thread.run(self._client.close())
        self._thread.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark weight_sync", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the checkpoint to serve")
    parser.add_argument("--url", help="of a server that runs on this machine")
    parser.add_argument("--python", type=Path, default=_SGLANG_PYTHON, help="interpreter with SGLang to start one")
    parser.add_argument("--bucket-mib", type=float, nargs="+", default=[192.0], help="one row each")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    with _serving(options) as url:
        print("\n".join(run(options, url)))


@contextmanager
def _serving(options: argparse.Namespace) -> Iterator[str]:
    """The URL of the server: the one given, or one that is there for the length of the benchmark."""
    if options.url:
        yield options.url
        return
    os.environ.setdefault(_API_KEY, secrets.token_hex(16))
    with socket.create_server((_ADDRESS, 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, str(_REPOSITORY / "launch" / "serve_rollouts.py"), "--model", options.model]
    command += ["--python", str(options.python), "--dtype", "fp32", "--host", _ADDRESS, "--port", port, "--log-folder"]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([*command, folder], env=variables, stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            assert server.stdout
            if not any(line.startswith("all engines serve") for line in server.stdout):
                raise InputError(f"no server for {options.model} started (see above); mend that or give --url")
            yield f"http://{_ADDRESS}:{port}"
        finally:
            server.terminate()
            server.communicate()


def run(options: argparse.Namespace, url: str) -> list[str]:
    """The report's lines."""
    from dapo_mega.megatron.core.decoder import unwrapped
    from dapo_mega.megatron.gathering import WeightGatherer
    from dapo_mega.megatron.megatron_policy import ScoringModel
    from dapo_mega.megatron.processes import start_processes, stop_processes

    cpu_accelerator.install()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes = start_processes(ParallelConfig(), 0)
    model = ScoringModel(ModelConfig(path=options.model, dtype="fp32"), ParallelConfig(), processes, 1.0)
    engine = _OneEngine(url, os.environ[_API_KEY])
    lines = [
        f"float32 weights, {os.cpu_count()} cores shared by trainer, server and receivers",
        "",
        "| MB | bucket, MiB | push, MB/s | bare broadcast, MB/s | ratio | receive + copy, MB/s | ratio | "
        "memory over bucket |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for bucket_mib in options.bucket_mib:
        # A new gatherer has no memory from the row before.
        policy = _Policy(WeightGatherer([unwrapped(chunk) for chunk in model.chunks], model.layout, processes))
        config = WeightSyncConfig(bucket_mib=bucket_mib, timeout_s=_TIMEOUT_S)
        sync = Pushing(processes, engine, config, BroadcastSender(processes, config))
        lines.append(_measure(policy, sync, bucket_mib, options.rounds))
        engine.make_stale()
        sync.close()
    engine.close()
    stop_processes()
    return lines


class _Policy:
    """The gathering half of a policy; it notes the sizes of its buckets."""

    def __init__(self, gatherer: Any) -> None:
        self._gatherer = gatherer
        self.sizes: list[int] = []
        self.num_bytes = sum(tensor.nbytes for bucket in self.weights(2**30) for _, tensor in bucket)

    def weights(
        self, bucket_bytes: int, to: Receivers = "leaders", replicas: Collection[int] | None = None
    ) -> Iterator[WeightBucket]:
        yield from self._gatherer.weights(bucket_bytes, to, replicas)

    def weight_plan(self, bucket_bytes: int) -> list[list[WeightBucket]]:
        rounds: list[list[WeightBucket]] = self._gatherer.weight_plan(bucket_bytes)
        self.sizes = [bucket.num_bytes for buckets in rounds for bucket in buckets]
        return rounds


def _measure(policy: _Policy, sync: Pushing, bucket_mib: float, num_rounds: int) -> str:
    """A row of the table."""
    with _peak_growth() as growth:
        sync.push(policy, 1)
    with _receiver(policy.sizes, copies=False) as send, _receiver(policy.sizes, copies=True) as send_to_copy:
        sides = {
            "push": lambda: measure(lambda: sync.push(policy, 2)),
            "bare": lambda: measure(send),
            "copy": lambda: measure(send_to_copy),
        }
        durations = take_turns(sides, num_rounds)
    rate = {side: f"{policy.num_bytes / median_wall(durations[side]) / 1e6:.0f}" for side in sides}
    ratio = {side: f"{speed_ratio(durations['push'], durations[side]).wall:.2f}" for side in ("bare", "copy")}
    cells = [f"{policy.num_bytes / 1e6:.0f}", f"{bucket_mib:g}", rate["push"], rate["bare"], ratio["bare"]]
    cells += [rate["copy"], ratio["copy"], f"{growth[0] / (bucket_mib * 2**20):.2f}"]
    return f"| {' | '.join(cells)} |"


@contextmanager
def _receiver(sizes: Sequence[int], copies: bool) -> Iterator[Callable[[], None]]:
    """What broadcasts chunks of these sizes to another process, which has memory for all of them."""
    store = open_store(_ADDRESS, _TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    receiver = context.Process(target=_receive, args=(store.port, list(sizes), copies), daemon=True)
    receiver.start()
    group = join_group(store, "bare", 2, torch.device("cpu"), _ADDRESS, _TIMEOUT_S)
    # Not zeros: memory that has never been written is one page that stays in the processor's cache.
    chunks = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    done = torch.zeros(1)

    def send() -> None:
        for chunk in chunks:
            group.broadcast(chunk, 0).wait()
        group.broadcast(done, 1).wait()

    try:
        yield send
    finally:
        receiver.kill()
        receiver.join()


def _receive(port: int, sizes: Sequence[int], copies: bool) -> None:
    torch.set_num_threads(1)
    store = connect_store(_ADDRESS, port, _TIMEOUT_S)
    group = join_group(store, "bare", 2, torch.device("cpu"), _ADDRESS, _TIMEOUT_S, rank=1)
    chunks = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    while True:
        for chunk in chunks:
            received = buffer[: len(chunk)] if copies else chunk
            group.broadcast(received, 0).wait()
            if copies:
                chunk.copy_(received)
        group.broadcast(torch.zeros(1), 1).wait()


@contextmanager
def _peak_growth() -> Iterator[list[int]]:
    """Fills the list with the growth of this process's resident memory at its peak, in bytes."""
    growth: list[int] = []
    before = peak = _resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield growth
    finally:
        done.set()
        watcher.join()
        growth.append(peak - before)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
