"""Unit tests of Python solutions as a reward. Solutions run in sandboxes; verdicts are made outside of them."""

import itertools
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dapo_mega.config.components.code import CodeComponent
from dapo_mega.errors import InputError
from dapo_mega.rewards import code_tests
from dapo_mega.rewards.budget import Budgeted, StepBudget
from dapo_mega.rewards.records import RewardRecord, Score, ScoringFailure
from dapo_mega.rewards.sandbox import client
from dapo_mega.rewards.thoughts import CLOSING, split

logger = logging.getLogger(__name__)

_FENCE = re.compile(r"[ \t]*```[ \t]*([\w+#.-]*)")
_PYTHON = ("python", "python3", "py", "py3")
_MAX_CODE_CHARACTERS = 200_000
# A list of asserts that is run at once has up to so many limits.
_MOST_LIMITS = 3
_ATTEMPTS = 2
# Failed tests of one step may take so many limits for each worker, beyond this share of a limit, and at least so many
# seconds, for each solution. When that is used up, this is all that a test has.
_BUDGET_LIMITS = 10
_FREE_SHARE, _LEAST_FREE_S = 0.05, 0.1
# By the clock a program that waits, or computes in turns with others, may take so many times its processor time.
_CLOCK_TO_CPU = 3.0


class CodeReward(Budgeted):
    """1 for a solution that passes all its tests, else 0 or the share that it passes; correct if it passes all.

    A response without code is wrong. A row whose tests cannot be read, and a sandbox that ends twice, is a failure.
    What failed tests of a step take is bounded in all; outcome `cut_short`: the solution had less than its limit.
    Raises InputError where solutions cannot be run here, or are not held back as they must be.
    """

    def __init__(self, settings: CodeComponent, isolation: client.Isolation | None = None) -> None:
        """`isolation` asks for one kind; by default the best that the kernel allows is used, and logged once."""
        self._settings = settings
        self._free_s = min(settings.time_limit_s, max(_LEAST_FREE_S, _FREE_SHARE * settings.time_limit_s))
        self.budget = StepBudget(
            _BUDGET_LIMITS * settings.time_limit_s * settings.num_workers,
            "solutions that fail slowly",
            f"a solution is wrong after {self._free_s:g} s (reward/num_cut_short)",
        )
        self._limits = client.SandboxLimits(settings.memory_limit_mib, settings.file_limit_mib, settings.modules)
        self._isolation = isolation
        # Numbers that other programs' sandboxes on this machine hardly have.
        self._numbers = itertools.count(os.getpid() * 64)
        self._idle: queue.SimpleQueue[client.Sandbox] = queue.SimpleQueue()
        self._open: set[client.Sandbox] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(settings.num_workers, thread_name_prefix="solutions")
        try:
            first = self._threads.submit(self._started).result()  # A thread that lasts.
            held = client.try_out(first, self._limits)
        except client.SandboxError as error:
            self.close()
            raise InputError(f"solutions cannot be run safely on this machine: {error}") from None
        self._isolation = first.isolation
        self._idle.put(first)
        logger.info("%s", held)
        self.held = held

    def score(self, records: Sequence[RewardRecord]) -> list[Score | ScoringFailure]:
        self.budget.begin_call()
        return list(self._threads.map(self._score, records))

    def close(self) -> None:
        """End all sandboxes, also those that run a solution."""
        with self._lock:
            self._closed = True
            for sandbox in self._open:
                sandbox.kill()
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            for sandbox in self._open:
                sandbox.close()
            self._open.clear()

    def _score(self, record: RewardRecord) -> Score | ScoringFailure:
        settings = self._settings
        try:
            cases = code_tests.read_cases(
                column(record, settings.tests_column),
                function=_optional(record, settings.function_column),
                setup=_optional(record, settings.setup_column),
                entry_point=_optional(record, settings.entry_point_column),
            )[: settings.max_tests]
        except ValueError as error:
            return ScoringFailure(f"{settings.tests_column}: {error}")
        code = extract_code(record.whole_response)
        cases = cases if settings.partial_credit else code_tests.joined(cases)
        try:
            passed, outcome = ([], "no_answer") if code is None else self._run(code, cases)
        except (client.SandboxError, _UnusableTests) as error:
            return ScoringFailure(str(error))
        share = sum(map(_weight, passed)) / sum(map(_weight, cases))
        correct = len(passed) == len(cases)
        parts = {"has_code": float(code is not None), "tests_passed": share}
        value = share if settings.partial_credit else float(correct)
        return Score(value, correct, parts, outcome="correct" if correct else outcome)

    def _run(self, code: str, cases: Sequence[code_tests.Case]) -> tuple[list[code_tests.Case], str]:
        """The cases that a solution passes, and how it ended if these are not all. Without partial credit only up to
        the first case that it fails."""
        for attempt in range(_ATTEMPTS):
            sandbox, begin = self._started() if attempt else self._taken(), time.monotonic()
            try:
                with sandbox.solution(code) as run:
                    return self._run_cases(run, cases)
            except client.SandboxError as error:
                self.budget.spend((time.monotonic() - begin) / _CLOCK_TO_CPU)
                if error.hung or self._closed or attempt == _ATTEMPTS - 1:
                    raise client.SandboxError(f"the sandbox ended {attempt + 1} times: {error}") from None
            finally:
                self._give_back(sandbox)
        raise AssertionError("unreachable")

    def _run_cases(self, run: client.RunTest, cases: Sequence[code_tests.Case]) -> tuple[list[code_tests.Case], str]:
        """Ends with the first case that is failed; with partial credit with the first that runs out of time, or when
        those that are failed have taken a limit together."""
        passed: list[code_tests.Case] = []
        limit_s, failed_s, outcome = self._settings.time_limit_s, 0.0, "wrong"
        try:
            for case in cases:
                is_short = self.budget.spend() <= 0
                request = _request(case, self._free_s if is_short else limit_s, is_short)
                begin, result = time.monotonic(), run(request)
                if _passes(case, result, self._settings.float_tolerance):
                    passed.append(case)
                    continue
                failed_s += max(result["cpu_s"], (time.monotonic() - begin) / _CLOCK_TO_CPU)
                goes_on = self._settings.partial_credit and failed_s < request["limit_s"]
                if result["cause"].startswith("took longer") or (self._settings.partial_credit and not goes_on):
                    outcome, goes_on = "cut_short" if is_short else "timeout", False
                if not goes_on:
                    break
        finally:
            self.budget.spend(max(0.0, failed_s - self._free_s))
        if outcome == "cut_short":
            self.budget.warn()
        return passed, outcome

    def _taken(self) -> client.Sandbox:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._started()

    def _started(self) -> client.Sandbox:
        sandbox = client.start_sandbox(next(self._numbers), self._limits, self._isolation)
        with self._lock:
            self._open.add(sandbox)
            if self._closed:
                sandbox.kill()
        return sandbox

    def _give_back(self, sandbox: client.Sandbox) -> None:
        if sandbox.is_alive:
            self._idle.put(sandbox)
            return
        sandbox.close()
        with self._lock:
            self._open.discard(sandbox)


