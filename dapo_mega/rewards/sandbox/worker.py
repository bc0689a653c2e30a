"""The main program of a sandbox: isolates itself, then runs one solution after the other.

    trainer <-- pipes --> this process, outside
                             |
                          process 1 of the namespaces: waits, starts jobs, kills what a job leaves
                             |
                          a job: one solution; asks for its tests one at a time, limits and measures its processes
                             |          |
                     the solution    its tests, where they are code

Without namespaces the first two are one process. No process that runs a solution is forked from one that has read what
the solution must not see: process 1 reads one byte per job, and a job reads no expected output and no test code.
"""

import contextlib
import fcntl
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import isolation, seccomp, solution, tester
from .frames import FrameError, framed, read_frame, write_all, write_frame
from .remote import serving_calls

JOB = b"J"
_JOBS_IN, _ANSWERS_OUT = 0, 1
_POLL_S = 0.05
_MAX_REPORT_BYTES = 2000
# The limit is one of processor time. A program that waits, or computes in turns with others, has by the clock:
_CLOCK_TO_CPU = 3.0
_CLOCK_MARGIN_S = 2.0


@dataclass(frozen=True)
class Options:
    """How this sandbox is set up; JSON on the command line."""

    number: int
    namespaces: bool
    memory_mib: int
    file_mib: int
    modules: list[str]
    trainer: int


@dataclass(frozen=True)
class _Setup:
    """What is the same for all jobs: options, address space before any solution, and the filter of system calls."""

    options: Options
    mapped_bytes: int
    filter: bytes


