"""One update of the weights of a fleet: which engines take part, and which have dropped out."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.types import WeightSource

if TYPE_CHECKING:
    from dapo_mega.engines.sglang.fleet_client import SyncTarget

T = TypeVar("T")


class EngineFleet(Protocol):
    """The part of a fleet's client that rank 0 needs to update the engines."""

    def targets(self, only_outdated: bool) -> list[SyncTarget]:
        """Wait for enough engines and return those to update; raises FleetError when they do not come."""

    def start_call(
        self, targets: Sequence[SyncTarget], method: Callable[[EngineClient], Awaitable[T]], timeout_s: float
    ) -> Future[dict[str, T | EngineError]]:
        """Start a call on all targets; the future gives each URL's result or error within the time limit."""

    def pause_generation(self, targets: Sequence[SyncTarget]) -> list[SyncTarget]:
        """Pause generation on the targets as configured; returns those that are still reachable."""

    def resume_generation(self, targets: Sequence[SyncTarget]) -> None:
        """Undo `pause_generation`."""

    def synced(self, url: str, version: int) -> None:
        """The engine holds these weights now."""

    def failed(self, url: str, reason: str) -> None:
        """The engine did not take the weights."""

    def disagrees(self, url: str, reason: str) -> None:
        """The engine took the weights but does not compute what the trainer does."""


@dataclass(frozen=True)
class Update:
    """One update, known to every process from its start.

    `number` is unique within a run. `label` is the name of `version` that engines report with their tokens. `stale` has
    the URLs of engines that joined or came back since the last update.
    """

    number: int
    version: int
    label: str
    targets: tuple[SyncTarget, ...]
    stale: frozenset[str]
    flush_cache: bool


class UpdateCalls:
    """Rank 0's calls to the engines of one update. An engine that fails one drops out, and the others go on."""

    def __init__(
        self, fleet: EngineFleet, targets: Sequence[SyncTarget], timeout_s: float, on_failure: Callable[[str], None]
    ) -> None:
        """`on_failure` gets an engine's URL as soon as a call fails, on the thread that makes the calls."""
        self.targets = list(targets)
        self.failures: dict[str, str] = {}
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._unanswered: deque[Future[dict[str, Any]]] = deque()

    def start(self, method: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Start a call on all engines that are left."""

        async def reporting(client: EngineClient) -> None:
            try:
                await method(client)
            except EngineError:
                self._on_failure(client.url)
                raise

        self._unanswered.append(self._fleet.start_call(self.targets, reporting, self._timeout_s))

    def finish(self, all_but: int = 0) -> None:
        """Wait for all engines' answers to the started calls, except to the last `all_but` of them."""
        while len(self._unanswered) > all_but:
            for url, result in self._unanswered.popleft().result().items():
                if isinstance(result, EngineError):
                    self.failures.setdefault(url, result.reason)
        self.targets = [target for target in self.targets if target.url not in self.failures]

    def call(self, method: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Make a call on all engines that are left, and wait for their answers."""
        self.start(method)
        self.finish()


class Transport:
    """Brings the weights to the engines of an update. Used on every process."""

    uses_sessions = True
    """Whether an engine takes the weights between begin_weight_update and end_weight_update."""

    def send(self, policy: WeightSource, update: Update, session: UpdateCalls | None) -> int:
        """Collective; returns the size of the weights in bytes. `session` is given on rank 0 only."""
        raise NotImplementedError

    def report_failure(self, url: str) -> None:
        """A call to the engine failed during an update. Called on rank 0, from any thread; by default ignored."""

    def forget(self, urls: Sequence[str]) -> None:
        """Free what is shared with engines that failed; by default nothing is."""

    def close(self) -> None:
        """Free what is shared with all engines; by default nothing is."""