def _weight(case: code_tests.Case) -> int:
    return case.weight if isinstance(case, code_tests.TestsCase) else 1


class _UnusableTests(Exception):
    """The tests cannot be run, whatever the solution."""


def column(record: RewardRecord, name: str) -> Any:
    """A column of the row. Raises ValueError where it has none of this name."""
    if name == "ground_truth":
        return record.ground_truth
    value: Any = record.fields
    for part in name.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = json.loads(value)
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(sorted(map(str, record.fields))) or "none"
            raise ValueError(f"the row has no such column; its columns besides prompt and ground truth: {known}")
        value = value[part]
    return value


def _optional(record: RewardRecord, name: str) -> str:
    try:
        value = column(record, name)
    except ValueError:
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value or "")


def extract_code(response: str) -> str | None:
    """The last fenced block that is marked as Python, or else not marked; None where there is none.

    What stands in a reasoning model's thoughts does not count.
    """
    blocks = _fenced_blocks(response)
    for marks in (_PYTHON, ("",)):
        for mark, code in reversed(blocks):
            if mark.lower() in marks and code.strip() and len(code) <= _MAX_CODE_CHARACTERS:
                return str(code)
    return None


def _fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(mark, content) of each fenced block after the thoughts. Line by line, as nothing may close any number of fences.

    Programs may hold tags of thoughts, so those within a block count only where a line begins with the end of a thought
    whose beginning is not known.
    """
    blocks: list[tuple[str, str]] = []
    mark, lines, thought, is_known = None, list[str](), "", False
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        said, opening, ended = split(line, thought)
        if mark is None or (ended and not is_known and line.strip().lower().startswith(CLOSING)):
            thought, is_known = opening, is_known or ended or bool(opening)
            if ended:
                blocks.clear()
            fence = _FENCE.match(said)
            mark, lines = fence and fence[1], []
        elif fence and line.strip() == "```":
            blocks.append((mark, "\n".join([*lines, ""])))
            mark = None
        else:
            lines.append(line)
    return blocks


def _request(case: code_tests.Case, limit_s: float, is_short: bool) -> dict[str, Any]:
    weight = min(case.weight, _MOST_LIMITS) if isinstance(case, code_tests.TestsCase) else 1
    limits = {"limit_s": limit_s, "clock_s": _CLOCK_TO_CPU * limit_s} if is_short else {"limit_s": limit_s * weight}
    if isinstance(case, code_tests.ProgramCase):
        return {"kind": "program", "stdin": case.stdin, **limits}
    if isinstance(case, code_tests.CallCase):
        return {"kind": "call", "name": case.name, "arguments": case.arguments, **limits}
    tests = {"setup": case.setup, "code": case.code, "entry_point": case.entry_point}
    return {"kind": "tests", "tests": tests, **limits}


def _passes(case: code_tests.Case, result: Mapping[str, Any], tolerance: float) -> bool:
    if isinstance(case, code_tests.TestsCase):
        if result["verdict"].startswith("unusable"):
            raise _UnusableTests(result["verdict"])
        return bool(result["verdict"] == "passed" and not result["cause"])
    if result["cause"]:
        return False
    if isinstance(case, code_tests.ProgramCase):
        return code_tests.prints_the_same(result["output"], case.expected, tolerance)
    try:
        return code_tests.returns_the_same(json.loads(result["answer"]), case.expected, tolerance)
    except (ValueError, RecursionError):
        return False
