"""Starts, announces, restarts and ends the SGLang engines of one node."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dapo_mega.distributed.programs import ProcessGroup, last_line
from dapo_mega.engines.sglang.engine_commands import (
    Node,
    command,
    environment,
    router_command,
    router_environment,
    store_variables,
)
from dapo_mega.engines.sglang.registry import Registration, announce
from dapo_mega.errors import FleetError

_TICK_S = 0.2
_ANNOUNCE_EVERY_S = 5.0
_PROBE_LIMIT_S = 5.0
_WATCH_EVERY_S = 5.0
_LONGEST_BACK_OFF_S = 60.0
_SILENT_S = 30.0
_GRACE_S = 10.0


@dataclass(frozen=True)
class ServingOptions:
    """How engines are started and restarted. Times are in seconds; `max_restarts` is per engine, None for no limit.

    With `restart_hung_after_s=None` an engine that answers no probe is not restarted.
    """

    api_key: str
    api_key_env: str
    log_folder: Path
    rendezvous: str | None = None
    max_restarts: int | None = None
    restart_hung_after_s: float | None = None
    router_port: int | None = None
    start_limit_s: float = 1800.0


class HealthWatch:
    """Probes an engine in its own thread, so that a hung engine does not delay the others."""

    def __init__(self, is_healthy: Callable[[], bool]) -> None:
        self._is_healthy = is_healthy
        self._last_answer = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def silence_s(self) -> float:
        """Time since the engine was last seen healthy."""
        return time.monotonic() - self._last_answer

    def end(self) -> None:
        """Stop probing; does not wait for a running probe."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_EVERY_S):
            if self._is_healthy():
                self._last_answer = time.monotonic()


