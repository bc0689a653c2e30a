"""The trainer's side of a sandbox: starts it, tries out what it holds back, gives it solutions and their tests."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dapo_mega.rewards.sandbox import seccomp
from dapo_mega.rewards.sandbox.frames import FrameError, framed, receive_before, send_before
from dapo_mega.rewards.sandbox.isolation import MAX_THREADS
from dapo_mega.rewards.sandbox.worker import JOB, Options, clock_limit_s

Isolation = Literal["namespaces", "filter"]

_FOLDER = str(Path(__file__).resolve().parents[1])
_MAIN = f"import sys; sys.path.insert(0, {_FOLDER!r}); from sandbox import worker; del sys.path[0]; worker.main()"
_START_LIMIT_S = 60.0
_GRACE_S = 20.0


class SandboxError(Exception):
    """A sandbox could not be started, or ended: nothing is known about the solution. `hung`: it did not answer."""

    def __init__(self, reason: str, *, hung: bool = False) -> None:
        super().__init__(reason)
        self.hung = hung


@dataclass(frozen=True)
class SandboxLimits:
    """What one process of a solution may use; `modules` are imported beyond Python's library before any solution."""

    memory_mib: int = 512
    file_mib: int = 8
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Held:
    """What a sandbox holds back, as tried out: the isolation, and whether threads are limited."""

    isolation: Isolation
    threads: bool

    def __str__(self) -> str:
        threads = f"at most {MAX_THREADS} threads" if self.threads else "threads limited by memory alone"
        if self.isolation == "namespaces":
            return (
                "solutions run in namespaces of their own behind a filter of system calls: no network, no other "
                f"process, no file of this machine but the interpreter's and the system's libraries, {threads}"
            )
        return (
            "this machine allows no namespaces, so solutions run behind a filter of system calls only: no network, no "
            f"other process, no file can be opened, only modules loaded at the start can be imported, {threads}"
        )


RunTest = Callable[[dict[str, Any]], dict[str, Any]]


class Sandbox:
    """One worker process that runs one solution at a time. Not for several threads at once."""

    def __init__(self, number: int, isolation: Isolation, limits: SandboxLimits) -> None:
        """Raises SandboxError where it cannot be started. It ends with the thread that starts it."""
        self.isolation = isolation
        options = Options(
            number, isolation == "namespaces", limits.memory_mib, limits.file_mib, list(limits.modules), os.getpid()
        )
        # Without `site` the environment's packages cannot be imported, and it starts faster.
        flags = ["-I", "-B", "-X", "utf8", *([] if limits.modules else ["-S"])]
        try:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _MAIN, json.dumps(asdict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"no process can be started: {error}") from None
        assert self._process.stdin
        assert self._process.stdout
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._to, self._from):
            os.set_blocking(descriptor, False)
        try:
            answer = self._receive(time.monotonic() + _START_LIMIT_S)
        except SandboxError as error:
            assert self._process.stderr
            lines = self._process.stderr.read().decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
            raise SandboxError(f"{error}: {last}") from None
        if "error" in answer:
            self.close()
            raise SandboxError(answer["error"])

    @property
    def pid(self) -> int:
        """The worker's process id; it is killed with everything in it when this process is."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @contextlib.contextmanager
    def solution(self, code: str) -> Iterator[RunTest]:
        """Runs tests of one solution, each in a fresh process. SandboxError ends the sandbox."""
        deadline = time.monotonic() + _GRACE_S
        self._send({"code": code}, deadline, JOB)
        try:
            yield self._run
        finally:
            if self.is_alive:
                self._send(None, time.monotonic() + _GRACE_S)

    def kill(self) -> None:
        """Kill it with everything in it, from any thread."""
        self._process.kill()

    def close(self) -> None:
        """Kill it, and close what connects it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()

    def _run(self, test: dict[str, Any]) -> dict[str, Any]:
        """`test` says its kind (program, call, tests), limit_s and, unless it follows from that, clock_s. The code of
        tests goes to their own process."""
        deadline = time.monotonic() + clock_limit_s(test["limit_s"]) + _GRACE_S
        tests = test.get("tests")
        self._send({key: value for key, value in test.items() if key != "tests"}, deadline)
        if tests:
            self._send(tests, deadline)
        return self._receive(deadline)

    def _send(self, message: Any, deadline: float, before: bytes = b"") -> None:
        try:
            send_before(deadline, self._to, before + framed(message))
        except (OSError, FrameError) as error:
            raise self._ended(error) from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        try:
            answer = receive_before(deadline, self._from)
        except (OSError, FrameError) as error:
            raise self._ended(error) from None
        assert isinstance(answer, dict)
        return answer

    def _ended(self, error: Exception) -> SandboxError:
        self._process.kill()
        self._process.wait()
        if isinstance(error, TimeoutError):
            return SandboxError("the sandbox did not answer in time", hung=True)
        is_message = isinstance(error, FrameError)
        return SandboxError(f"a message to or from the sandbox failed: {error}" if is_message else "the sandbox ended")


def start_sandbox(number: int, limits: SandboxLimits, isolation: Isolation | None = None) -> Sandbox:
    """A sandbox in namespaces where the kernel allows them, else behind the filter alone. Raises SandboxError."""
    if not seccomp.is_supported():
        raise SandboxError("solutions can be run on Linux on x86_64 and aarch64 only")
    if isolation:
        return Sandbox(number, isolation, limits)
    try:
        return Sandbox(number, "namespaces", limits)
    except SandboxError:
        return Sandbox(number, "filter", limits)


_ATTEMPTS = """
import ctypes, json, os, threading
def succeeds(attempt):
    try:
        attempt()
    except BaseException:
        return False
    return True
def start_threads():
    for _ in range({threads}):
        threading.Thread(target=stop.wait, daemon=True).start()
def open_socket():
    assert ctypes.CDLL(None).socket(2, 1, 0) >= 0
threading.stack_size(65536)
stop = threading.Event()
attempts = {{
    "start a process": os.fork,
    "open a socket": open_socket,
    "read a file of this machine": lambda: open({file!r}).read(),
    "signal another process": lambda: os.kill(os.getppid(), 0),
    "allocate memory without limit": lambda: bytearray({memory}),
}}
found = [name for name, attempt in attempts.items() if succeeds(attempt)]
threads = succeeds(start_threads)
stop.set()
print(json.dumps([found, threads]))
"""


def try_out(sandbox: Sandbox, limits: SandboxLimits) -> Held:
    """Run a program that attempts what a solution must not do. Raises SandboxError if one attempt succeeds."""
    with tempfile.NamedTemporaryFile("w", prefix="dapo-mega-") as file:
        os.chmod(file.name, 0o644)
        memory = 2 * limits.memory_mib * 2**20
        code = _ATTEMPTS.format(threads=2 * MAX_THREADS, file=file.name, memory=memory)
        with sandbox.solution(code) as run:
            result = run({"kind": "program", "stdin": "", "limit_s": 10.0})
    try:
        found, threads = json.loads(result["output"])
    except ValueError:
        raise SandboxError(f"the first program did not run: {result['cause']} {result['error']}") from None
    if found:
        raise SandboxError(f"a program in the sandbox could {' and '.join(found)}")
    return Held(sandbox.isolation, threads=not threads)
