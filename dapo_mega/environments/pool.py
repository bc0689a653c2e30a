"""The processes in which environments live, as the trainer sees them.

A thread of its own (`environments`) writes calls and reads answers, so that neither a slow environment nor a step of
training keeps another waiting. Who calls waits on the event loop it is on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import pickle
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Final

from dapo_mega.algorithms.own_code import MisuseError
from dapo_mega.config.environment import OwnEnvironment
from dapo_mega.distributed.event_loops import result_of
from dapo_mega.environments.observations import Observation, read_observation
from dapo_mega.rewards.processes import NUMBER, CallError, OutputLog, WorkerProcess, ending
from dapo_mega.rewards.sandbox.frames import HEAD, MAX_BYTES

logger = logging.getLogger(__name__)

_CLOSE_LIMIT_S: Final = 10.0
_ENDING_S: Final = 5.0
_ELSE: Final = "the process answered with something else"
_GIVEN: Final[Mapping[str, set[str]]] = {"make": {"tools"}, "restore": set(), "close": set()}
"""The keys of a method's answer, but for those that observe."""


class _Process:
    """One process and its connection; all but `kill` in the pool's thread."""

    def __init__(self, arguments: Mapping[str, Any], limit_s: float, output: OutputLog) -> None:
        """`num_open` are the environments in it. No more are made in one that `is_retired`."""
        self._worker = WorkerProcess("environments.worker", arguments, output)
        self._limit_s = limit_s
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._starting: asyncio.Task[None] | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._reading: asyncio.Task[None] | None = None
        self.num_open = 0
        self.is_retired = False
        self.kill = self._worker.kill

    async def call(self, environment: int, method: str, *arguments: Any) -> dict[str, Any]:
        """The answer. Raises CallError and MisuseError."""
        self._starting = self._starting or asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        if not self._writer:
            raise CallError("its process has ended")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        content = NUMBER.pack(number) + pickle.dumps((environment, method, arguments), pickle.HIGHEST_PROTOCOL)
        self._writer.write(HEAD.pack(len(content)) + content)
        try:
            async with asyncio.timeout(self._limit_s):
                found = await answer
        except TimeoutError:
            self.is_retired = True  # Its thread cannot be ended.
            reason = f"a call of {method} took longer than {self._limit_s:g} s"
            raise CallError(reason, self._worker.printed(), hung=True) from None
        finally:
            del self._waiting[number]
        if "failure" in found:
            raise CallError(found["failure"], found.get("detail", ""))
        if not found.keys() >= _GIVEN.get(method, {"observation", "snapshot"}):
            await self.end()
            raise CallError(_ELSE)
        return found

    async def _start(self) -> None:
        try:
            await asyncio.to_thread(self._worker.start)
        except BaseException:
            self.is_retired = True
            raise
        send, receive = (os.dup(descriptor) for descriptor in self._worker.connection)
        loop, answers = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(answers), os.fdopen(receive, "rb", 0))
        self._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(send, "wb", 0))
        self._reading = asyncio.create_task(self._read(answers))

    async def _read(self, answers: asyncio.StreamReader) -> None:
        """Give answers to those who wait, until there is none any more."""
        reason = _ELSE
        try:
            while True:
                (length,) = HEAD.unpack(await answers.readexactly(HEAD.size))
                if length > MAX_BYTES:
                    break
                found = json.loads(await answers.readexactly(length))
                if (waiting := self._waiting.get(found["number"])) and not waiting.done():
                    waiting.set_result(found)
        except (asyncio.IncompleteReadError, OSError):
            reason = f"its process died ({ending(await self.end(_ENDING_S))})"  # Its connection closes a little before.
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        await self.end()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(CallError(reason, self._worker.printed()))

    async def gone(self) -> None:
        """End the process, and wait until nobody waits for it."""
        await self.end()
        if self._reading:
            await self._reading

    async def end(self, wait_s: float = 0.0) -> int | None:
        """End the process, after waiting so long for it to end by itself; returns its exit status if it did."""
        self.is_retired = True
        if self._writer and not self._writer.is_closing():  # It closes when the process does.
            self._writer.abort()
        self._writer = None
        return await asyncio.to_thread(self._worker.stop, wait_s)


