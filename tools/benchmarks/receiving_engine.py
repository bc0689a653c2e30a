"""An engine's HTTP interface that only receives weights: a light process for `benchmark senders`."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from aiohttp import web

from dapo_mega.distributed.stores import connect_store
from dapo_mega.engines.sglang.weight_protocol import EngineGroup, PlanFormat, UpdatePlan, group_with, join_group
from dapo_mega.sglang_plugin.receiving import ArrivingWeights

PORT = 30000
TIMEOUT_S = 120.0
CPU = torch.device("cpu")


def cpu_s() -> float:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def value_of(name: str, version: int) -> int:
    """What all values of the tensor are in this version."""
    return (31 * int(name) + 7 * version) % 251


class ReceivingEngine:
    """Receives weights with the plugin's code and compares them with what they should be."""

    def __init__(self, address: str) -> None:
        torch.set_num_threads(1)
        self._address = address
        self._groups: dict[str, EngineGroup] = {}
        self._plans: dict[str, UpdatePlan] = {}
        self._received: dict[str, int] = {}
        self._wrong: list[str] = []
        self._thread = ThreadPoolExecutor(1)

    def serve(self) -> None:
        """Until the process is ended."""
        app = web.Application(client_max_size=2**26)
        for path, handle in {
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/init_weights_update_group": self._join,
            "/update_weights_from_distributed": self._receive,
            "/cpu_s": lambda body: {"seconds": cpu_s()},
        }.items():
            app.router.add_post(path, self._answering(handle))
        web.run_app(app, host=self._address, port=PORT, print=None)

    def _answering(self, handle: Callable[[Any], dict[str, Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            loop = asyncio.get_running_loop()
            try:
                answer = await loop.run_in_executor(self._thread, handle, body)
            except RuntimeError as error:
                answer = {"success": False, "message": str(error)}
            return web.json_response({"success": True, **answer})

        return answer

    def _begin(self, body: Any) -> dict[str, Any]:
        self._received, self._wrong = {}, []
        return {}

    def _end(self, body: Any) -> dict[str, Any]:
        """All tensors are of one version."""
        versions = {(value - value_of(name, 0)) % 251 for name, value in self._received.items()}
        is_right = len(versions) == 1 and not self._wrong
        return {"success": is_right, "message": f"wrong: {self._wrong}, {len(versions)} versions"}

    def _join(self, body: Any) -> dict[str, Any]:
        name, rank = body["group_name"], body["rank_offset"]
        store = connect_store(body["master_address"], body["master_port"], TIMEOUT_S)
        self._groups[name] = join_group(store, name, body["world_size"], CPU, self._address, TIMEOUT_S, rank=rank)
        return {}

    def _receive(self, body: Any) -> dict[str, Any]:
        call = PlanFormat.parse(body["load_format"])
        assert call
        if call.text:
            self._plans[call.digest] = UpdatePlan.parse(call.text)
        plan = self._plans[call.digest]
        for bucket in plan.in_turn(call.turn):
            group = self._groups[group_with(body["group_name"], bucket.sender)]
            for name, tensor in ArrivingWeights(group, "cpu", bucket, plan.window_bytes):
                self._received[name] = int(tensor[0])
                if not bool((tensor == tensor[0]).all()):
                    self._wrong.append(name)
        return {}
