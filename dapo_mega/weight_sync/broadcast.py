"""Weights to engines by broadcast: every pipeline stage's leader sends its buckets to each engine's processes.

    leader of a stage:    gather bucket k+1  ||  broadcast bucket k in one group per engine
    rank 0:                                      tells the engines to receive bucket k, and hears how it went
    engine:                                      receive and load bucket k

One bucket is on its way at a time, so that an engine receives from all stages in the order it was told; where rank 0
knows it has come, the call for the next one waits in the engine while that loads. A leader sends a bucket once per
engine. What keeps an engine from finishing, its death included, concerns its own groups only.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.distributed.stores import connect_store, local_address, open_store
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.engines.sglang.weight_protocol import limited_group
from dapo_mega.types import StageBucket, WeightSource
from dapo_mega.weight_sync.engine_groups import EngineGroup, Lanes, backend_name, join_group, lane_names, most_lanes
from dapo_mega.weight_sync.update import Update, UpdateCalls
from dapo_mega.weight_sync.wires import Wires

_POLL_S = 0.001
_FAILURE_POLL_S = 0.05
_JOINING = 0.9  # Of the limit of the call to join, so that an engine that gives up can still say so.


class _Signals:
    """What rank 0 tells the leaders during an update, through the store that it listens on."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def announce(self, key: str, urls: Sequence[str]) -> None:
        """These engines have been told to take part in the step `key`."""
        self._store.set(key, json.dumps(urls))

    def await_announcement(self, key: str) -> list[str]:
        """Wait for `announce`; for one process per key."""
        urls: list[str] = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return urls

    def report_failure(self, update: int, url: str) -> None:
        self._store.set(f"failed/{update}/{url}", "")

    def has_failed(self, update: int, url: str) -> bool:
        return self._store.check([f"failed/{update}/{url}"])


@dataclass(frozen=True)
class _GroupNames:
    """Of an engine's groups."""

    prefix: str
    num_lanes: int

    def of_stage(self, stage: int) -> list[str]:
        return lane_names(f"{self.prefix}-{stage}", self.num_lanes)


