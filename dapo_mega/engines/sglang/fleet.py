"""The fleet of SGLang engines on every rank of the trainer: rank 0 gives commands, the other ranks follow."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import torch.distributed as dist

from dapo_mega.distributed.processes import Processes
from dapo_mega.engines.protocol import Generation, ReservedEngines, RolloutFleet
from dapo_mega.engines.sglang.fleet_client import FleetClient
from dapo_mega.metrics.timeline import Load
from dapo_mega.types import GenerationRequest

T = TypeVar("T")


class SglangFleet(RolloutFleet):
    """SGLang servers behind one `FleetClient`.

    Engines that join or come back during `run` get the current weights at once. The other ranks wait in `serve` to take
    part in such updates.
    """

    def __init__(self, processes: Processes, client: FleetClient | None) -> None:
        """`client` is given on rank 0 only."""
        assert (client is not None) == (processes.rank == 0)
        self._processes = processes
        self._client = client
        self._others_left = False
        self._update_outdated_engines: Callable[[], object] = lambda: None

    @property
    def client(self) -> FleetClient:
        assert self._client
        return self._client

    def on_outdated_engines(self, update: Callable[[], object]) -> None:
        self._update_outdated_engines = update

    def generate(self, request: GenerationRequest) -> Generation:
        """See `RolloutEngine`; rank 0 only."""
        return self.client.generate(request)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.client.run(work, self._tend_engines)

    def _tend_engines(self) -> None:
        """Wait for enough engines; those that have joined get the weights."""
        self.client.wait_for_engines()
        if self.client.has_outdated():
            self._command("update")
            # An error is raised on all ranks, so after it the others have left `serve`.
            self._others_left = True
            self._update_outdated_engines()
            self._others_left = False

    def call(self, function: Callable[[], T]) -> T:
        return self.client.call_on_loop(function)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return self.client.start(work)

    def reserved(
        self, *, version: int, num_engines: int | None, limit_s: float
    ) -> AbstractAsyncContextManager[ReservedEngines]:
        return self.client.reserved(version=version, num_engines=num_engines, limit_s=limit_s)

    def serve(self) -> None:
        """Take part in updates until rank 0 calls `end_serving`; on the other ranks only."""
        while self._command(None) == "update":
            self._update_outdated_engines()

    def end_serving(self) -> None:
        """Make the other ranks return from `serve`; rank 0 only."""
        if not self._others_left:
            self._command("release")

    def sleep(self) -> None:
        """Free the memory of colocated engines for the policy until the next update; rank 0 only."""
        self.client.sleep()

    def pop_metrics(self) -> dict[str, float]:
        """Counters since the last call; rank 0 only."""
        return self.client.pop_metrics()

    def pop_loads(self) -> Mapping[str, Sequence[Load]]:
        return self.client.pop_loads()

    def close(self) -> None:
        """Disconnect from the engines, which keep running for the next run."""
        if self._client:
            self._client.close()

    def _command(self, command: str | None) -> str:
        """The command that rank 0 gives."""
        box: list[Any] = [command]
        dist.broadcast_object_list(box, src=0, group=self._processes.control)
        received: str = box[0]
        return received
