"""Verifies batches of answers: cheap cases in this process, computer algebra in a process pool with hard limits."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Literal, Self

from pebble import ProcessPool

from dapo_mega.rewards.bounds import MAX_ANSWER_CHARACTERS, bound_violation
from dapo_mega.rewards.extraction import check_extraction_style, extract_answer
from dapo_mega.rewards.grading import Grader, gold_answers, graded, stated_truth
from dapo_mega.rewards.worker import Compare, ready, run_comparison, start_worker

Outcome = Literal["correct", "wrong", "no_answer", "timeout", "crash", "refused"]
Forms = tuple[str, str]

# How often all open answers are tried again together after the pool itself broke, before one by one.
_SHARED_ATTEMPTS: Final = 2
_POOL_CHECK_INTERVAL_S: Final = 0.5
# The pool sees a comparison's end of time up to 0.1 s late, and ending a worker takes time, too.
_ENDING_S: Final = 0.2


@dataclass(frozen=True)
class Verdict:
    """Whether a response is correct, the answer it gave, and why.

    `wrong`: compared and different. `no_answer`: the extraction found none. `refused`: beyond the bounds of
    what is compared. `timeout`, `crash`: the comparison was ended, or ended its process.
    """

    correct: bool
    answer: str | None
    outcome: Outcome


class AnswerVerifier:
    """Compares responses with ground truths, in order, and survives whatever a response contains.

    Extraction and cheap comparisons run in the calling process. The rest goes to `num_workers` spawned
    processes, each held to `memory_limit_mib` MiB above its start. A comparison is ended in time for its
    verdict to be there after `time_limit_s` seconds. The pool starts when first needed; `close()`, or leaving
    the context, ends it.

    Spawned processes import the main script again under another name: it needs the usual
    `if __name__ == "__main__"` guard, and every import at its top level is paid once per worker.

    All styles compare as `grading` does. `numeric_tolerance` accepts numbers that differ from the truth by at most this
    share of it. A ground truth that is a JSON list of texts is met by any of them.

    `compare` decides on two LaTeX texts (candidate, truth) inside a worker, so it must be a module-level
    function. Raises ValueError for a non-positive count or limit and for an unknown extraction style.
    """

    def __init__(
        self,
        num_workers: int,
        time_limit_s: float,
        extraction: str = "dapo",
        *,
        compare: Compare | None = None,
        memory_limit_mib: int = 1024,
        numeric_tolerance: float = 0.0,
    ) -> None:
        for name, value in (
            ("num_workers", num_workers),
            ("time_limit_s", time_limit_s),
            ("memory_limit_mib", memory_limit_mib),
        ):
            if not value > 0:
                raise ValueError(f"{name}={value}; it must be positive")
        check_extraction_style(extraction)
        self._num_workers = num_workers
        self._time_limit_s = time_limit_s
        self._extraction = extraction
        if not 0 <= numeric_tolerance < 1:
            raise ValueError(f"numeric_tolerance={numeric_tolerance}; it must be at least 0 and below 1")
        self._grader = Grader(numeric_tolerance)
        self._compare = compare or partial(graded, tolerance=numeric_tolerance)
        self._memory_limit_mib = memory_limit_mib
        self._pool: ProcessPool | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; further calls of `verify` raise RuntimeError. May be called more than once."""
        self._closed = True
        self._stop_pool()

    def verify(self, items: Sequence[tuple[str, str | Sequence[str]]]) -> list[Verdict]:
        """Verdicts for (response, ground truth) pairs, in the order given. Of several ground truths any one will do."""
        if self._closed:
            raise RuntimeError("this AnswerVerifier is closed; create a new one")
        answers = [extract_answer(response, self._extraction) for response, _ in items]
        settled = [
            self._settle_any(answer, gold_answers(truth)) for answer, (_, truth) in zip(answers, items, strict=True)
        ]
        # Responses to one prompt often agree: each pair is compared once.
        open_forms = list(dict.fromkeys(form for found in settled if isinstance(found, list) for form in found))
        outcomes = dict(zip(open_forms, self._compare_in_pool(open_forms), strict=True)) if open_forms else {}
        return [
            found if not isinstance(found, list) else _best(answer, [outcomes[form] for form in found])
            for answer, found in zip(answers, settled, strict=True)
        ]

    def _settle_any(self, answer: str | None, golds: Sequence[str]) -> Verdict | list[Forms]:
        """The verdict against several right answers if it is cheap, else what workers must compare."""
        found = [self._settle(answer, gold) for gold in golds]
        verdicts = [one for one in found if isinstance(one, Verdict)]
        right = next((verdict for verdict in verdicts if verdict.correct), None)
        if right is not None:
            return right
        return [one for one in found if not isinstance(one, Verdict)] or verdicts[0]

    def _settle(self, answer: str | None, truth: str) -> Verdict | Forms:
        """The verdict if it is cheap, else the texts that a worker must compare."""
        if answer is None:
            return Verdict(False, None, "no_answer")
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return Verdict(False, answer, "refused")
        truth = stated_truth(truth)
        decided = self._grader.grade(answer, truth)
        if decided is not None:
            return Verdict(decided, answer, "correct" if decided else "wrong")
        if bound_violation(answer) or bound_violation(truth):
            return Verdict(False, answer, "refused")
        return answer, truth

    def _compare_in_pool(self, forms: list[Forms]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        remaining = list(range(len(forms)))
        for _ in range(_SHARED_ATTEMPTS):
            outcomes.update(self._try_all(forms, remaining))
            remaining = [index for index in remaining if index not in outcomes]
            if not remaining:
                break
            self._require_workers_to_start()
        # The pool broke repeatedly. Alone in a pool, an answer can break it only for itself.
        for index in remaining:
            outcomes.update(self._try_all(forms, [index]))
            outcomes.setdefault(index, "crash")
        return [outcomes[index] for index in range(len(forms))]

    def _try_all(self, forms: list[Forms], indices: list[int]) -> dict[int, Outcome]:
        """Outcomes by index, without those that were lost because the pool broke."""
        pool = self._running_pool()
        futures: dict[int, Future[bool]] = {}
        limit_s = max(self._time_limit_s - _ENDING_S, self._time_limit_s / 2)
        for index in indices:
            args = (self._compare, *forms[index], self._time_limit_s)
            try:
                futures[index] = pool.schedule(run_comparison, args=args, timeout=limit_s)
            except RuntimeError:  # pebble: the pool is no longer active
                break
        _wait_while_active(pool, futures.values())
        outcomes = {index: _outcome(future) for index, future in futures.items() if future.done()}
        if not pool.active:
            self._stop_pool()
        return {index: outcome for index, outcome in outcomes.items() if outcome is not None}

    def _require_workers_to_start(self) -> None:
        """Raises RuntimeError where the machine or the main script, not an answer, breaks the pool."""
        pool = self._running_pool()
        probe = pool.schedule(ready)
        _wait_while_active(pool, [probe])
        if not probe.done() or probe.exception() is not None:
            self._stop_pool()
            raise RuntimeError(
                "verification workers end before their first task; see their error output. Usual causes: "
                'a main script without `if __name__ == "__main__"`, too little memory, or a missing package'
            )

    def _running_pool(self) -> ProcessPool:
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self._num_workers,
                initializer=start_worker,
                initargs=(self._memory_limit_mib,),
                # Not fork: the parent holds threads, process groups and perhaps a CUDA context.
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool

    def _stop_pool(self) -> None:
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None


def _best(answer: str | None, outcomes: Sequence[Outcome]) -> Verdict:
    """The verdict on an answer that was compared with several right ones."""
    outcome = "correct" if "correct" in outcomes else outcomes[0]
    return Verdict(outcome == "correct", answer, outcome)


def _wait_while_active(pool: ProcessPool, futures: Iterable[Future[bool]]) -> None:
    """Wait until all futures are done or the pool broke: a broken pool leaves futures that never finish."""
    pending = set(futures)
    while pending and pool.active:
        _, pending = wait(pending, timeout=_POOL_CHECK_INTERVAL_S)


def _outcome(future: Future[bool]) -> Outcome | None:
    """Outcome of a finished comparison; None where the pool broke, which says nothing about this answer."""
    if future.cancelled():
        return None
    error = future.exception()
    if error is None:
        return "correct" if future.result() else "wrong"
    if isinstance(error, BrokenProcessPool):
        return None
    # Anything else ended this one comparison: ProcessExpired, MemoryError, an exception of a custom compare.
    return "timeout" if isinstance(error, TimeoutError) else "crash"
