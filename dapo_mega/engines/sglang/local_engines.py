"""SGLang engines on this machine that end with this process, for commands that need engines for a while."""

from __future__ import annotations

import socket
import time

from dapo_mega.engines.sglang.engine_commands import Node, check_node
from dapo_mega.engines.sglang.serving import Engine, ServingOptions
from dapo_mega.errors import FleetError

_FIRST_PORT, _LAST_PORT = 30000, 32000
_GRACE_S = 10.0
_TICK_S = 0.2


class LocalEngines:
    """The engines of a node. `advance` starts and restarts them, and must be called now and then."""

    def __init__(self, node: Node, options: ServingOptions) -> None:
        """Raises InputError for a node that cannot be started."""
        check_node(node)
        options.log_folder.mkdir(parents=True, exist_ok=True)
        self._options = options
        self._engines = [Engine(node, index, options) for index in range(node.num_engines)]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(engine.url for engine in self._engines)

    def advance(self) -> None:
        """One step of starts and restarts, without waiting. Raises FleetError when an engine ends before it ever
        served, and when all have used up their restarts."""
        for engine in self._engines:
            engine.advance()
        if all(engine.has_given_up for engine in self._engines):
            raise FleetError(
                f"all engines died more than {self._options.max_restarts} times; see {self._options.log_folder}"
            )

    def wait_until_serving(self) -> None:
        """Return when every engine serves. Raises FleetError as `advance` does; engines that take too long to start are
        ended by it."""
        while any(engine.registration is None for engine in self._engines):
            self.advance()
            time.sleep(_TICK_S)

    def close(self) -> None:
        """End all engines with their child processes."""
        for engine in self._engines:
            engine.ask_to_end()
        deadline = time.monotonic() + _GRACE_S
        for engine in self._engines:
            engine.end(deadline)


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of `count` ports that follow one another and are free now."""
    for first in range(_FIRST_PORT, _LAST_PORT, count):
        if all(_is_free(host, port) for port in range(first, first + count)):
            return first
    raise FleetError(f"no {count} free ports that follow one another between {_FIRST_PORT} and {_LAST_PORT} on {host}")


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True