class Engine:
    """One engine and its restarts. `registration` is None while the engine does not serve."""

    def __init__(self, node: Node, index: int, options: ServingOptions) -> None:
        self.url = node.url(index)
        self.log = options.log_folder / f"engine_{node.port + index}.log"
        self.registration: Registration | None = None
        self._node = node
        self._index = index
        self._options = options
        self._group: ProcessGroup | None = None
        self._watch: HealthWatch | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._started = 0.0
        self._start_at = 0.0
        self._has_served = False
        self._num_restarts = 0
        self._failures = 0

    @property
    def has_given_up(self) -> bool:
        """Whether the engine has used up its restarts."""
        limit = self._options.max_restarts
        return limit is not None and self._num_restarts > limit

    def advance(self) -> None:
        """One step of start, readiness and restart, without waiting for any of them.

        Raises FleetError when the engine ends before it has ever served: starting again would not help.
        """
        if self.has_given_up:
            return
        if self._group is None:
            if time.monotonic() >= self._start_at:
                self._start()
        elif (status := self._group.status()) is not None:
            self._handle_end(f"ended with status {status}")
        elif self.registration is None:
            if self._is_ready():
                self._serve()
            elif time.monotonic() - self._started > self._options.start_limit_s:
                self._handle_end(f"did not serve within {self._options.start_limit_s:g} s")
        elif (limit_s := self._options.restart_hung_after_s) and self._watch and self._watch.silence_s > limit_s:
            self._handle_end(f"answered no probe for {limit_s:g} s")

    def ask_to_end(self) -> None:
        """Send SIGTERM to the engine, if it runs."""
        if self._group is not None:
            self._group.ask_to_end()

    def end(self, deadline: float) -> None:
        """End the engine and its child processes; kill them at `deadline` (monotonic clock)."""
        if self._group is not None:
            self._group.end(deadline)
        if self._watch is not None:
            self._watch.end()
        if self._folder is not None:
            self._folder.cleanup()
        self._group = self._watch = self.registration = self._folder = None

    def restart_if_silent(self) -> None:
        """Restart an engine that the trainer reports as hung if it answers no probe here either."""
        if self._watch is not None and self._watch.silence_s > _SILENT_S:
            self._handle_end("is hung, says the trainer, and answers no probe")

    def _start(self) -> None:
        self._folder = TemporaryDirectory(prefix="dapo_mega_engine_", ignore_cleanup_errors=True)
        variables = environment(self._node, self._index, os.environ)
        variables |= store_variables(self._node, self._index, Path(self._folder.name) / "store")
        variables.pop(self._options.api_key_env, None)
        with _key_on_a_pipe(self._options.api_key, Path(self._folder.name) / "key.yaml") as (pipe, path):
            self._group = ProcessGroup(command(self._node, self._index, path), variables, self.log, [pipe])
        self._started = time.monotonic()
        print(f"engine {self.url} starts (pid {self._group.pid}, log {self.log})", flush=True)

    def _is_ready(self) -> bool:
        """Whether the engine is healthy. Raises FleetError if it answers callers without the key."""
        if not self._is_healthy():
            return False
        status = self._status_without_key("/model_info")
        if status not in (None, http.client.UNAUTHORIZED):
            raise FleetError(
                f"engine {self.url} answers callers without the API key; remove the arguments after -- that turn the "
                "check off"
            )
        return status is not None

    def _serve(self) -> None:
        assert self._group is not None
        self._has_served = True
        self._failures = 0
        if self._options.restart_hung_after_s is not None:
            self._watch = HealthWatch(self._is_healthy)
        self.registration = Registration(url=self.url, instance=uuid.uuid4().hex)
        print(f"engine {self.url} serves (pid {self._group.pid}, instance {self.registration.instance})", flush=True)

    def _handle_end(self, what: str) -> None:
        self.end(time.monotonic())
        if not self._has_served:
            raise FleetError(f"engine {self.url} {what} before it ever served: {last_line(self.log)}; see {self.log}")
        self._num_restarts += 1
        back_off_s = min(2.0**self._failures, _LONGEST_BACK_OFF_S)
        self._failures += 1
        self._start_at = time.monotonic() + back_off_s
        outlook = "is not restarted any more" if self.has_given_up else f"starts again in {back_off_s:g} s"
        print(f"engine {self.url} {what} and {outlook}; see {self.log}", flush=True)

    def _is_healthy(self) -> bool:
        return self._status_without_key("/health") == http.client.OK

    def _status_without_key(self, path: str) -> int | None:
        """HTTP status of the engine's answer; None without an answer."""
        connection = http.client.HTTPConnection(self._node.host, self._node.port + self._index, timeout=_PROBE_LIMIT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


@contextmanager
def _key_on_a_pipe(api_key: str, path: Path) -> Iterator[tuple[int, Path]]:
    """(pipe, path): a program that inherits the pipe can read the key once, as SGLang's configuration at `path`.

    The key is never on disk: `path` is a link with the file ending that SGLang requires.
    """
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "w") as file:
            file.write(f"api-key: {json.dumps(api_key)}\n")
        path.symlink_to(f"/proc/self/fd/{reading}")
        yield reading, path
    finally:
        os.close(reading)


class LocalEngines:
    """The engines of a node. `advance` starts and restarts them, and must be called now and then."""

    def __init__(self, node: Node, options: ServingOptions) -> None:
        """The node is one that `check_node` has passed."""
        options.log_folder.mkdir(parents=True, exist_ok=True)
        self.engines = [Engine(node, index, options) for index in range(node.num_engines)]
        self.urls = tuple(engine.url for engine in self.engines)
        self._options = options

    def serving(self) -> list[Registration]:
        return [engine.registration for engine in self.engines if engine.registration is not None]

    def advance(self) -> None:
        """One step of starts and restarts, without waiting. Raises FleetError when an engine ends before it ever
        served, and when all have used up their restarts."""
        for engine in self.engines:
            engine.advance()
        if all(engine.has_given_up for engine in self.engines):
            raise FleetError(
                f"all engines died more than {self._options.max_restarts} times; see {self._options.log_folder}"
            )

    def wait_until_serving(self) -> None:
        """Return when every engine serves. Raises FleetError as `advance` does; engines that take too long to start are
        ended by it."""
        while len(self.serving()) < len(self.engines):
            self.advance()
            time.sleep(_TICK_S)

    def close(self) -> None:
        """End all engines with their child processes."""
        for engine in self.engines:
            engine.ask_to_end()
        deadline = time.monotonic() + _GRACE_S
        for engine in self.engines:
            engine.end(deadline)


