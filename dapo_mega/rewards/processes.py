"""A process that works for a reward or an environment, with a limit of time, and without anything that outlives it."""

import contextlib
import json
import logging
import logging.handlers
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from dapo_mega.algorithms.own_code import MisuseError
from dapo_mega.rewards.sandbox.frames import HEAD, FrameError, receive_before, send_before

START_LIMIT_S: Final = 300.0
"""Seconds that a process may take to import what it needs."""

_PROGRAM: Final = (
    "import json, sys\narguments = json.loads(sys.argv[1])\nsys.path[:] = arguments.pop('sys_path')\nimport "
    "importlib\nimportlib.import_module(arguments.pop('module')).main(**arguments)\n"
)
NUMBER: Final = struct.Struct("=Q")
"""The number of a request, which stands before its content and comes back in its answer as `number`."""
_LOG_BYTES: Final = 5 * 2**20
_TAIL_LINES: Final = 20


class CallError(Exception):
    """A call that gave no results: the function raised, hung or died. `detail` are lines that tell more."""

    def __init__(self, reason: str, detail: str = "", *, hung: bool = False) -> None:
        super().__init__(reason)
        self.detail = detail
        self.hung = hung


class _LogFile(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: where the disk is full, each line that a function prints would become a traceback."""


class OutputLog:
    """Takes what all processes of a function print, away from the trainer's own output.

    Keeps the last lines, and writes all into the rotating file `path` once there is one.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._handler: logging.Handler | None = None
        read_fd, self.write_fd = os.pipe()
        self._thread = threading.Thread(target=self._read, args=(read_fd,), daemon=True)
        self._thread.start()

    def write_to(self, path: Path) -> None:
        """Also write into this file from now on: at most two files of 5 MiB."""
        self._handler = _LogFile(path, maxBytes=_LOG_BYTES, backupCount=1, delay=True, encoding="utf-8")

    def tail(self) -> str:
        """The last lines that were printed."""
        return "\n".join(self._lines)

    def _read(self, read_fd: int) -> None:
        with open(read_fd, encoding="utf-8", errors="replace", newline=None) as stream:
            # Bounded, as a line may have no end.
            while line := stream.readline(2**16):
                text = line.rstrip("\n")
                self._lines.append(text[:1000])
                if self._handler is not None:
                    self._handler.emit(logging.makeLogRecord({"msg": text}))

    def close(self) -> None:
        if self.write_fd < 0:
            return
        os.close(self.write_fd)
        self.write_fd = -1
        # Ends when all processes have closed their ends, which they have unless one escaped.
        self._thread.join(timeout=1)
        if self._handler is not None:
            with contextlib.suppress(OSError):
                self._handler.close()


class WorkerProcess:
    """One process of `module.main(**arguments)`, started when needed and again after it was ended. Not thread-safe.

    What it prints goes to `output`, or where the trainer prints to. It may end with the thread that starts it.
    """

    def __init__(self, module: str, arguments: Mapping[str, Any], output: OutputLog | None = None) -> None:
        self._arguments = {"module": f"dapo_mega.{module}", **arguments}
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._descriptors: tuple[int, int, int] | None = None
        self._killed = False
        self._number = 0

    def start(self) -> None:
        """Start the process, which then imports what it needs, unless that is done. Raises as `ask`."""
        if self._process is not None:
            return
        (requests, send), (receive, answers), (alive, lifeline) = os.pipe(), os.pipe(), os.pipe()
        os.set_blocking(send, False)
        pipes = {"requests_fd": requests, "answers_fd": answers, "lifeline_fd": alive}
        printed = self._output.write_fd if self._output else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps({"sys_path": sys.path, **pipes, **self._arguments})],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=(requests, answers, alive),
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is for the trainer, which ends this process.
            )
        except OSError as error:
            _close(send, receive, lifeline)
            raise CallError(f"no process can be started: {error}") from None
        finally:
            _close(requests, answers, alive)
        self._descriptors = send, receive, lifeline
        if self._killed:  # Before it had a process that could be killed.
            self.stop()
            raise CallError("the process was ended")
        self._number = 0
        self._exchange(b"", START_LIMIT_S, "importing it")

    @property
    def connection(self) -> tuple[int, int]:
        """The descriptors that requests are written to and answers read from, for those who do not `ask`."""
        assert self._descriptors
        return self._descriptors[:2]

    def ask(self, request: bytes, limit_s: float, what: str) -> dict[str, Any]:
        """The answer, at most `limit_s` after the process has started. Raises CallError, the process being ended where
        it did not answer, and MisuseError."""
        self.start()
        self._number += 1
        content = NUMBER.pack(self._number) + request
        return self._exchange(HEAD.pack(len(content)) + content, limit_s, what)

    def _exchange(self, content: bytes, limit_s: float, what: str) -> dict[str, Any]:
        assert self._descriptors
        assert self._process
        send, receive, _ = self._descriptors
        deadline = time.monotonic() + limit_s
        try:
            send_before(deadline, send, content)
            answer: dict[str, Any] = receive_before(deadline, receive)
            if not isinstance(answer, dict):
                raise FrameError(f"it is {type(answer).__name__}")
            if answer.get("number") != self._number:
                raise FrameError("it is for another request")
        except TimeoutError:
            self.stop()
            raise CallError(f"{what} took longer than {limit_s:g} s and was ended", self.printed(), hung=True) from None
        except FrameError as error:
            self.stop()
            raise CallError(f"the process answered {what} with something else: {error}") from None
        except OSError:
            status = self.stop(wait_s=5)  # Its connection closes a little before it has ended.
            raise CallError(f"the process died in {what} ({ending(status)})", self.printed()) from None
        except BaseException:  # Interrupted: what it still answers would be taken for the answer to the next request.
            self.stop()
            raise
        if "misuse" in answer:
            raise MisuseError(answer["misuse"])
        if "failure" in answer:
            raise CallError(answer["failure"], answer["detail"])
        return answer

    def printed(self) -> str:
        """What it printed last, with a line above it."""
        tail = self._output.tail() if self._output else ""
        return f"its last output:\n{tail}" if tail else ""

    def kill(self) -> None:
        """End the process with all that it has started, from any thread, for good: no other is started."""
        self._killed = True
        if (process := self._process) is not None:
            end_tree(process.pid)

    def stop(self, wait_s: float = 0.0) -> int | None:
        """End the process with all that it has started, after waiting so long for it to end by itself; returns its exit
        status if it did."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        status = process.poll()
        end_tree(process.pid)
        process.wait()
        if self._descriptors:
            _close(*self._descriptors)
        self._descriptors = None
        return status


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def end_tree(pid: int) -> None:
    """Kill the leader of a process group, its group and its descendants."""
    kill_descendants(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_descendants(pid: int) -> None:
    """Kill all descendants of a process, also those that they start meanwhile."""
    for _ in range(20):
        alive = _alive_descendants(pid)
        if not alive:
            return
        for child in alive:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(alive, timeout=0.05)


def _alive_descendants(pid: int) -> list[psutil.Process]:
    alive = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # One that has just ended hides no other.
                if child.status() != psutil.STATUS_ZOMBIE:
                    alive.append(child)
    return alive


def ending(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "it closed its connection"
    if status < 0:
        reason = f"signal {signal.Signals(-status).name}"
        return f"{reason}: memory perhaps" if status == -signal.SIGKILL else reason
    return f"exit status {status}"