def main() -> None:
    """Set up the sandbox, say what is in force, serve jobs until the trainer closes."""
    options = Options(**json.loads(sys.argv[1]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # Where memory runs out, a sandbox ends before the trainer does.
    solution.preload(options.modules)
    solution.open_standard_streams()
    setup = _Setup(options, isolation.mapped_bytes(), seccomp.filter_program(may_open_files=options.namespaces))
    gc.collect()
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        if options.namespaces:
            isolation.enter_namespaces([path for path in sys.path if path])
    except OSError as error:
        write_frame(_ANSWERS_OUT, {"error": str(error)})
        return
    isolation.end_with_parent(options.trainer)  # Also where it is stopped.
    if options.namespaces:
        child = os.fork()
        if child:
            os.close(_JOBS_IN)
            os.close(_ANSWERS_OUT)
            os.waitpid(child, 0)
            return
        isolation.end_with_parent(0)  # The parent is in another namespace, where its id cannot be told.
    write_frame(_ANSWERS_OUT, {"ready": True})
    _serve_jobs(setup)


def _serve_jobs(setup: _Setup) -> None:
    parent = os.getpid()
    while os.read(_JOBS_IN, 1) == JOB:
        child = os.fork()
        if not child:
            _in_child(lambda: _Job(setup, parent).serve())
        _, status = os.waitpid(child, 0)
        _kill_the_rest(setup.options, child)
        if status:
            return  # Messages may be cut off: the trainer starts another sandbox.


def _kill_the_rest(options: Options, job: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if options.namespaces:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(job, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if options.namespaces else os.WNOHANG)[0]:
            pass


def _in_child(run: Callable[[], int]) -> None:
    """Run in a forked child and end it there, whatever happens."""
    status = 1
    try:
        status = run()
    finally:
        os._exit(status)


class _Job:
    def __init__(self, setup: _Setup, parent: int) -> None:
        self._setup = setup
        self._options = setup.options
        self._parent = parent

    def serve(self) -> int:
        os.setsid()
        if self._options.namespaces:
            isolation.mount_private_folder(self._options.file_mib)
        isolation.give_up_rights(self._options.number)
        isolation.end_with_parent(self._parent)
        self._limits_threads = isolation.can_limit_threads(self._options.namespaces)
        job = read_frame(_JOBS_IN)
        while job and (test := read_frame(_JOBS_IN)):
            write_all(_ANSWERS_OUT, _framed(self._run(job["code"], test)))
        return 0

    def _run(self, code: str, test: dict[str, Any]) -> dict[str, Any]:
        kind, limit_s = test["kind"], test["limit_s"]
        self._clock_s = test.get("clock_s", clock_limit_s(limit_s))
        if kind == "tests":
            return self._run_tests(code, limit_s)
        if kind == "program":
            return self._run_program(lambda _: solution.run_program(code), test["stdin"], limit_s)
        assert kind == "call"
        name, arguments = test["name"], test["arguments"]
        return self._run_program(lambda answer: solution.call_function(code, name, arguments, answer), "", limit_s)

    def _run_program(self, body: Callable[[int], int], stdin: str, limit_s: float) -> dict[str, Any]:
        """One process: standard streams, and a file for what a function returns."""
        with contextlib.ExitStack() as stack:
            files = [_memory_file(stack) for _ in range(4)]
            write_all(files[0], stdin.encode(errors="surrogateescape"))
            os.lseek(files[0], 0, os.SEEK_SET)
            cause, cpu_s = self._wait(self._start(lambda: body(3), files, limit_s), limit_s)
            most = self._options.file_mib * 2**20
            return {
                "cause": cause,
                "cpu_s": cpu_s,
                "error": _content(files[2], _MAX_REPORT_BYTES, from_end=True),
                "output": _content(files[1], most),
                "answer": _content(files[3], most),
            }

    def _run_tests(self, code: str, limit_s: float) -> dict[str, Any]:
        """Two processes that talk over pipes. The second reads the tests itself, after the first was started."""
        with contextlib.ExitStack() as stack:
            files = [_memory_file(stack) for _ in range(6)]
            with contextlib.ExitStack() as pipes:
                to_solution, to_tests = _pipe(pipes), _pipe(pipes)
                ends = [to_solution[0], to_tests[1]]
                solver = self._start(lambda: solution.serve_module(code, 3, 4), [*files[:3], *ends], limit_s)
                report = _memory_file(stack)
                ends = [to_tests[0], to_solution[1]]
                judge = self._start(_run_next_tests, [*files[3:], *ends, report, _JOBS_IN], limit_s)
            cause, cpu_s = self._wait(judge, limit_s, helper=solver)
            self._kill(solver)
            return {"cause": cause, "cpu_s": cpu_s, "verdict": _content(report, _MAX_REPORT_BYTES)}

    def _start(self, body: Callable[[], int], files: Sequence[int], limit_s: float) -> int:
        """A process with these descriptors as 0, 1, 2, ..., limited and filtered."""
        job = os.getpid()
        child = os.fork()
        if not child:
            _in_child(lambda: self._become(body, files, limit_s, job))
        return child

    def _become(self, body: Callable[[], int], files: Sequence[int], limit_s: float, job: int) -> int:
        isolation.end_with_parent(job)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in files]
        for place, file in enumerate(high):
            os.dup2(file, place)
        os.closerange(len(files), 1000)
        memory = self._setup.mapped_bytes + self._options.memory_mib * 2**20
        isolation.limit_resources(memory, self._options.file_mib * 2**20, limit_s, self._limits_threads)
        seccomp.install(self._setup.filter)
        return body()

    def _wait(self, child: int, limit_s: float, helper: int | None = None) -> tuple[str, float]:
        """Wait for a process, and kill it when it or it and its helper have used up their time. Returns how it ended,
        "" for exit status 0, and its processor time in seconds."""
        begin = time.monotonic()
        while True:
            ended, status, usage = os.wait4(child, os.WNOHANG)
            if ended:
                return _cause(status, limit_s), usage.ru_utime + usage.ru_stime
            left_by_clock_s = begin + self._clock_s - time.monotonic()
            used_s = sum(_cpu_s(process) for process in (child, helper) if process is not None)
            if used_s > limit_s or left_by_clock_s < 0:
                self._kill(child)
                return f"took longer than {limit_s:g} s", used_s
            left_s = min(limit_s - used_s, left_by_clock_s, _POLL_S)
            signal.sigtimedwait({signal.SIGCHLD}, max(left_s, 0.001))

    @staticmethod
    def _kill(child: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _framed(result: dict[str, Any]) -> bytes:
    """The result as it travels. What a solution writes grows by its escapes, so its files' limit does not bound it."""
    try:
        return framed(result)
    except FrameError:
        return framed({**result, "cause": "printed or returned too much", "output": "", "answer": ""})


def clock_limit_s(limit_s: float) -> float:
    """Seconds after which a process with this limit of processor time is ended in any case."""
    return _CLOCK_TO_CPU * limit_s + _CLOCK_MARGIN_S


def _run_next_tests() -> int:
    """Read tests from descriptor 6, which the trainer writes to, and run them against the solution."""
    tests = read_frame(6)
    assert isinstance(tests, dict)
    os.close(6)
    os.write(5, tester.verdict(tests["setup"], tests["code"], tests["entry_point"], serving_calls(3, 4)))
    return 0


def _cpu_s(process: int) -> float:
    with contextlib.suppress(OSError):
        return time.clock_gettime((~process << 3) | 2)
    return 0.0


def _cause(status: int, limit_s: float) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return f"took longer than {limit_s:g} s"
        return f"was ended by {signal.Signals(number).name}"
    code = os.waitstatus_to_exitcode(status)
    return f"ended with status {code}" if code else ""


def _memory_file(stack: contextlib.ExitStack) -> int:
    file = os.memfd_create("sandbox")
    stack.callback(os.close, file)
    return file


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


def _content(file: int, most: int, from_end: bool = False) -> str:
    """At most so many bytes of a file, as text."""
    size = os.fstat(file).st_size
    return os.pread(file, most, max(0, size - most) if from_end else 0).decode(errors="replace")