class Router:
    """sglang-router in front of the engines, restarted when it ends."""

    def __init__(self, node: Node, options: ServingOptions, port: int) -> None:
        self._node = node
        self._options = options
        self._port = port
        self._group: ProcessGroup | None = None
        self._start_at = 0.0

    def advance(self) -> None:
        """One step of start and restart, without waiting."""
        if self._group is None:
            if time.monotonic() >= self._start_at:
                self._start()
        elif (status := self._group.status()) is not None:
            self.end()
            self._start_at = time.monotonic() + _LONGEST_BACK_OFF_S
            print(f"the router ended with status {status} and starts again in {_LONGEST_BACK_OFF_S:g} s", flush=True)

    def end(self) -> None:
        """End the router, if it runs."""
        if self._group is not None:
            self._group.end(time.monotonic())
        self._group = None

    def _start(self) -> None:
        variables = router_environment(os.environ, self._options.api_key)
        variables.pop(self._options.api_key_env, None)
        log = self._options.log_folder / "router.log"
        self._group = ProcessGroup(router_command(self._node, self._port), variables, log)
        address = f"http://{self._node.host}:{self._port}"
        print(f"router {address} starts (pid {self._group.pid}, log {log})", flush=True)


class Announcements:
    """Tells the trainer repeatedly, and at once after a change, which engines serve.

    `hung` are the announced instances that the trainer's last reply called hung.
    """

    def __init__(self, options: ServingOptions) -> None:
        self.hung: frozenset[str] = frozenset()
        self._options = options
        self._told: list[Registration] = []
        self._state = ""
        self._due = 0.0

    def update(self, serving: list[Registration]) -> None:
        """`serving` are the engines that serve now."""
        if self._options.rendezvous is None or (serving == self._told and time.monotonic() < self._due):
            return
        gone = [registration for registration in self._told if registration not in serving]
        self.hung = frozenset()
        self._tell(gone, leaving=True)
        self._tell(serving, leaving=False)
        self._told = serving
        self._due = time.monotonic() + _ANNOUNCE_EVERY_S

    def _tell(self, registrations: list[Registration], *, leaving: bool) -> None:
        if not registrations or self._options.rendezvous is None:
            return
        reply = announce(self._options.rendezvous, self._options.api_key, registrations, leaving=leaving)
        if reply and not reply.refusal:
            self.hung = reply.hung
            state = "knows of the engines"
        else:
            state = f"{reply.refusal if reply else 'does not answer'}; trying again every {_ANNOUNCE_EVERY_S:g} s"
        if state != self._state:
            self._state = state
            print(f"the trainer at {self._options.rendezvous} {state}", flush=True)


def serve(node: Node, options: ServingOptions) -> None:
    """Run the node's engines until SIGTERM, SIGINT or SIGHUP, then end all their processes.

    Raises FleetError as `LocalEngines.advance` does.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    engines = LocalEngines(node, options)
    announcements = Announcements(options)
    router = Router(node, options, options.router_port) if options.router_port is not None else None
    have_all_served = False
    try:
        while not stop.wait(_TICK_S):
            engines.advance()
            serving = engines.serving()
            announcements.update(serving)
            for engine in engines.engines:
                if engine.registration is not None and engine.registration.instance in announcements.hung:
                    engine.restart_if_silent()
            if len(serving) == node.num_engines and not have_all_served:
                have_all_served = True
                print(f"all engines serve: rollout.fleet.urls={','.join(engines.urls)}", flush=True)
            if router is not None and have_all_served:
                router.advance()
    finally:
        announcements.update([])
        engines.close()
        if router is not None:
            router.end()
    print("all engines have ended", flush=True)
