"""Sends weights by broadcast: every process of the trainer sends its share of the buckets to its replica's engines.

    sender:    gather its next bucket  ||  broadcast this one to each engine of its replica that was told to receive it
    rank 0:                                tells engines when to receive which bucket, and senders to send it
    engine:                                receives and loads one bucket at a time

A replica's engines get all weights from its own processes, and each engine has a group of its own with each of them:
an engine that fails or dies delays no other. `delivery.py` has the order.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.distributed.stores import connect_store, local_address, open_store
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.engines.sglang.weight_protocol import dtype_name, limited_group
from dapo_mega.types import WeightBucket, WeightSource
from dapo_mega.weight_sync.buckets import EncodedBucket
from dapo_mega.weight_sync.delivery import Delivery, Sender
from dapo_mega.weight_sync.encodings import Encoding, Encodings
from dapo_mega.weight_sync.engine_groups import EngineGroup, backend_name, join_group
from dapo_mega.weight_sync.fp8 import quantised_bucket
from dapo_mega.weight_sync.mail import Mail, Message
from dapo_mega.weight_sync.update import Sent, Transport, Update, UpdateCalls

_POLL_S = 0.001
_FAILURE_POLL_S = 0.05
_JOINING_SHARE = 0.9  # Share of the join call's time limit, so that an engine that gives up can still answer.


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
        self._replica_size = processes.tensor_size * processes.context_size
        self._address = local_address(towards)
        # A sender waits for a message while each of the others sends a bucket, and as long as rank 0 waits for engines.
        num_places = processes.pipeline_size * self._replica_size
        waits_s = (3 + 2 * num_places) * self._timeout_s
        self._store = open_store(self._address, waits_s)  # It serves other processes as long as it is referenced.
        everyones: list[Any] = [None] * processes.world_size
        mine = (self._address, self._store.port, secrets.token_hex(4))
        dist.all_gather_object(everyones, mine, group=processes.control)
        self._listening = [(address, port) for address, port, _ in everyones]
        self._run_id = everyones[0][2]
        store = self._store if processes.rank == 0 else connect_store(*self._listening[0], waits_s)
        self._mail = Mail(store, processes.rank, waits_s)
        self._update = 0
        self._group_names: dict[str, str] = {}
        self._replica_of: dict[str, int] = {}
        self._groups: dict[str, EngineGroup] = {}
        self._abandoned: list[tuple[EngineGroup, Sequence[dist.Work]]] = []
        self._bytes_made = self._bytes_sent = 0

    def send(self, policy: WeightSource, update: Update, session: UpdateCalls | None) -> Sent:
        # gloo times out on a broadcast that an engine never finishes; its tensors must live until then.
        self._abandoned = [(group, works) for group, works in self._abandoned if not _are_completed(works)]
        self._update = update.number
        self._bytes_made = self._bytes_sent = 0
        joining = self._join_groups(update, session)
        replicas = sorted({self._replica_of[target.url] for target in update.targets})
        encoding = self._encodings.choose(update, any(map(self._is_mine, joining)))
        if session:
            self._start_delivery(policy, encoding, update, replicas, session)
        for bucket in policy.shares(self._bucket_bytes, replicas):
            if bucket and bucket.tensors is not None:
                self._serve(self._encoded(bucket, encoding))
        if session:
            session.finish()
        return self._sent()

    def _encoded(self, bucket: WeightBucket, encoding: Encoding) -> EncodedBucket:
        return encoding.encode(quantised_bucket(bucket) if self._is_fp8 else bucket)

    def _start_delivery(
        self, policy: WeightSource, encoding: Encoding, update: Update, replicas: Sequence[int], session: UpdateCalls
    ) -> None:
        """Start to tell the engines to receive, and the senders to send."""
        rounds = [
            [self._encoded(bucket, encoding) for bucket in buckets]
            for buckets in policy.planned_shares(self._bucket_bytes)
        ]
        engines: dict[int, list[str]] = {replica: [] for replica in replicas}
        for target in session.targets:
            engines[self._replica_of[target.url]].append(target.url)

        async def tell(client: EngineClient, bucket: EncodedBucket, is_last: bool) -> None:
            await client.update_weights_from_distributed(
                names=[spec.name for spec in bucket.specs],
                dtypes=[dtype_name(spec.dtype) for spec in bucket.specs],
                shapes=[spec.shape for spec in bucket.specs],
                group_name=self._group_name(client.url, bucket.stage, bucket.place),
                version=update.label if is_last else None,
                flush_cache=update.flush_cache and is_last,
                load_format=bucket.load_format,
            )

        delivery = Delivery(rounds, engines, self._post, tell, self._timeout_s)
        # An engine may wait for others as long as it receives.
        session.start(delivery.deliver, 2 * delivery.num_buckets + len(session.targets) + 2)

    def _rank(self, sender: Sender) -> int:
        """Megatron numbers processes by tensor, context, data and pipeline rank."""
        return (sender.stage * self._processes.data_size + sender.replica) * self._replica_size + sender.place

    def _post(self, sender: Sender, message: Message) -> None:
        self._mail.post(self._rank(sender), message)

    def _senders(self, replica: int) -> Iterator[Sender]:
        for stage in range(self._processes.pipeline_size):
            for place in range(self._replica_size):
                yield Sender(replica, stage, place)

    def _is_mine(self, url: str) -> bool:
        """Whether this process sends to the engine."""
        return self._replica_of[url] == self._processes.data_rank

    def _serve(self, bucket: EncodedBucket) -> None:
        """Send the round's bucket to engines as rank 0 says, until all have it or have failed."""
        assert bucket.pieces is not None
        remaining = iter(bucket.pieces)
        made: list[Tensor] = []
        works: dict[str, list[dist.Work]] = {}
        while (message := self._mail.read()).kind == "send":
            (url,) = message.urls
            if url in self._groups:
                works[url] = self._broadcast(self._groups[url], made, remaining)
                self._bytes_sent += sum(piece.nbytes for piece in made)
        self._bytes_made += sum(piece.nbytes for piece in made)
        self._finish(works, message.urls)

    def _broadcast(self, group: EngineGroup, made: list[Tensor], remaining: Iterator[Tensor]) -> list[dist.Work]:
        """Start the broadcasts of all pieces: those that were `made` for an engine before, or are made now."""
        works = [group.broadcast(piece, 0) for piece in made]
        for piece in remaining:
            made.append(piece)
            works.append(group.broadcast(piece, 0))
        return works

    def _finish(self, works: Mapping[str, Sequence[dist.Work]], received: Sequence[str]) -> None:
        """Wait for the broadcasts to the engines that have received them; give up the groups of the others."""
        self._wait({url: partial(_are_completed, works[url]) for url in received if url in works})
        for url, each in works.items():
            if url not in received or not _have_succeeded(each):
                group = self._groups.pop(url)
                group.abort()
                self._abandoned.append((group, each))

    def _sent(self) -> Sent:
        """Collective: what all processes have sent."""
        counts = torch.zeros(self._processes.world_size, 4, dtype=torch.int64)
        own = self._bytes_made, self._bytes_sent, *self._encodings.take_counts()
        counts[self._processes.rank] = torch.tensor(own)
        dist.all_reduce(counts, group=self._processes.control)
        made, sent, compared, changed = counts.T
        shape = (self._processes.pipeline_size, self._processes.data_size, self._replica_size)
        metrics = {"weight_sync/sender_balance": float(sent.max() / sent.double().mean())} if sent.any() else {}
        if compared.any():
            metrics["weight_sync/changed_share"] = int(changed.sum()) / int(compared.sum())
        return Sent(int(made.view(shape).sum((0, 2)).max()), metrics)

    def _wait(self, pending: Mapping[str, Callable[[], bool]]) -> None:
        """Wait until every engine's part is done, its call has failed, or time is up."""
        started = time.monotonic()
        failures_seen = started
        while pending and (now := time.monotonic()) - started < self._timeout_s:
            pending = {url: is_done for url, is_done in pending.items() if not is_done()}
            if now - failures_seen > _FAILURE_POLL_S:
                failures_seen = now
                pending = {url: d for url, d in pending.items() if not self._mail.has_failed(self._update, url)}
            if pending:
                time.sleep(_POLL_S)

    def _group_name(self, url: str, stage: int, place: int) -> str:
        return f"{self._group_names[url]}-{stage}-{place}"

    def _join_groups(self, update: Update, session: UpdateCalls | None) -> Sequence[str]:
        """Give the engines that have none yet a replica, and create their groups with all of its processes. Returns
        their URLs."""
        lacking = [t for t in update.targets if t.url in update.outdated or t.url not in self._replica_of]
        if not lacking:
            return []
        old_names = {target.url: self._group_names.get(target.url) for target in lacking}
        sizes = {target.url: 1 + target.tp_size for target in lacking}
        self._assign_replicas(update, list(sizes))
        for index, url in enumerate(sizes):
            name = f"dapo-mega-{self._run_id}-{update.number}-{index}"
            self._group_names[url] = limited_group(name, _JOINING_SHARE * self._timeout_s)
            self._groups.pop(url, None)
        if session:

            async def join(client: EngineClient) -> None:
                if client.url in sizes:
                    await self._join(client, sizes[client.url], old_names[client.url])

            session.start(join)
            for replica in sorted({self._replica_of[url] for url in sizes}):
                urls = tuple(t.url for t in session.targets if t.url in sizes and self._replica_of[t.url] == replica)
                for sender in self._senders(replica):
                    self._post(sender, Message("join", urls))
        if any(map(self._is_mine, sizes)):
            self._create_groups({url: sizes[url] for url in self._mail.read().urls})
        if session:
            session.finish()
        return list(sizes)

    def _assign_replicas(self, update: Update, lacking: Sequence[str]) -> None:
        """Spread the engines over the replicas, the same on every process."""
        if any(target.url not in update.outdated for target in update.targets):
            # An engine that an update leaves out must join again before it gets weights.
            present = {target.url for target in update.targets}
            self._replica_of = {url: replica for url, replica in self._replica_of.items() if url in present}
        for url in lacking:
            self._replica_of.pop(url, None)
        numbers = Counter(dict.fromkeys(range(self._processes.data_size), 0))
        numbers.update(self._replica_of.values())
        for url in lacking:
            self._replica_of[url] = min(numbers, key=lambda replica: (numbers[replica], replica))
            numbers[self._replica_of[url]] += 1

    async def _join(self, client: EngineClient, size: int, old_name: str | None) -> None:
        """Make the engine join the group of each sender, and leave its old groups."""
        senders = list(self._senders(self._replica_of[client.url]))
        if old_name:
            for sender in senders:
                with contextlib.suppress(EngineError):  # A restarted server does not have the group.
                    await client.destroy_weights_update_group(f"{old_name}-{sender.stage}-{sender.place}")
        for sender in senders:
            address, port = self._listening[self._rank(sender)]
            await client.init_weights_update_group(
                address=address,
                port=port,
                rank_offset=1,
                world_size=size,
                name=self._group_name(client.url, sender.stage, sender.place),
                backend=backend_name(self._processes.device),
            )

    def _create_groups(self, sizes: Mapping[str, int]) -> None:
        """Join this process's groups with these engines in parallel; engines that do not join get no group."""
        if not sizes:
            return
        place = self._processes.rank % self._replica_size

        def create(url: str) -> EngineGroup:
            # One connection per thread: a store blocks while it waits.
            store = connect_store(*self._listening[self._processes.rank], self._timeout_s)
            name = self._group_name(url, self._processes.pipeline_rank, place)
            return join_group(store, name, sizes[url], self._processes.device, self._address, self._timeout_s)

        executor = ThreadPoolExecutor(len(sizes))
        joining = {url: executor.submit(create, url) for url in sizes}
        self._wait({url: future.done for url, future in joining.items()})
        executor.shutdown(wait=False)
        for url, future in joining.items():
            if future.done() and not future.exception():
                self._groups[url] = future.result()

    def report_failure(self, url: str) -> None:
        self._mail.report_failure(self._update, url)

    def forget(self, urls: Sequence[str]) -> None:
        for url in urls:
            self._replica_of.pop(url, None)
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