class LiveEnvironment:
    """One environment in a process of the pool. Its calls are made one after the other."""

    def __init__(self, pool: EnvironmentPool, process: _Process, number: int) -> None:
        self._pool = pool
        self._process = process
        self._number = number
        self.tools: Sequence[Mapping[str, Any]] = ()

    async def observe(self, method: str, *arguments: Any) -> tuple[dict[str, Any] | None, Observation, str]:
        """What `reset` or `step` returned, as it was written and as it was read, and the snapshot after it. Raises
        CallError where it failed or what it returned is no observation."""
        answer = await self._pool.started(self._process.call(self._number, method, *arguments))
        returned, snapshot = answer["observation"], answer["snapshot"]
        try:
            return returned, read_observation(returned, f"its method {method}"), snapshot
        except MisuseError as error:  # It may depend on what the policy said.
            raise CallError(str(error)) from None

    async def restore(self, snapshot: str) -> None:
        """Let it be what it was. Raises as `observe`."""
        await self._pool.started(self._process.call(self._number, "restore", snapshot))

    def close(self) -> None:
        """Close it, without waiting for it."""
        self._pool.close_one(self._process, self._number)


class EnvironmentPool:
    """Makes environments in `num_workers` processes, which start when they are needed and are replaced where they end.
    One in which a call hangs ends when no other environment is in it any more."""

    def __init__(self, section: OwnEnvironment) -> None:
        self._arguments = {"source": section.source, "memory_limit_mib": section.memory_limit_mib}
        self._limit_s = section.time_limit_s
        self._num_workers = section.num_workers
        self._output = OutputLog()
        self._processes: list[_Process] = []
        self._numbers = itertools.count()
        self._closing: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._warned = self._closed = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="environments", daemon=True).start()

    def log_to(self, path: Path) -> None:
        """Write what environments print into this file from now on."""
        self._output.write_to(path)

    async def open(self) -> LiveEnvironment:
        """A new environment, where the fewest are. Raises CallError and MisuseError."""
        with self._lock:
            usable = [process for process in self._processes if not process.is_retired]
            if len(usable) < self._num_workers:
                usable.append(_Process(self._arguments, self._limit_s, self._output))
                self._processes.append(usable[-1])
            process = min(usable, key=lambda process: process.num_open)
            process.num_open += 1
        number = next(self._numbers)
        live = LiveEnvironment(self, process, number)
        try:
            live.tools = (await self.started(process.call(number, "make")))["tools"]
        except BaseException:
            live.close()
            raise
        return live

    async def started(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What the coroutine, which runs in the pool's thread, returns or raises."""

        def start() -> Future[Any]:
            if self._closed:
                work.close()
                raise CallError("the environments are closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

        return await result_of(start)

    def close_one(self, process: _Process, number: int) -> None:
        """Close an environment and forget it. What that raises is logged once."""

        async def close() -> None:
            try:
                await process.call(number, "close")
            except (CallError, MisuseError) as error:
                if not (self._warned or self._closed or process.is_retired):
                    self._warned = True
                    detail = f"\n{error.detail}" if isinstance(error, CallError) else ""
                    logger.warning("an environment could not be closed; said once: %s%s", error, detail)
            with self._lock:
                process.num_open -= 1
                is_over = process.is_retired and not process.num_open
                if is_over:
                    self._processes.remove(process)
            if is_over:
                await process.gone()

        if not self._closed:
            self._closing.add(closing := asyncio.run_coroutine_threadsafe(close(), self._loop))
            closing.add_done_callback(self._closing.discard)

    def close(self) -> None:
        """Close all environments and end the processes, with what they have started."""
        if self._closed:
            return
        self._closed = True
        wait(self._closing, min(_CLOSE_LIMIT_S, self._limit_s))
        for process in self._processes:
            process.kill()
        wait([asyncio.run_coroutine_threadsafe(self._end(), self._loop)], _CLOSE_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._output.close()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        """End the processes, and wait until nobody waits for anything any more."""
        await asyncio.gather(*(process.gone() for process in self._processes), return_exceptions=True)
        if others := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
            await asyncio.wait(others)
