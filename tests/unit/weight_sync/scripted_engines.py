"""A fleet of engines in threads of this process, which receive weights as SGLang does; with faults by script."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch
from safetensors.torch import load_file

from dapo_mega.distributed.stores import connect_store
from dapo_mega.engines.sglang.engine_client import EngineDisconnected, EngineError, EngineRefused, EngineTimeout
from dapo_mega.engines.sglang.event_loop import LoopThread
from dapo_mega.engines.sglang.weight_protocol import (
    ADAPTER,
    PlanFormat,
    PlannedBucket,
    UpdatePlan,
    group_with,
    join_group,
    limit_of_group,
)
from dapo_mega.sglang_plugin.receiving import ArrivingWeights, ChangedWeights
from dapo_mega.types import WeightSpec

_READER = """
import base64, pickle, sys, torch.multiprocessing
torch.multiprocessing.set_sharing_strategy("file_system")
named_tensors = pickle.loads(base64.b64decode(sys.stdin.read()))
torch.save({name: tensor.clone() for name, tensor in named_tensors}, sys.stdout.buffer)
"""


class OneSenderPerStage:
    """A policy that has `buckets`, on a trainer of one process per pipeline stage."""

    def weight_plan(self, bucket_bytes):
        stages = {}
        for bucket in self.buckets():
            stages.setdefault(bucket.stage, []).append(replace(bucket, tensors=None, sender=bucket.stage))
        return [[bucket for bucket in buckets if bucket] for buckets in zip_longest(*stages.values())]

    def weights(self, bucket_bytes, to="leaders", replicas=None):
        assert list(replicas) == [0]
        if to == "stage_leaders":
            yield from self.buckets()
            return
        mine = deque(bucket for bucket in self.buckets() if bucket.tensors is not None)
        for buckets in self.weight_plan(bucket_bytes):
            is_mine = mine and any(bucket.specs == mine[0].specs for bucket in buckets)
            yield mine.popleft() if is_mine else buckets[0]


@dataclass(frozen=True)
class Target:
    url: str
    tp_size: int = 1
    is_outdated: bool = False
    has_plugin: bool = False


class ScriptedEngine:
    """`faults` map the name of a call, or ("update", n) for the n-th bucket of an update, to what goes wrong in it:
    `die`, `hang`, `silence` or `refuse`, or `refuse twice`, again when it is called again."""

    def __init__(self, url, timeout_s, tp_size=1):
        self.url = url
        self.tp_size = tp_size
        self.faults = {}
        self.is_dead = False
        self.rank_weights = [{} for _ in range(tp_size)]
        self.weights = self.rank_weights[0]
        self.versions = []
        self.calls = []
        self.chunk_lengths = []
        self.plans = {}
        self.plan_calls = []
        self.groups = {}  # Those of the first rank.
        self.other_groups = {}  # Name -> those of the other ranks.
        self.is_open = False
        self.num_buckets = 0
        self.load_s = 0.0  # Per tensor.
        self.refuses_what_came = False  # At the next end of a session.
        self.says_version = None  # Instead of the one that it was given.
        self.scores = []
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(tp_size)

    async def _meet(self, call):
        self.calls.append(call)
        fault = "die" if self.is_dead else self.faults.pop(call, None)
        if fault == "die":
            raise EngineDisconnected(self.url, f"{call}: connection reset")
        if fault == "refuse twice":
            self.faults[call] = "refuse"
        if fault in ("refuse", "refuse twice"):
            raise EngineRefused(self.url, 400, f"{call}: no")
        if fault == "hang":
            # Whoever waits for a limit lets the load of the machine decide what is slow.
            raise EngineTimeout(self.url, f"{call}: not answered within {self._timeout_s:g} s")
        if fault == "silence":
            await asyncio.sleep(3600)

    async def _in_thread(self, function, *arguments):
        await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def disconnect(self):
        """Leave all groups, so that nobody waits for what this engine does not do."""
        self.groups.clear()
        self.other_groups.clear()

    async def generate(self, payload, timeout_s):
        await self._meet("score")
        assert (payload["logprob_start_len"], payload["return_logprob"]) == (0, True)
        version = self.says_version or self.versions[-1][0]
        triples = [[p, i, None] for p, i in zip([None, *self.scores], payload["input_ids"], strict=True)]
        return {"output_ids": [1], "meta_info": {"weight_version": version, "input_token_logprobs": triples}}

    async def command(self, call, timeout_s=None, **fields):
        await getattr(self, call)(**fields)

    async def begin_weight_update(self):
        await self._meet("begin")
        if self.is_open:
            raise EngineRefused(self.url, 400, "a session is open already")
        self.is_open, self.num_buckets = True, 0

    async def end_weight_update(self):
        await self._meet("end")
        self.is_open = False
        if self.refuses_what_came:
            self.refuses_what_came = False
            raise EngineRefused(self.url, 400, "not all weights came")

    async def add_adapter(self, name, config, tp_size):
        await self._meet("adapter")
        assert (name, tp_size) == (ADAPTER, self.tp_size)

    async def init_weights_update_group(
        self, *, master_address, master_port, rank_offset, world_size, group_name, backend
    ):
        await self._meet("init")
        assert (world_size, backend, rank_offset) == (1 + self.tp_size, "gloo", 1)
        assert 0 < limit_of_group(group_name) < self._timeout_s
        await self._in_thread(self._join, master_address, master_port, group_name)

    def _join(self, address, port, name):
        def join(rank):
            store = connect_store(address, port, self._timeout_s)
            size = 1 + self.tp_size
            return join_group(store, name, size, torch.device("cpu"), address, self._timeout_s, rank=rank)

        with ThreadPoolExecutor(self.tp_size) as ranks:
            self.groups[name], *self.other_groups[name] = ranks.map(join, range(1, 1 + self.tp_size))

    async def destroy_weights_update_group(self, *, group_name):
        await self._meet("destroy")
        if group_name not in self.groups:
            raise EngineRefused(self.url, 400, f"no group {group_name}")
        del self.groups[group_name], self.other_groups[group_name]

    async def update_weights_from_distributed(
        self, *, names, dtypes, shapes, group_name, weight_version, flush_cache, load_format
    ):
        if call := PlanFormat.parse(load_format):
            self.plan_calls.append(call)
            if call.text:
                self.plans = {call.digest: UpdatePlan.parse(call.text)}
            for bucket in self.plans[call.digest].in_turn(call.turn):
                await self._take(group_with(group_name, bucket.sender), bucket)
        else:
            assert load_format == "flattened_bucket"
            specs = tuple(
                WeightSpec(name, getattr(torch, dtype), tuple(shape))
                for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
            )
            await self._take(group_name, PlannedBucket(0, specs, (len(specs),)))
        if "acknowledge" in self.faults:
            await self._meet("acknowledge")
        self.versions.append((weight_version, flush_cache))

    async def _take(self, group_name, bucket):
        self.num_buckets += 1
        await self._meet(("update", self.num_buckets))
        group = self.groups.get(group_name)
        if not self.is_open or not group:
            raise EngineRefused(self.url, 400, "no session, or no such group")
        self.chunk_lengths.append(bucket.lengths)
        try:
            groups = [group, *self.other_groups.get(group_name, [])]
            receive = partial(self._in_thread, self._receive, bucket)
            await asyncio.gather(*map(receive, groups, self.rank_weights))
        except RuntimeError as error:
            raise EngineRefused(self.url, 400, f"Failed to update parameter online: {error}") from error

    async def update_weights_from_tensor(self, *, serialized_named_tensors, weight_version, flush_cache):
        await self._meet("tensor")
        assert self.is_open
        (handle,) = serialized_named_tensors
        # An engine is a process of its own: within one, memory is the same whether it is shared or not.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _READER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate(handle.encode())
        self.weights |= torch.load(io.BytesIO(output))
        self.versions.append((weight_version, flush_cache))

    async def update_weights_from_disk(self, *, model_path, weight_version, flush_cache):
        await self._meet("disk")
        assert not self.is_open
        self.weights = load_file(f"{model_path}/model.safetensors")
        self.versions.append((weight_version, flush_cache))

    def _receive(self, bucket, group, weights):
        if not bucket.lengths:
            changes = ChangedWeights(group, "cpu", bucket.specs)
            for spec, (name, tensor) in zip(bucket.specs, changes, strict=True):
                weights.setdefault(name, torch.empty(spec.shape, dtype=spec.dtype)).copy_(tensor)
            assert not changes.faults(changes.written())
            return
        for name, tensor in ArrivingWeights(group, "cpu", bucket, window_bytes=0):
            weights[name] = tensor.clone()
            time.sleep(self.load_s)


class ScriptedFleet:
    """Engines that fail are outdated until `return_all`."""

    def __init__(self, num_engines, timeout_s):
        self.engines = {url: ScriptedEngine(url, timeout_s) for url in (f"http://e{i}" for i in range(num_engines))}
        self.outdated = set(self.engines)
        self.without_plugin = set(self.engines)
        self.away = {}
        self.disagreeing = {}
        self.synced_versions = {}
        self.held = []
        self.released = []
        self.turns = []
        self._thread = LoopThread("scripted-fleet")

    def targets(self, only_outdated):
        present = [
            Target(
                url,
                self.engines[url].tp_size,
                is_outdated=url in self.outdated,
                has_plugin=url not in self.without_plugin,
            )
            for url in self.engines
            if url not in self.away
        ]
        return [target for target in present if target.is_outdated or not only_outdated]

    def start_call(self, targets, method, timeout_s):
        async def one(url):
            try:
                async with asyncio.timeout(timeout_s):
                    return await method(self.engines[url])
            except EngineError as error:
                return error
            except TimeoutError:
                return EngineError(url, f"no answer within {timeout_s:g} s")

        async def call():
            urls = [target.url for target in targets]
            return dict(zip(urls, await asyncio.gather(*map(one, urls)), strict=True))

        return self._thread.start(call())

    def is_serving(self):
        return len(self.outdated | set(self.away)) < len(self.engines)

    def sleep(self):
        self.turns.append("sleep")

    def pause_generation(self, targets):
        self.turns.append("pause")
        self.held.append([target.url for target in targets])
        return targets

    def resume_generation(self, targets):
        self.turns.append("resume")
        self.released.append([target.url for target in targets])

    def synced(self, url, version):
        self.outdated.discard(url)
        self.synced_versions[url] = version

    def failed(self, url, reason):
        self.away[url] = reason

    def disagrees(self, url, reason):
        self.away[url] = self.disagreeing[url] = reason

    def return_all(self):
        self.outdated |= set(self.away)
        self.away.clear()

    def disconnect(self):
        """Before the trainer frees its groups."""
        for engine in self.engines.values():
            engine.disconnect()

    def close(self):
        self.disconnect()
        self._thread.close()
