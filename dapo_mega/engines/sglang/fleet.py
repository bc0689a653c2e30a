"""The fleet of SGLang engines on every rank of the trainer: rank 0 gives commands, the other ranks follow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from dapo_mega.distributed.processes import Processes
from dapo_mega.engines.protocol import ReservedAnswers, RolloutFleet
from dapo_mega.engines.sglang.fleet_client import FleetClient
from dapo_mega.metrics.timeline import Load
from dapo_mega.types import Answer, GenerationRequest

_POLL_S = 0.5


class SglangFleet(RolloutFleet):
    """SGLang servers behind one `FleetClient`.

    Engines that join or come back while rank 0 waits for answers get the current weights at once. The other ranks wait
    in `serve` to take part in such updates.
    """

    def __init__(self, processes: Processes, client: FleetClient | None) -> None:
        """`client` is given on rank 0 only."""
        assert (client is not None) == (processes.rank == 0)
        self._processes = processes
        self._client = client
        # Answers are read by the thread that feeds the engines and by an evaluation: each finds the other's.
        self._lock = threading.Lock()
        self._set_aside: deque[Answer] = deque()
        self._wanted: set[int] = set()
        self._found: dict[int, Answer] = {}
        self._others_left = False
        self._update_outdated_engines: Callable[[], object] = lambda: None

    @property
    def client(self) -> FleetClient:
        assert self._client
        return self._client

    def on_outdated_engines(self, update: Callable[[], object]) -> None:
        """See `RolloutFleet`."""
        self._update_outdated_engines = update

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start the requests and return at once; rank 0 only."""
        self.client.submit(requests)

    def next_answer(self) -> Answer:
        """Wait for the next answer; rank 0 only.

        Raises FleetError when too few engines are reachable for longer than `rollout.fleet.wait_limit_s`.
        """
        return self._set_aside.popleft() if self._set_aside else self._wait()

    def poll_answer(self) -> Answer | None:
        """The next answer if one is ready, else None; rank 0 only, also in another thread while `generate` waits."""
        with self._lock:
            while not self._set_aside and (answer := self.client.next_answer(0)):
                self._sort(answer)
            return self._set_aside.popleft() if self._set_aside else None

    def _sort(self, answer: Answer) -> None:
        """Keep the answer for the one who asked."""
        if answer.request_id in self._wanted:
            self._found[answer.request_id] = answer
        else:
            self._set_aside.append(answer)

    def oldest_versions(self, request_ids: Sequence[int]) -> dict[int, int]:
        """See `RolloutEngine`; rank 0 only."""
        return self.client.oldest_versions(request_ids)

    def _wait(self) -> Answer:
        while True:
            if answer := self._next_of_anyone():
                return answer

    def _next_of_anyone(self) -> Answer | None:
        """The next answer that comes within a moment; engines that have joined get the weights first."""
        self.client.wait_for_engines()
        if self.client.has_outdated():
            self._command("update")
            self._update()
        return self.client.next_answer(_POLL_S)

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Give up requests in flight; rank 0 only."""
        self.client.cancel(request_ids)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Answer every request, in the order given; rank 0 only. Answers to other requests wait for `next_answer` or
        `poll_answer`."""
        with self._lock:
            self._wanted, self._found = {request.request_id for request in requests}, {}
        self.submit(requests)
        try:
            while len(self._found) < len(self._wanted):
                if answer := self._next_of_anyone():
                    with self._lock:
                        self._sort(answer)
            return [self._found[request.request_id] for request in requests]
        finally:
            with self._lock:
                self._wanted, self._found = set(), {}

    def generate_reserved(
        self, requests: Sequence[GenerationRequest], *, version: int, num_engines: int | None, limit_s: float
    ) -> Future[ReservedAnswers]:
        """See `FleetClient`; rank 0 only."""
        return self.client.generate_reserved(requests, version=version, num_engines=num_engines, limit_s=limit_s)

    def serve(self) -> None:
        """Take part in updates until rank 0 calls `end_serving`; on the other ranks only."""
        while self._command(None) == "update":
            self._update_outdated_engines()

    def end_serving(self) -> None:
        """Make the other ranks return from `serve`; rank 0 only."""
        if not self._others_left:
            self._command("release")

    def _update(self) -> None:
        # An error is raised on all ranks, so after it the others have left `serve`.
        self._others_left = True
        self._update_outdated_engines()
        self._others_left = False

    def sleep(self) -> None:
        """Free the memory of colocated engines for the policy until the next update; rank 0 only."""
        self.client.sleep()

    def pop_metrics(self) -> dict[str, float]:
        """Counters since the last call; rank 0 only."""
        return self.client.pop_metrics()

    def pop_loads(self) -> Mapping[str, Sequence[Load]]:
        """See `RolloutFleet`."""
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