class BroadcastTransport:
    """Implements `Transport` with NCCL on GPUs and gloo on the CPU."""

    uses_sessions = True

    def __init__(
        self, processes: Processes, config: WeightSyncConfig, *, towards: str = "127.0.0.1", dtype: str = "fp32"
    ) -> None:
        """Collective. Engines reach the trainer by its addresses on the way to the host `towards`; `dtype` is what they
        compute in: fp32, bf16 or fp8."""
        self._processes = processes
        self._most_lanes = most_lanes(processes.device)
        self._wires = Wires(config, dtype, self._most_lanes)
        self._bucket_bytes = config.bucket_bytes
        self._timeout_s = config.timeout_s
        self._stage_size = processes.world_size // processes.pipeline_size
        self._leads = processes.rank % self._stage_size == 0
        self._address = local_address(towards)
        # Waiting for an announcement may take as long as rank 0 waits for the engines.
        store = open_store(self._address, 4 * self._timeout_s) if self._leads else None
        mine = (self._address, store.port if store else 0, secrets.token_hex(4))
        everyones: list[Any] = [None] * processes.world_size
        dist.all_gather_object(everyones, mine, group=processes.control)
        self._listening = [(address, port) for address, port, _ in everyones[:: self._stage_size]]
        self._run_id = everyones[0][2]
        self._store = store  # It listens as long as it lives.
        if processes.rank == 0 or not self._leads:
            self._signals = _Signals(store or dist.HashStore())
        else:
            self._signals = _Signals(connect_store(*self._listening[0], 4 * self._timeout_s))
        self._update = 0
        self._names: dict[str, _GroupNames] = {}
        self._joined: set[str] = set()
        self._groups: dict[str, Sequence[EngineGroup]] = {}
        self._abandoned: list[tuple[Sequence[EngineGroup], Sequence[dist.Work]]] = []

    def send(self, policy: WeightSource, update: Update, session: UpdateCalls | None) -> int:
        """See `Transport`."""
        # Buffers of a broadcast that never ended are free once gloo has given it up.
        self._abandoned = [(groups, works) for groups, works in self._abandoned if not _are_completed(works)]
        self._update = update.number
        self._join_groups(update, session)
        works: Mapping[str, Sequence[dist.Work]] = {}
        num_bytes = 0
        wire = self._wires.choose(update)
        buckets = map(wire.prepare, policy.stage_weights(self._bucket_bytes, wire.most_bytes))
        for number, bucket in enumerate(buckets):
            key = f"{update.number}/{number}"
            if not (are_received := self._are_received(works)):
                self._finish(works)
            if session:
                session.finish(all_but=1 if are_received else 0)
                self._call(bucket, wire.load_format(bucket), update, session)
            if are_received:
                self._finish(works)
            if session:
                self._signals.announce(key, [target.url for target in session.targets])
            works, bucket_bytes = self._broadcast(key, bucket, wire.num_lanes)
            num_bytes += bucket_bytes
        self._finish(works)
        if session:
            session.finish()
        total = torch.tensor(num_bytes)
        dist.all_reduce(total, group=self._processes.control)
        return int(total)

    def _call(self, bucket: StageBucket, load_format: str, update: Update, session: UpdateCalls) -> None:
        """Tell the engines to receive the bucket."""

        async def receive(client: EngineClient) -> None:
            await client.update_weights_from_distributed(
                names=bucket.names,
                dtypes=bucket.dtypes,
                shapes=bucket.shapes,
                group_name=self._names[client.url].of_stage(bucket.stage)[0],
                version=update.label if bucket.is_last else None,
                flush_cache=update.flush_cache and bucket.is_last,
                load_format=load_format,
            )

        session.start(receive)

    def _broadcast(
        self, key: str, bucket: StageBucket, num_lanes: int
    ) -> tuple[Mapping[str, Sequence[dist.Work]], int]:
        """The leader's broadcasts by engine, to those that are announced to receive the bucket; and its bytes."""
        if bucket.pieces is None:
            return {}, 0
        urls = [url for url in self._signals.await_announcement(key) if url in self._groups]
        lanes = {url: Lanes(self._groups[url][:num_lanes]) for url in urls}
        works: dict[str, list[dist.Work]] = {url: [] for url in urls}
        num_bytes = 0
        for piece in bucket.pieces:
            for url, each in works.items():
                each.append(lanes[url].broadcast(piece, 0))
            num_bytes += piece.nbytes
        return works, num_bytes

    def _are_received(self, works: Mapping[str, Sequence[dist.Work]]) -> bool:
        """Wait until each engine has half of the bucket or has failed. Whether this process knows that all have it.

        Such an engine has come to the call for the bucket, so that the next call cannot overtake that one. Of NCCL's
        broadcasts this is not known: small ones are complete before the engine takes part.
        """
        if not works or self._processes.device.type != "cpu":
            return False
        half = {url: each[: (len(each) + 1) // 2] for url, each in works.items()}
        self._wait({url: partial(_are_completed, each) for url, each in half.items()})
        return all(map(_have_succeeded, half.values()))

    def _finish(self, works: Mapping[str, Sequence[dist.Work]]) -> None:
        """Wait until each engine has the bucket or has failed."""
        self._wait({url: partial(_are_completed, each) for url, each in works.items()})
        for url, each in works.items():
            if not _have_succeeded(each):
                self._abandon(url, each)

    def _wait(self, pending: Mapping[str, Callable[[], bool]]) -> None:
        """Until every engine's part is done, or its call failed, or time is up."""
        started = time.monotonic()
        failures_seen = started
        while pending and (now := time.monotonic()) - started < self._timeout_s:
            pending = {url: is_done for url, is_done in pending.items() if not is_done()}
            if now - failures_seen > _FAILURE_POLL_S:
                failures_seen = now
                pending = {url: d for url, d in pending.items() if not self._signals.has_failed(self._update, url)}
            if pending:
                time.sleep(_POLL_S)

    def _join_groups(self, update: Update, session: UpdateCalls | None) -> None:
        """Found the groups of all stages with the engines that are not in any."""
        lacking = [t for t in update.targets if t.url in update.stale or t.url not in self._joined]
        old_names, self._names = self._names, dict(self._names)
        for index, target in enumerate(lacking):
            prefix = limited_group(f"dapo-mega-{self._run_id}-{update.number}-{index}", _JOINING * self._timeout_s)
            self._names[target.url] = _GroupNames(prefix, self._most_lanes if target.has_plugin else 1)
            self._groups.pop(target.url, None)
            self._joined.add(target.url)
        if not lacking:
            return
        sizes = {target.url: 1 + target.tp_size for target in lacking}
        key = f"{update.number}/join"
        if session:

            async def join(client: EngineClient) -> None:
                if client.url in sizes:
                    if names := old_names.get(client.url):
                        await self._destroy_groups(client, names)
                    await self._join(client, sizes[client.url])

            session.start(join)
            for stage in range(self._processes.pipeline_size):
                self._signals.announce(f"{key}/{stage}", [target.url for target in session.targets])
        if self._leads:
            urls = self._signals.await_announcement(f"{key}/{self._processes.pipeline_rank}")
            self._create_groups({url: sizes[url] for url in urls if url in sizes})
        if session:
            session.finish()

    async def _join(self, client: EngineClient, size: int) -> None:
        for stage, (address, port) in enumerate(self._listening):
            for name in self._names[client.url].of_stage(stage):
                await client.init_weights_update_group(
                    address=address,
                    port=port,
                    rank_offset=1,
                    world_size=size,
                    name=name,
                    backend=backend_name(self._processes.device),
                )

    async def _destroy_groups(self, client: EngineClient, names: _GroupNames) -> None:
        for stage in range(self._processes.pipeline_size):
            for name in names.of_stage(stage):
                with contextlib.suppress(EngineError):  # A server that was started anew does not know it.
                    await client.destroy_weights_update_group(name)

    def _create_groups(self, sizes: Mapping[str, int]) -> None:
        if not sizes:
            return
        executor = ThreadPoolExecutor(len(sizes))
        joining = {url: executor.submit(self._found_lanes, url, size) for url, size in sizes.items()}
        self._wait({url: future.done for url, future in joining.items()})
        executor.shutdown(wait=False)
        for url, future in joining.items():
            if future.done() and not future.exception():
                self._groups[url] = future.result()

    def _found_lanes(self, url: str, size: int) -> list[EngineGroup]:
        stage = self._processes.pipeline_rank
        # A connection of its own: waiting on one keeps everyone else from using it.
        store = connect_store(*self._listening[stage], self._timeout_s)
        return [
            join_group(store, name, size, self._processes.device, self._address, self._timeout_s)
            for name in self._names[url].of_stage(stage)
        ]

    def _abandon(self, url: str, works: Sequence[dist.Work]) -> None:
        groups = self._groups.pop(url)
        for group in groups:
            group.abort()
        self._abandoned.append((groups, works))

    def report_failure(self, url: str) -> None:
        """See `Transport`."""
        self._signals.report_failure(self._update, url)

    def forget(self, urls: Sequence[str]) -> None:
        """See `Transport`."""
        self._joined -= set(urls)
        for url in urls:
            self._groups.pop(url, None)

    def close(self) -> None:
        """See `Transport`. A broadcast that an engine never finished delays it by what is left of its timeout."""
        self.forget(list(self._groups))
        self._abandoned.clear()


def _are_completed(works: Sequence[dist.Work]) -> bool:
    return all(work.is_completed() for work in reversed(works))  # The last to begin is most often the last to end.


def _have_succeeded(works: Sequence[dist.Work]) -> bool:
    if not _are_completed(works):
        return False
    try:
        for work in works:
            work.wait()
    except RuntimeError:
        return False  # Rank 0 hears from the engine, or its silence, what it was.
    return True
