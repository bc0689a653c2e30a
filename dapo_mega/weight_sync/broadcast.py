"""Sends weights by broadcast: every pipeline stage's leader sends its buckets to each engine's ranks.

    leader of a stage:    gather bucket k+1  ||  broadcast bucket k in one group per engine
    rank 0:                                      tells the engines to receive bucket k, and gets their answers
    engine:                                      receive and load bucket k

One bucket is sent at a time, so an engine receives buckets of all stages in the announced order. With gloo, rank 0
knows when a bucket has arrived; it then makes the next HTTP call early, and that call queues while the engine loads. A
leader sends each bucket once per engine, in one group per engine, so an engine that fails or dies delays no other.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.distributed.stores import connect_store, local_address, open_store
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.engines.sglang.weight_protocol import dtype_name, limited_group
from dapo_mega.types import WeightSource
from dapo_mega.weight_sync.buckets import EncodedBucket
from dapo_mega.weight_sync.encodings import Encodings
from dapo_mega.weight_sync.engine_groups import EngineGroup, backend_name, join_group
from dapo_mega.weight_sync.fp8 import quantised_bucket
from dapo_mega.weight_sync.update import Transport, Update, UpdateCalls

_POLL_S = 0.001
_FAILURE_POLL_S = 0.05
_JOINING_SHARE = 0.9  # Share of the join call's time limit, so that an engine that gives up can still answer.


class _Signals:
    """Messages from rank 0 to the stages' leaders during an update, through rank 0's store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def announce(self, key: str, urls: Sequence[str]) -> None:
        """Tell the leader that waits for `key` which engines take part in that step."""
        self._store.set(key, json.dumps(urls))

    def await_announcement(self, key: str) -> list[str]:
        """Wait for `announce`. Each key is for one process."""
        urls: list[str] = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return urls

    def report_failure(self, update: int, url: str) -> None:
        self._store.set(f"failed/{update}/{url}", "")

    def has_failed(self, update: int, url: str) -> bool:
        return self._store.check([f"failed/{update}/{url}"])


