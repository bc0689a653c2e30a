"""Sends weights by broadcast: every process of the trainer sends its part of the buckets to its replica's engines.

An engine gets all weights from the processes of one replica, its senders, and has a group of its own with each of them.
All know the plan: rounds, in each of which every sender has at most one bucket. One update of one engine, from top to
bottom:

    rank 0 (BroadcastTransport)       a sender (BroadcastSender)               the engine (sglang_plugin)

    calls it, if it joins: ------------------------------------------------->  joins the group of each sender
                                      joins its groups with those engines
    calls it, once: -------------------------------------------------------->  for each bucket, in its turn:
                                      in each round:
                                        gather (the next bucket meanwhile)
                                        encode                                     receive
                                        broadcast to its engines                   load
                                        wait until they have it
    acknowledged, or failed: why  <------------------------------------------  answers

A bucket is all of its values, or with delta sync the changed ones; an engine that joins makes its senders send all.
Engines begin a round with different senders and go round. A sender serves as many at a time as there are engines for
each sender, so that they do not meet.

Whatever happens to an engine, its call fails, rank 0 reports that to all senders, and they give up their groups with it
and go on. Of an engine that neither answers nor takes its bucket, `progress.py` finds that it is late.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.commands import Commanded, command, gathered
from dapo_mega.distributed.processes import Processes
from dapo_mega.distributed.stores import connect_store, local_address, open_store
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.engines.sglang.weight_protocol import (
    EngineGroup,
    PlanFormat,
    PlannedBucket,
    UpdatePlan,
    dtype_name,
    group_with,
    join_group,
    limited_group,
    steps_to,
)
from dapo_mega.megatron.lent_memory import Held
from dapo_mega.types import LogProbs, Selection, TokenIds, WeightBucket, WeightSource, WeightSpec
from dapo_mega.weight_sync.encodings import Encodings
from dapo_mega.weight_sync.fp8 import quantised_bucket
from dapo_mega.weight_sync.progress import LateEngines, UpdateNews
from dapo_mega.weight_sync.shared_memory import SharedMemorySender
from dapo_mega.weight_sync.update import (
    EngineRoute,
    SenderPlaces,
    Sent,
    SharedBucket,
    Transport,
    Update,
    UpdateCalls,
)

if TYPE_CHECKING:
    from dapo_mega.engines.sglang.fleet_client import SyncTarget

_POLL_S = 0.001
_FAILURE_POLL_S = 0.1
_REPORTS_PER_LIMIT = 20  # So often in a time limit senders report for whom they wait, and rank 0 reads it.
_JOINING_SHARE = 0.9  # Share of the join call's time limit, so that an engine that gives up can still answer.


class BroadcastTransport(Transport):
    """Calls the engines and finds out which have failed; knows no tensor."""

    def __init__(self, trainer: WeightCommands, places: SenderPlaces, config: WeightSyncConfig) -> None:
        self._trainer = trainer
        self._places = places
        self._store = connect_store(places.listening[0][0], places.listening[0][1], config.timeout_s)
        self._name = f"dapo-mega-{secrets.token_hex(4)}"  # No other trainer's groups are called so.
        self._timeout_s = config.timeout_s
        self._window_bytes = config.bucket_bytes
        self._news = UpdateNews(self._store, 0)
        self._routes: dict[str, EngineRoute] = {}
        self._old_groups: dict[str, str] = {}
        self._plans: dict[tuple[bool, Selection], UpdatePlan] = {}
        self._known_plans: dict[str, str] = {}

    def bring(self, update: Update, calls: UpdateCalls, forgotten: Sequence[str]) -> Sent:
        if not update.routes:
            return Sent(0)
        kind = update.have_plugin, update.selection
        if kind not in self._plans:
            rounds = self._trainer.weight_plan(*kind)
            self._plans[kind] = UpdatePlan(
                len(self._places.replicas[0]),
                self._window_bytes,
                tuple(map(tuple, rounds)),
                update.selection == "adapters",
            )
        self._start(calls, update, self._plans[kind])
        sent = self._trainer.send_weights(update, forgotten)
        calls.finish()
        return sent

    def routes(self, number: int, targets: Sequence[SyncTarget], outdated: Collection[str]) -> tuple[EngineRoute, ...]:
        """See `Transport`. Engines without a route yet are spread over the replicas, and join new groups."""
        self._news = UpdateNews(self._store, number)
        present, gone = {target.url for target in targets}, set(outdated)
        if not present <= gone:  # An engine that an update leaves out must join again before it gets weights.
            gone |= self._routes.keys() - present
        self._routes = {url: route for url, route in self._routes.items() if url not in gone}
        numbers = Counter(dict.fromkeys(range(len(self._places.replicas)), 0))
        numbers.update(route.replica for route in self._routes.values())
        turns: Counter[int] = Counter()
        for index, target in enumerate(targets):
            known = self._routes.get(target.url)
            replica = known.replica if known else min(numbers, key=lambda replica: (numbers[replica], replica))
            name = limited_group(f"{self._name}-{number}-{index}", _JOINING_SHARE * self._timeout_s)
            group = known.group if known else name
            numbers[replica] += known is None
            size = 1 + target.tp_size
            self._routes[target.url] = EngineRoute(target.url, replica, turns[replica], group, size, known is None)
            turns[replica] += 1
        return tuple(self._routes[target.url] for target in targets)

    def _start(self, calls: UpdateCalls, update: Update, plan: UpdatePlan) -> None:
        """Start to bring the buckets of all rounds to each engine of the update."""
        routes = {route.url: route for route in update.routes}
        replicas = sorted({route.replica for route in update.routes})
        ranks = [rank for replica in replicas for rank in self._places.replicas[replica]]
        # An engine may wait for others as long as it receives.
        num_parts = 2 * sum(map(len, plan.rounds)) + len(update.targets) + 2
        late = LateEngines(len(plan.rounds), self._timeout_s)
        found: set[str] = set()
        looked, every_s = time.monotonic(), self._timeout_s / _REPORTS_PER_LIMIT

        def is_late(url: str) -> bool:
            nonlocal found, looked
            if (now := time.monotonic()) - looked > every_s:
                found, looked = late.find(self._news.reports(ranks), routes, now), now
            return url in found

        async def serve(client: EngineClient) -> None:
            if routes[client.url].joins:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await self._join(client, routes[client.url])
                except TimeoutError:
                    raise EngineError(client.url, f"it has not joined within {self._timeout_s:g} s") from None
            receiving = asyncio.ensure_future(self._receive(client, routes[client.url], update, plan, num_parts))
            try:
                while not (await asyncio.wait([receiving], timeout=every_s))[0]:
                    if is_late(client.url):
                        raise EngineError(client.url, f"it has taken no weights for {self._timeout_s:g} s")
                await receiving
                self._news.add_acknowledged(client.url)
            finally:
                receiving.cancel()

        calls.start(serve, num_parts)

    async def _join(self, client: EngineClient, route: EngineRoute) -> None:
        """Make the engine join the group of each sender, and leave its old groups."""
        self._known_plans.pop(client.url, None)
        ranks = self._places.replicas[route.replica]
        if old_group := self._old_groups.get(client.url):
            for sender in range(len(ranks)):
                with contextlib.suppress(EngineError):  # A restarted server does not have the group.
                    await client.command("destroy_weights_update_group", group_name=group_with(old_group, sender))
        self._old_groups[client.url] = route.group
        for sender, rank in enumerate(ranks):
            address, port = self._places.listening[rank]
            await client.command(
                "init_weights_update_group",
                master_address=address,
                master_port=port,
                rank_offset=1,
                world_size=route.size,
                group_name=group_with(route.group, sender),
                backend=self._places.backend,
            )

    async def _receive(
        self, client: EngineClient, route: EngineRoute, update: Update, plan: UpdatePlan, num_parts: int
    ) -> None:
        """Have the engine receive and load all buckets: in one call, or without the plugin in one for each bucket."""
        if update.have_plugin:
            text = "" if self._known_plans.get(client.url) == plan.digest else plan.text
            whole = str(PlanFormat(plan.digest, route.turn, text))
            calls: list[tuple[str, Sequence[WeightSpec], str]] = [(route.group, (), whole)]
        else:
            calls = [
                (group_with(route.group, bucket.sender), bucket.specs, "flattened_bucket")
                for bucket in plan.in_turn(route.turn)
            ]
        for number, (group, specs, load_format) in enumerate(calls, start=1):
            is_last = number == len(calls)
            await client.command(
                "update_weights_from_distributed",
                timeout_s=self._timeout_s * num_parts,
                names=[spec.name for spec in specs],
                dtypes=[dtype_name(spec.dtype) for spec in specs],
                shapes=[spec.shape for spec in specs],
                group_name=group,
                weight_version=update.label if is_last else None,
                flush_cache=update.flush_cache and is_last,
                load_format=load_format,
            )
        self._known_plans[client.url] = plan.digest

    def report_failure(self, url: str) -> None:
        """Let the senders know, from the thread that calls the engines."""
        with contextlib.suppress(dist.DistError, OSError):  # Without a trainer nobody needs to know.
            self._news.add_failed(url)


class WeightCommands(Commanded):
    """Sends with each process's `sender` from its `policy`, which is a `WeightSource`."""

    policy: Any
    sender: BroadcastSender | SharedMemorySender | None = None

    @command
    def weight_plan(self, have_plugin: bool, selection: Selection = "merged") -> list[list[PlannedBucket]]:
        """The buckets that `send_weights` sends in each round, to engines with or without the plugin."""
        assert isinstance(self.sender, BroadcastSender)
        return self.sender.plan(self._selected(selection), have_plugin=have_plugin)

    @command
    def send_weights(self, update: Update, forgotten: Sequence[str]) -> Sent:
        """Broadcast the weights to the engines of an update; those `forgotten` have failed before."""
        assert isinstance(self.sender, BroadcastSender)
        self.sender.forget(forgotten)
        return self.sender.send(self._selected(update.selection), update)

    def _selected(self, selection: Selection) -> WeightSource:
        source: WeightSource = self.policy if selection == "merged" else self.policy.selected(selection)
        return source

    def share_weights(self, update: Update | None) -> SharedBucket | None:
        """The next bucket of an update in shared memory, where it stays until the next call; None frees the last."""
        found = self._share_weights(update)
        return next((bucket for bucket in found if bucket and bucket.handles), found[0])

    @gathered
    def _share_weights(self, update: Update | None) -> SharedBucket | None:
        assert isinstance(self.sender, SharedMemorySender)
        return self.sender.share(self.policy, update)

    def hold(self, held: Held) -> None:
        """With `rollout.offload_trainer`: what of the models is on the device until the next call."""
        raise NotImplementedError

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face checkpoint. Raises InputError if writing fails."""
        raise NotImplementedError

    def logprobs(self, tokens: TokenIds) -> LogProbs:
        """The log-probs [L - 1] of all tokens but the first with the current weights."""
        raise NotImplementedError


class BroadcastSender:
    """Gathers, encodes and broadcasts this process's part of the weights; calls no engine. With NCCL on GPUs and gloo
    on the CPU."""

    def __init__(
        self, processes: Processes, config: WeightSyncConfig, *, towards: str = "127.0.0.1", dtype: str = "fp32"
    ) -> None:
        """Collective. Engines reach the trainer at its address on the route to the host `towards`. `dtype` is the
        engines': fp32, bf16 or fp8."""
        self._processes = processes
        self._bucket_bytes = config.bucket_bytes
        self._encodings = Encodings(config)
        self._is_fp8 = dtype == "fp8"
        address, timeout_s = local_address(towards), config.timeout_s
        # It serves other processes as long as it is referenced.
        self._own_store = store = open_store(address, timeout_s)
        listening: list[Any] = [None] * processes.world_size
        dist.all_gather_object(listening, (address, store.port), group=processes.control)
        if processes.rank > 0:
            store = connect_store(listening[0][0], listening[0][1], timeout_s)
        self.places = SenderPlaces(
            tuple(listening),
            tuple(tuple(processes.of_replica(replica)) for replica in range(processes.data_size)),
            "nccl" if processes.device.type == "cuda" else "gloo",
        )
        self._ranks = processes.of_replica(processes.data_rank)
        self._number = self._ranks.index(processes.rank)
        self._store = store
        self._listening = listening[processes.rank]
        self._timeout_s = timeout_s
        self._groups: dict[str, EngineGroup] = {}
        self._abandoned: list[threading.Thread] = []
        self._bytes_made = self._bytes_sent = 0

    def plan(self, policy: WeightSource, *, have_plugin: bool) -> list[list[PlannedBucket]]:
        """What engines are told of the buckets of each round."""
        encoding = self._encodings.of(have_plugin=have_plugin)
        rounds = policy.weight_plan(self._bucket_bytes)
        return [[encoding.planned(bucket) for bucket in self._prepared(buckets)] for buckets in rounds]

    def send(self, policy: WeightSource, update: Update) -> Sent:
        """Collective: send this process's bucket of each round to its engines."""
        routes = [route for route in update.routes if route.replica == self._processes.data_rank]
        encoding = self._encodings.choose(update, any(route.joins for route in routes))
        replicas = sorted({route.replica for route in update.routes})
        buckets = self._prepared(policy.weights(self._bucket_bytes, "senders", replicas))
        news = UpdateNews(self._store, update.number)
        self._bytes_made = self._bytes_sent = 0
        self.forget(route.url for route in update.routes if route.joins)
        self._join({route.url: route for route in routes if route.joins}, news)
        routes.sort(key=lambda route: steps_to(route.turn, len(self._ranks), self._number))
        for round_, bucket in enumerate(buckets):
            if bucket.tensors is not None:
                self._broadcast([route.url for route in routes], encoding.encode(bucket), news, round_)
            news.report(self._processes.rank, round_)
            del bucket  # Free its memory before the next but one is gathered.
        # What all processes have sent.
        processes, counted = self._processes, self._encodings.take_counts()
        counts = torch.zeros(processes.world_size, 4, dtype=torch.int64)
        counts[processes.rank] = torch.tensor([self._bytes_made, self._bytes_sent, *counted])
        dist.all_reduce(counts, group=processes.control)
        made, sent, compared, changed = counts.T
        metrics = {"weight_sync/sender_balance": float(sent.max() / sent.double().mean())} if sent.any() else {}
        if compared.any():
            metrics["weight_sync/changed_share"] = int(changed.sum()) / int(compared.sum())
        of_replicas = [int(made[processes.of_replica(replica)].sum()) for replica in range(processes.data_size)]
        return Sent(max(of_replicas), metrics)

    def _prepared(self, buckets: Iterable[WeightBucket]) -> Iterable[WeightBucket]:
        return map(quantised_bucket, buckets) if self._is_fp8 else buckets

    def _join(self, routes: Mapping[str, EngineRoute], news: UpdateNews) -> None:
        """Join the groups with new engines in parallel. Engines that do not come in time get no group."""
        if not routes:
            return

        def create(route: EngineRoute) -> EngineGroup:
            # One connection per thread: a store blocks while it waits.
            store = connect_store(self._listening[0], self._listening[1], self._timeout_s)
            name = group_with(route.group, self._number)
            return join_group(store, name, route.size, self._processes.device, self._listening[0], self._timeout_s)

        executor = ThreadPoolExecutor(len(routes))
        joining = {url: executor.submit(create, route) for url, route in routes.items()}
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline and not all(f.done() or url in news.failed for url, f in joining.items()):
            wait(joining.values(), _FAILURE_POLL_S)
            news.read_failed()
        executor.shutdown(wait=False)
        for url, future in joining.items():
            if future.done() and not future.exception():
                self._groups[url] = future.result()

    def _broadcast(self, urls: Sequence[str], chunks: Iterable[Tensor], news: UpdateNews, round_: int) -> None:
        """Broadcast the round's bucket to these engines in their order, and wait until each has it or has failed.

        As many get it at once as there are engines for each sender: those that met here would share its rate and go on
        together, while other senders are idle. All of one engine's broadcasts begin before those of the engine that
        comes next: with NCCL a broadcast may have to wait for those begun before.
        """
        remaining = iter(chunks)
        made: list[Tensor] = []
        works: dict[str, list[dist.Work]] = {}
        queued = deque(url for url in urls if url in self._groups)
        awaited = deque[str]()
        # An engine that is in no group with this process can get no weights, which the others must learn.
        unreachable = [url for url in urls if url not in self._groups]
        num_at_once = math.ceil(len(urls) / len(self._ranks))
        news.read_failed()
        looked = reported = time.monotonic()
        while True:
            if queued:
                awaited = deque(url for url in awaited if self._takes(url, works, news))
            while queued and len(awaited) < num_at_once:
                url = queued.popleft()
                if url in news.failed:
                    self._give_up(url, [])
                    continue
                works[url] = [self._groups[url].broadcast(chunk, 0) for chunk in made]
                for chunk in remaining:
                    made.append(chunk)
                    works[url].append(self._groups[url].broadcast(chunk, 0))
                awaited.append(url)
            while awaited and not self._takes(awaited[0], works, news):
                awaited.popleft()
            if not (queued or awaited or unreachable):
                break
            now = time.monotonic()
            if now - looked > _FAILURE_POLL_S:
                looked = now
                news.read_failed()
                # Whatever it took: rank 0 does not wait for it any more.
                unreachable = [u for u in unreachable if not (u in news.failed or news.has_acknowledged(u))]
            if now - reported > self._timeout_s / _REPORTS_PER_LIMIT:
                reported = now
                waiting = [url for url in awaited if self._takes(url, works, news)] + unreachable
                news.report(self._processes.rank, round_, waiting, list(queued))
            time.sleep(_POLL_S)
        size = sum(chunk.nbytes for chunk in made)
        self._bytes_made += size
        self._bytes_sent += size * len(works)
        for url, each in works.items():
            if url in news.failed or not _have_succeeded(each):
                self._give_up(url, each)

    def _takes(self, url: str, works: Mapping[str, Sequence[dist.Work]], news: UpdateNews) -> bool:
        """Whether the engine still takes what was begun for it."""
        return url not in news.failed and not _are_completed(works[url])

    def _give_up(self, url: str, works: Sequence[dist.Work]) -> None:
        group = self._groups.pop(url)
        group.abort()
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        self._abandoned.append(threading.Thread(target=_outlive, args=(group, works), daemon=True))
        self._abandoned[-1].start()

    def forget(self, urls: Iterable[str]) -> None:
        """Leave the groups with these engines."""
        for url in urls:
            self._groups.pop(url, None)

    def close(self) -> None:
        """Leave all groups, once gloo has given up the broadcasts that no engine takes."""
        self._groups.clear()
        for thread in self._abandoned:
            thread.join()


def _outlive(group: EngineGroup, works: Sequence[dist.Work]) -> None:
    """Keep group and broadcasts until these end, as gloo cannot be interrupted. Then the connection closes, which tells
    the engine that nothing more comes."""
    while not _are_completed(works):
        time.sleep(_FAILURE_POLL_S)


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
