"""What brings weights to engines, as the loop sees it; and one update of a fleet: the engines that take part, the calls
to them, and their failures."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.types import Selection

if TYPE_CHECKING:
    from dapo_mega.engines.sglang.fleet_client import FleetClient, SyncTarget


class WeightSync(ABC):
    """Sends the policy's weights to the engines under a version; a run starts with version 0. On rank 0."""

    @abstractmethod
    def push(self, version: int) -> dict[str, float]:
        """Returns metrics once the engines sample from the new weights."""

    def push_to_outdated(self, version: int) -> dict[str, float]:
        """`push` to the engines that joined or came back since the last one; the others keep generating. Does nothing
        where engines never leave."""
        return {}

    def reopen(self) -> None:  # noqa: B027 (a default)
        """Another trainer sends from now on."""


class EmbeddedWeightSync(WeightSync):
    """Of engines inside the trainer's processes."""

    def __init__(self, load: Callable[[int], None]) -> None:
        """`load(version)` gives them the weights."""
        self._load = load

    def push(self, version: int) -> dict[str, float]:
        started = time.perf_counter()
        self._load(version)
        return {"time/weight_sync_s": time.perf_counter() - started}


@dataclass(frozen=True)
class EngineRoute:
    """How an engine gets weights by broadcast: as number `turn` of the engines of `replica`, by each of whose processes
    it is in a group of `size` members. `group` begins the groups' names; `joins`: they are made in this update."""

    url: str
    replica: int
    turn: int
    group: str
    size: int
    joins: bool


@dataclass(frozen=True)
class Update:
    """One update; every rank has the same.

    `number` is unique within a run. `label` names `version` in the engines' answers. `outdated` has the URLs of engines
    that joined or came back since the last update. `routes` are the transport's, of the engines with open sessions.
    `selection` is what they get.
    """

    number: int
    version: int
    label: str
    targets: tuple[SyncTarget, ...]
    outdated: frozenset[str]
    flush_cache: bool
    routes: tuple[EngineRoute, ...] = ()
    selection: Selection = "merged"

    @property
    def have_plugin(self) -> bool:
        """Whether all of the engines have `dapo_mega.sglang_plugin`."""
        return all(target.has_plugin for target in self.targets)


class UpdateCalls:
    """The calls to the engines of one update. An engine whose call fails is left out of the next calls."""

    def __init__(
        self, fleet: FleetClient, targets: Sequence[SyncTarget], timeout_s: float, on_failure: Callable[[str], None]
    ) -> None:
        """`on_failure(url)` is called as soon as a call fails, in the thread that makes the calls."""
        self.targets = list(targets)
        self.failures: dict[str, str] = {}
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._unanswered: list[Future[dict[str, Any]]] = []

    def start(self, method: Callable[[EngineClient], Awaitable[None]], num_parts: int = 1) -> None:
        """Start a call on all remaining engines. It may take the time limit of so many parts of an update."""

        async def reporting(client: EngineClient) -> None:
            try:
                await method(client)
            except (EngineError, CancelledError):
                self._on_failure(client.url)
                raise

        self._unanswered.append(self._fleet.start_call(self.targets, reporting, num_parts * self._timeout_s))

    def finish(self) -> None:
        """Wait for all engines' answers to the started calls."""
        while self._unanswered:
            for url, result in self._unanswered.pop(0).result().items():
                if isinstance(result, EngineError):
                    self.failures.setdefault(url, result.reason)
        self.targets = [target for target in self.targets if target.url not in self.failures]

    def cancel(self) -> None:
        """Give up the started calls, of which nobody needs to hear."""
        self._on_failure = lambda url: None
        for future in self._unanswered:
            future.cancel()

    def call(self, method: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Make a call on all remaining engines, and wait for their answers."""
        self.start(method)
        self.finish()


@dataclass(frozen=True)
class Sent:
    """What an update sent: the size of the weights in bytes as an engine gets them, and metrics of the transport."""

    num_bytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SenderPlaces:
    """Where the trainer's processes send from: by rank, the address and port at which engines meet them; the ranks of
    each replica; and the backend of the groups with engines."""

    listening: tuple[tuple[str, int], ...]
    replicas: tuple[tuple[int, ...], ...]
    backend: str


@dataclass(frozen=True)
class SharedBucket:
    """A bucket in memory that engines of the machine can map: for each of an engine's ranks a handle, by URL."""

    handles: Mapping[str, Sequence[str]]
    num_bytes: int
    is_last: bool


class Transport:
    """Brings the trainer's weights to the engines of an update. Used by the process that commands."""

    uses_sessions = True
    """Whether the engines get the weights between begin_weight_update and end_weight_update."""

    def routes(self, number: int, targets: Sequence[SyncTarget], outdated: Collection[str]) -> tuple[EngineRoute, ...]:
        """The routes of update `number` to these engines, for transports that need them."""
        return ()

    def bring(self, update: Update, calls: UpdateCalls, forgotten: Sequence[str]) -> Sent:
        """Have the trainer send, and the engines receive. The URLs `forgotten` are of engines that failed before."""
        raise NotImplementedError

    def report_failure(self, url: str) -> None:
        """Handle a failed call to the engine during an update; does nothing by default. From any thread."""