class BroadcastTransport(Transport):
    """Broadcasts with NCCL on GPUs and gloo on the CPU."""

    def __init__(
        self, processes: Processes, config: WeightSyncConfig, *, towards: str = "127.0.0.1", dtype: str = "fp32"
    ) -> None:
        """Collective. Engines reach the trainer at its address on the route to the host `towards`. `dtype` is the
        engines': fp32, bf16 or fp8."""
        self._processes = processes
        self._encodings = Encodings(config)
        self._is_fp8 = dtype == "fp8"
        self._bucket_bytes = config.bucket_bytes
        self._timeout_s = config.timeout_s
        self._stage_size = processes.world_size // processes.pipeline_size
        self._is_leader = processes.rank % self._stage_size == 0
        self._address = local_address(towards)
        # A leader waits for an announcement as long as rank 0 waits for the engines.
        store = open_store(self._address, 4 * self._timeout_s) if self._is_leader else None
        mine = (self._address, store.port if store else 0, secrets.token_hex(4))
        everyones: list[Any] = [None] * processes.world_size
        dist.all_gather_object(everyones, mine, group=processes.control)
        self._listening = [(address, port) for address, port, _ in everyones[:: self._stage_size]]
        self._run_id = everyones[0][2]
        self._store = store  # The store serves other processes as long as it is referenced.
        if processes.rank == 0 or not self._is_leader:
            self._signals = _Signals(store or dist.HashStore())
        else:
            self._signals = _Signals(connect_store(*self._listening[0], 4 * self._timeout_s))
        self._update = 0
        self._group_names: dict[str, str] = {}
        self._joined: set[str] = set()
        self._groups: dict[str, EngineGroup] = {}
        self._abandoned: list[tuple[EngineGroup, Sequence[dist.Work]]] = []

    def send(self, policy: WeightSource, update: Update, session: UpdateCalls | None) -> int:
        """See `Transport`."""
        # gloo times out on a broadcast that an engine never finishes; its tensors must live until then.
        self._abandoned = [(group, works) for group, works in self._abandoned if not _are_completed(works)]
        self._update = update.number
        self._join_groups(update, session)
        encoding = self._encodings.choose(update)
        buckets = policy.stage_weights(self._bucket_bytes)
        if self._is_fp8:
            buckets = map(quantised_bucket, buckets)
        works: Mapping[str, Sequence[dist.Work]] = {}
        num_bytes = 0
        for number, bucket in enumerate(map(encoding.encode, buckets)):
            key = f"{update.number}/{number}"
            if not (have_half := self._wait_for_half(works)):
                self._finish(works)
            if session:
                session.finish(all_but=1 if have_half else 0)
                self._tell(bucket, update, session)
            if have_half:
                self._finish(works)
            if session:
                self._signals.announce(key, [target.url for target in session.targets])
            works, bucket_bytes = self._broadcast(key, bucket)
            num_bytes += bucket_bytes
        self._finish(works)
        if session:
            session.finish()
        total = torch.tensor(num_bytes)
        dist.all_reduce(total, group=self._processes.control)
        return int(total)

    def _tell(self, bucket: EncodedBucket, update: Update, session: UpdateCalls) -> None:
        """Tell the engines to receive the bucket."""

        async def receive(client: EngineClient) -> None:
            await client.update_weights_from_distributed(
                names=[spec.name for spec in bucket.specs],
                dtypes=[dtype_name(spec.dtype) for spec in bucket.specs],
                shapes=[spec.shape for spec in bucket.specs],
                group_name=self._group_name(client.url, bucket.stage),
                version=update.label if bucket.is_last else None,
                flush_cache=update.flush_cache and bucket.is_last,
                load_format=bucket.load_format,
            )

        session.start(receive)

    def _broadcast(self, key: str, bucket: EncodedBucket) -> tuple[Mapping[str, Sequence[dist.Work]], int]:
        """Start the leader's broadcasts to the announced engines. Returns the works by engine, and the bytes sent."""
        if bucket.pieces is None:
            return {}, 0
        urls = [url for url in self._signals.await_announcement(key) if url in self._groups]
        works: dict[str, list[dist.Work]] = {url: [] for url in urls}
        num_bytes = 0
        for piece in bucket.pieces:
            for url in urls:
                works[url].append(self._groups[url].broadcast(piece, 0))
            num_bytes += piece.nbytes
        return works, num_bytes

    def _wait_for_half(self, works: Mapping[str, Sequence[dist.Work]]) -> bool:
        """Wait until every engine has half of the bucket or has failed. True if all of them have: then the next HTTP
        call cannot overtake the one for this bucket.

        Always False with NCCL, which completes small broadcasts before the engine takes part.
        """
        if not works or self._processes.device.type != "cpu":
            return False
        half = {url: each[: (len(each) + 1) // 2] for url, each in works.items()}
        self._wait({url: partial(_are_completed, each) for url, each in half.items()})
        return all(map(_have_succeeded, half.values()))

    def _finish(self, works: Mapping[str, Sequence[dist.Work]]) -> None:
        """Wait until every engine has the bucket or has failed; give up the groups of those that failed."""
        self._wait({url: partial(_are_completed, each) for url, each in works.items()})
        for url, each in works.items():
            if not _have_succeeded(each):
                group = self._groups.pop(url)
                group.abort()
                self._abandoned.append((group, each))

    def _wait(self, pending: Mapping[str, Callable[[], bool]]) -> None:
        """Wait until every engine's part is done, its call has failed, or time is up."""
        started = time.monotonic()
        failures_seen = started
        while pending and (now := time.monotonic()) - started < self._timeout_s:
            pending = {url: is_done for url, is_done in pending.items() if not is_done()}
            if now - failures_seen > _FAILURE_POLL_S:
                failures_seen = now
                pending = {url: d for url, d in pending.items() if not self._signals.has_failed(self._update, url)}
            if pending:
                time.sleep(_POLL_S)

    def _group_name(self, url: str, stage: int) -> str:
        return f"{self._group_names[url]}-{stage}"

    def _join_groups(self, update: Update, session: UpdateCalls | None) -> None:
        """Create the groups of all stages with the engines that have none yet."""
        lacking = [t for t in update.targets if t.url in update.outdated or t.url not in self._joined]
        if not lacking:
            return
        old_names = {target.url: self._group_names.get(target.url) for target in lacking}
        sizes = {target.url: 1 + target.tp_size for target in lacking}
        for index, url in enumerate(sizes):
            name = f"dapo-mega-{self._run_id}-{update.number}-{index}"
            self._group_names[url] = limited_group(name, _JOINING_SHARE * self._timeout_s)
            self._groups.pop(url, None)
            self._joined.add(url)
        key = f"{update.number}/join"
        if session:

            async def join(client: EngineClient) -> None:
                if client.url in sizes:
                    await self._join(client, sizes[client.url], old_names[client.url])

            session.start(join)
            for stage in range(self._processes.pipeline_size):
                self._signals.announce(f"{key}/{stage}", [target.url for target in session.targets])
        if self._is_leader:
            urls = self._signals.await_announcement(f"{key}/{self._processes.pipeline_rank}")
            self._create_groups({url: sizes[url] for url in urls if url in sizes})
        if session:
            session.finish()

    async def _join(self, client: EngineClient, size: int, old_name: str | None) -> None:
        """Make the engine join the group of each stage, and leave its old groups."""
        if old_name:
            for stage in range(self._processes.pipeline_size):
                with contextlib.suppress(EngineError):  # A restarted server does not have the group.
                    await client.destroy_weights_update_group(f"{old_name}-{stage}")
        for stage, (address, port) in enumerate(self._listening):
            await client.init_weights_update_group(
                address=address,
                port=port,
                rank_offset=1,
                world_size=size,
                name=self._group_name(client.url, stage),
                backend=backend_name(self._processes.device),
            )

    def _create_groups(self, sizes: Mapping[str, int]) -> None:
        """Join this leader's groups with these engines in parallel; engines that do not join get no group."""
        if not sizes:
            return

        def create(url: str) -> EngineGroup:
            stage = self._processes.pipeline_rank
            # One connection per thread: a store blocks while it waits.
            store = connect_store(*self._listening[stage], self._timeout_s)
            name = self._group_name(url, stage)
            return join_group(store, name, sizes[url], self._processes.device, self._address, self._timeout_s)

        executor = ThreadPoolExecutor(len(sizes))
        joining = {url: executor.submit(create, url) for url in sizes}
        self._wait({url: future.done for url, future in joining.items()})
        executor.shutdown(wait=False)
        for url, future in joining.items():
            if future.done() and not future.exception():
                self._groups[url] = future.result()

    def report_failure(self, url: str) -> None:
        """See `Transport`."""
        self._signals.report_failure(self._update, url)

    def forget(self, urls: Sequence[str]) -> None:
        """See `Transport`."""
        self._joined -= set(urls)
        for url in urls:
            self._groups.pop(url, None)

    def close(self) -> None:
        """See `Transport`. Takes up to `timeout_s` if an engine never finished a broadcast."""
        self.forget(list(self._groups))
        self._abandoned.clear()


def _are_completed(works: Sequence[dist.Work]) -> bool:
    return all(work.is_completed() for work in reversed(works))  # The last one started usually ends last.


def _have_succeeded(works: Sequence[dist.Work]) -> bool:
    if not _are_completed(works):
        return False
    try:
        for work in works:
            work.wait()
    except RuntimeError:
        return False  # Rank 0 learns the reason from the engine's answer or its timeout.
    return True
