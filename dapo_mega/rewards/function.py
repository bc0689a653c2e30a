"""Scores responses with a reward function of the user's, in processes of its own, and survives what it does."""

import logging
import pickle
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from dapo_mega.algorithms.own_code import MisuseError
from dapo_mega.errors import InputError
from dapo_mega.rewards.budget import Budgeted, StepBudget
from dapo_mega.rewards.processes import CallError, OutputLog, WorkerProcess
from dapo_mega.rewards.records import LARGEST, RewardRecord, Score, ScoringFailure, plain_record

logger = logging.getLogger(__name__)

_HOPELESS: Final = 8
"""So many calls that hang in a row end an attempt."""
_BUDGET_LIMITS: Final = 20
"""Calls of one step that fail may take so many time limits for each process."""
_MAX_PART_NAMES: Final = 100

Result = Score | ScoringFailure


class FunctionReward(Budgeted):
    """Calls the function `path` with up to `max_responses` records at a time, in `num_workers` processes that start
    when needed.

    A call that raises, dies or takes longer than `time_limit_s` gives no scores; its records are then tried again one
    by one, up to `retries` times, or once where a record hangs alone, as long as calls that fail have not used up what
    they may take in a step. What is left is a `ScoringFailure`.
    """

    def __init__(
        self,
        path: str,
        *,
        settings: Mapping[str, Any] | None = None,
        num_workers: int = 2,
        time_limit_s: float = 60.0,
        memory_limit_mib: int = 4096,
        max_responses: int = 64,
        retries: int = 2,
    ) -> None:
        self._path = path
        self._max_responses = max_responses
        self._retries = retries
        self._output = OutputLog()
        self._time_limit_s = time_limit_s
        budget_s = _BUDGET_LIMITS * num_workers * time_limit_s
        self.budget = StepBudget(budget_s, f"calls of {path} that fail", "no more are made (reward/num_failed)")
        arguments = {"path": path, "memory_limit_mib": memory_limit_mib, "settings": settings or {}}
        self._workers = [WorkerProcess("rewards.function_worker", arguments, self._output) for _ in range(num_workers)]
        self._idle: SimpleQueue[WorkerProcess] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward-function")
        self._num_hung_in_a_row = 0
        self._part_names: set[str] = set()
        self._closed = False

    def log_to(self, path: Path) -> None:
        """Write what the function prints into this file from now on."""
        self._output.write_to(path)

    def load(self) -> None:
        """Import the function, in one process. Raises InputError if that is not possible."""
        worker = self._idle.get()
        try:
            worker.start()
        except (CallError, MisuseError) as error:
            raise InputError(self._named(error)) from None
        finally:
            self._idle.put(worker)

    def score(self, records: Sequence[RewardRecord]) -> list[Result]:
        """One result per record, in order. Raises InputError for a function that is not there, or returns something of
        another form."""
        self.budget.begin_call()
        plain = [plain_record(record) for record in records]
        results: dict[int, Result] = {}
        errors: dict[int, CallError] = {}
        hung_alone: set[int] = set()
        batches = [
            list(range(start, min(start + self._max_responses, len(plain))))
            for start in range(0, len(plain), self._max_responses)
        ]
        for _ in range(1 + self._retries):
            for batch, outcome in zip(batches, self._call_all(batches, plain), strict=True):
                if isinstance(outcome, CallError):
                    errors.update(dict.fromkeys(batch, outcome))
                    hung_alone.update(batch if outcome.hung and len(batch) == 1 else ())
                else:
                    results.update(zip(batch, map(self._result, outcome), strict=True))
            open_indices = [index for index in errors if index not in results and index not in hung_alone]
            # Mixed, so that calls in a row are not all about one prompt.
            batches = [[index] for index in random.Random(0).sample(open_indices, len(open_indices))]
        for index in errors.keys() - results.keys():
            results[index] = ScoringFailure(self._named(errors[index]), errors[index].detail)
        return [results[index] for index in range(len(plain))]

    def close(self) -> None:
        """End all processes, with what they have started. May be called more than once."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.stop()
        self._output.close()

    def _call_all(
        self, batches: Sequence[Sequence[int]], plain: Sequence[dict[str, Any]]
    ) -> list[list[list[Any]] | CallError]:
        self._num_hung_in_a_row = 0
        futures: list[Future[list[list[Any]] | CallError]] = [
            self._threads.submit(self._call, [plain[index] for index in batch]) for batch in batches
        ]
        try:
            return [future.result() for future in futures]
        except MisuseError as error:
            raise InputError(self._named(error)) from None
        finally:
            for future in futures:
                future.cancel()

    def _call(self, records: Sequence[dict[str, Any]]) -> list[list[Any]] | CallError:
        if self._closed or self._num_hung_in_a_row >= _HOPELESS:
            return CallError(f"not tried, as {self._num_hung_in_a_row} calls in a row hung")
        if self.budget.spend() <= 0:
            self.budget.warn()
            return CallError("not tried, as calls that failed have used up the time that they have in a step")
        worker, begin = self._idle.get(), time.monotonic()
        try:
            what = f"a call with {len(records)} responses"
            request = pickle.dumps(list(records), pickle.HIGHEST_PROTOCOL)
            results = worker.ask(request, self._time_limit_s, what).get("scores")
            if not isinstance(results, list) or len(results) != len(records) or not all(map(_is_score, results)):
                worker.stop()
                raise CallError(f"the process answered {what} with something else than scores")
        except CallError as error:
            self.budget.spend(min(time.monotonic() - begin, self._time_limit_s))
            if error.hung and not self._num_hung_in_a_row and not self._closed:
                logger.warning("%s", self._named(error))
            self._num_hung_in_a_row = self._num_hung_in_a_row + 1 if error.hung else 0
            return error
        finally:
            self._idle.put(worker)
        self._num_hung_in_a_row = 0
        return results

    def _result(self, returned: Sequence[Any]) -> Result:
        value, correct, parts, answer = returned
        self._part_names.update(parts)
        if len(self._part_names) > _MAX_PART_NAMES:
            raise InputError(
                f"reward function {self._path}: it returned more than {_MAX_PART_NAMES} names of parts, such as "
                f"{min(self._part_names)!r}; each is a metric, so use few"
            )
        for name, number in (("score", value), *parts.items()):
            if not abs(number) <= LARGEST:
                allowed = f"it must be a number from {-LARGEST:g} to {LARGEST:g}"
                return ScoringFailure(f"reward function {self._path}: it returned {name}={number}; {allowed}")
        return Score(value, correct, parts, answer)

    def _named(self, error: Exception) -> str:
        return f"reward function {self._path}: {error}"


def _is_score(score: Any) -> bool:
    """Whether it is what `function_worker` sends, as the function can write to its descriptors, too."""
    return isinstance(score, list) and [type(item) for item in score[::2]] == [float, dict]
