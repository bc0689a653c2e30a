"""Verifies batches of answers: cheap cases in this process, computer algebra in processes with hard limits."""

import base64
import json
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final, Literal, Self

from dapo_mega.rewards.bounds import MAX_ANSWER_CHARACTERS, bound_violation
from dapo_mega.rewards.budget import StepBudget
from dapo_mega.rewards.extraction import check_extraction_style, extract_answer
from dapo_mega.rewards.grading import Grader, gold_answers, graded, stated_truth
from dapo_mega.rewards.processes import CallError, WorkerProcess
from dapo_mega.rewards.sandbox.worker import clock_limit_s
from dapo_mega.rewards.worker import Compare

Outcome = Literal["correct", "wrong", "no_answer", "timeout", "cut_short", "crash", "refused"]
Forms = tuple[str, str]

# Processor time of a first try, of later ones as a multiple of the one before, and of a try when the budget is used up.
_FIRST_TRY_S: Final = 0.1
_NEXT_TRY: Final = 4
_LAST_RESORT_S: Final = 0.05
# What answers that run out of time may cost in a step, in limits for each process.
_BUDGET_LIMITS: Final = 3
# For a process that does not even end when its time is over, since it is stopped.
_GRACE_S: Final = 20.0


@dataclass(frozen=True)
class Verdict:
    """Whether a response is correct, the answer it gave, and why.

    `wrong`: compared and different. `no_answer`: the extraction found none. `refused`: beyond the bounds of
    what is compared. `timeout`, `crash`: the comparison was ended, or ended its process. `cut_short`: it was ended
    before its limit, as the step's budget was used up.
    """

    correct: bool
    answer: str | None
    outcome: Outcome


class AnswerVerifier:
    """Compares responses with ground truths, in order, and survives whatever a response contains.

    Extraction and cheap comparisons run in the calling process. The rest goes to `num_workers` processes, each held to
    `memory_limit_mib` MiB above its start. A comparison may take `time_limit_s` seconds of processor time, or three
    times this and 2 s by the clock. All of a step that run out of time may together cost three times that for each
    process: beyond that, comparisons get the time that ordinary ones need, and no more. The processes start when first
    needed; `close()`, or leaving the context, ends them.

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
        self._time_limit_s = time_limit_s
        self._extraction = extraction
        if not 0 <= numeric_tolerance < 1:
            raise ValueError(f"numeric_tolerance={numeric_tolerance}; it must be at least 0 and below 1")
        self._grader = Grader(numeric_tolerance)
        self._compare = compare or partial(graded, tolerance=numeric_tolerance)
        arguments = {
            "trainer": os.getpid(),
            "compare": base64.b64encode(pickle.dumps(self._compare)).decode(),
            "memory_limit_mib": memory_limit_mib,
        }
        self._workers = [WorkerProcess("rewards.worker", arguments) for _ in range(num_workers)]
        self._idle: SimpleQueue[WorkerProcess] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="comparisons")
        self.budget = StepBudget(
            _BUDGET_LIMITS * num_workers * time_limit_s,
            "answers that take long to compare",
            f"one counts as wrong sooner than after {time_limit_s:g} s (reward/num_cut_short)",
        )
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; further calls of `verify` raise RuntimeError. May be called more than once."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def verify(self, items: Sequence[tuple[str, str | Sequence[str]]]) -> list[Verdict]:
        """Verdicts for (response, ground truth) pairs, in the order given. Of several ground truths any one will do."""
        if self._closed:
            raise RuntimeError("this AnswerVerifier is closed; create a new one")
        answers = [extract_answer(response, self._extraction) for response, _ in items]
        settled = [
            self._settle_any(answer, gold_answers(truth)) for answer, (_, truth) in zip(answers, items, strict=True)
        ]
        self.budget.begin_call()
        # Responses to one prompt often agree: each pair is compared once.
        open_forms = list(dict.fromkeys(form for found in settled if isinstance(found, list) for form in found))
        outcomes = dict(zip(open_forms, self._compare_all(open_forms), strict=True)) if open_forms else {}
        verdicts = []
        for answer, found in zip(answers, settled, strict=True):
            if isinstance(found, list):
                of_golds = [outcomes[form] for form in found]
                outcome = "correct" if "correct" in of_golds else of_golds[0]
                found = Verdict(outcome == "correct", answer, outcome)
            verdicts.append(found)
        return verdicts

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

    def _compare_all(self, forms: list[Forms]) -> list[Outcome]:
        """All with little time first, and again with more time what did not end, as far as the budget goes."""
        outcomes: dict[Forms, Outcome] = {}
        limit_s, open_forms = min(_FIRST_TRY_S, self._time_limit_s), forms
        while True:
            results = self._threads.map(partial(self._compare_one, limit_s=limit_s), open_forms)
            outcomes.update(zip(open_forms, results, strict=True))
            open_forms = [form for form in open_forms if outcomes[form] == "cut_short"]
            share_s = self.budget.spend() / max(1, len(open_forms))
            next_s = min(_NEXT_TRY * limit_s, self._time_limit_s, share_s)
            if not open_forms or next_s <= limit_s:
                break
            limit_s = next_s
        if open_forms:
            self.budget.warn()
        return [outcomes[form] for form in forms]

    def _compare_one(self, form: Forms, limit_s: float) -> Outcome:
        if self.budget.spend() <= 0:
            limit_s = min(limit_s, _LAST_RESORT_S)
        outcome = self._asked(form, limit_s)
        if outcome == "timeout":
            self.budget.spend(limit_s)
            return outcome if limit_s >= self._time_limit_s else "cut_short"
        return outcome

    def _asked(self, form: Forms, limit_s: float) -> Outcome:
        """What a process says; asked again where it was ended from outside. Raises RuntimeError where none starts."""
        worker = self._idle.get()
        try:
            for attempt in range(2):
                if self._closed:
                    break
                try:
                    worker.start()
                except CallError as error:
                    if not attempt and not self._closed:
                        continue
                    raise RuntimeError(f"no process that compares answers starts: {error}") from None
                try:
                    request = json.dumps([*form, limit_s]).encode()
                    return worker.ask(request, clock_limit_s(limit_s) + _GRACE_S, "a comparison")["outcome"]  # type: ignore[no-any-return]
                except CallError:
                    continue
            return "crash"
        finally:
            self._idle.put(worker)
