"""The program of a process that calls a reward function: loads it, then scores one batch at a time.

It is started by `WorkerProcess` with the numbers of pipes for batches and results, and of a lifeline, whose end means
that the trainer is gone. Batches arrive pickled, results leave as JSON. Standard output and error belong to the
function, which runs in a kept process (see `keeper`).
"""

import asyncio
import contextlib
import functools
import inspect
import math
import numbers
import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dapo_mega.algorithms.own_code import MisuseError, check_call, described, load_function
from dapo_mega.rewards.keeper import keep
from dapo_mega.rewards.processes import NUMBER
from dapo_mega.rewards.sandbox.frames import FrameError, read_body, write_frame
from dapo_mega.rewards.worker import limit_memory
from dapo_mega.types import METRIC_PART

RESULT_KEYS: Final = ("score", "correct", "parts", "answer")
_MAX_ANSWER_CHARACTERS: Final = 10_000
_MAX_DETAIL_CHARACTERS: Final = 20_000

Function = Callable[[list[dict[str, Any]]], Any]


def main(
    requests_fd: int, answers_fd: int, lifeline_fd: int, path: str, memory_limit_mib: int, settings: Mapping[str, Any]
) -> None:
    """Serve until the trainer closes the pipe of requests."""
    keep(
        lambda: _serve(requests_fd, answers_fd, path, memory_limit_mib, settings), lifeline_fd, requests_fd, answers_fd
    )


def _serve(requests: int, answers: int, path: str, memory_limit_mib: int, settings: Mapping[str, Any]) -> None:
    own_pid = os.getpid()
    with asyncio.Runner() as runner:
        try:
            function = load_reward(path, settings)
            limit_memory(memory_limit_mib)
            answer: dict[str, Any] = {"ready": True, "number": 0}
        except MisuseError as error:
            answer = {"misuse": str(error), "number": 0}
        write_frame(answers, answer)
        while "ready" in answer and (request := read_body(requests, 2**32)) is not None:
            (number,) = NUMBER.unpack_from(request)
            records = pickle.loads(memoryview(request)[NUMBER.size :])
            answer = {**_answer(function, records, runner), "ready": True, "number": number}
            if os.getpid() != own_pid:
                return  # A fork of the function's that came back: its answer would be taken for that of the next call.
            try:
                write_frame(answers, answer)
            except FrameError as error:
                write_frame(answers, {"failure": f"it returned too much: {error}", "detail": "", "number": number})


def load_reward(path: str, settings: Mapping[str, Any]) -> Function:
    """The function of FILE.py:NAME or package.module:NAME with its settings, or what a class makes of them. Raises
    MisuseError if there is none that takes a list."""
    function = load_function(path, before_others=True)
    name = path.rpartition(":")[2]
    if inspect.isclass(function):
        check_call(function, (), settings)
        try:
            made: Any = function(**settings)
        except Exception as error:
            raise MisuseError(f"it raises {described(error, path.rpartition(':')[0])}") from error
        if not callable(made):
            raise MisuseError("what the class makes cannot be called; give it a method __call__")
        function = made
    elif settings:
        check_call(function, ("records",), settings)
        return functools.update_wrapper(functools.partial(function, **settings), function)
    with contextlib.suppress(ValueError):  # Some built-in functions have no signature to ask for.
        signature = inspect.signature(function)
        try:
            signature.bind([])
        except TypeError:
            raise MisuseError(
                f"{name}{signature} cannot be called with one argument; it must take the list of records, as in "
                f"def {name}(records)"
            ) from None
    return function


def _answer(function: Function, records: list[dict[str, Any]], runner: asyncio.Runner) -> dict[str, Any]:
    """`scores`, or `misuse`, or `failure` with `detail`."""
    for record in records:
        record["token_ids"] = record["token_ids"].tolist()
    try:
        returned = function(records)
        if inspect.isawaitable(returned):
            returned = runner.run(_wait_for(returned))
    except BaseException as error:  # SystemExit and KeyboardInterrupt of the function too.
        source = inspect.unwrap(function)
        file = None
        with contextlib.suppress(TypeError):  # Compiled code has none.
            file = inspect.getsourcefile(source if inspect.isroutine(source) else type(source))
        return {
            "failure": described(error, file or "") + _absent_field(error, records),
            "detail": "".join(traceback.format_exception(error))[-_MAX_DETAIL_CHARACTERS:],
        }
    try:
        return {"scores": checked(returned, len(records))}
    except MisuseError as error:
        return {"misuse": str(error)}


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _absent_field(error: BaseException, records: Sequence[Mapping[str, Any]]) -> str:
    """What a KeyError may mean to say: a column that the data lacks."""
    if not isinstance(error, KeyError) or not error.args or not records:
        return ""
    key, record = error.args[0], records[0]
    if key in record["fields"]:
        return f"; {key!r} is a column of the row, so it is in record['fields']"
    columns = ", ".join(record["fields"]) or "none"
    return f"; record['fields'], the row's other columns, has: {columns}"


def checked(returned: Any, expected: int) -> list[list[Any]]:
    """[score, correct, parts, answer] of every record. Raises MisuseError for anything but one result per record."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()  # An array or tensor.
    if not isinstance(returned, list | tuple):
        raise MisuseError(
            f"it returned {_shown(returned)}; it must return a list with one result per record, {expected} here"
        )
    if len(returned) != expected:
        raise MisuseError(f"it returned {len(returned)} results for {expected} records; return one per record")
    return [_checked_result(result) for result in returned]


def _checked_result(result: Any) -> list[Any]:
    if not isinstance(result, Mapping):
        return [_number(result, "a score"), None, {}, None]
    if "score" not in result:
        raise MisuseError(f"it returned a result without 'score': {_shown(result)}; keys are {', '.join(RESULT_KEYS)}")
    if unknown := [key for key in result if key not in RESULT_KEYS]:
        raise MisuseError(
            f"it returned a result with the unknown key {unknown[0]!r}; keys are {', '.join(RESULT_KEYS)}, and numbers "
            f"of your own go into parts"
        )
    correct, parts, answer = (result.get(key) for key in RESULT_KEYS[1:])
    if correct is not None and type(correct).__name__ not in ("bool", "bool_"):
        raise MisuseError(f"it returned correct={_shown(correct)}; it must be True, False or None")
    if not (parts is None or isinstance(parts, Mapping)):
        raise MisuseError(f"it returned parts={_shown(parts)}; they must be a dict of names and numbers")
    if not (answer is None or isinstance(answer, str)):
        raise MisuseError(f"it returned answer={_shown(answer)}; it must be text or None")
    named = {_name(name): _number(value, f"parts[{name!r}]") for name, value in (parts or {}).items()}
    if answer is not None:
        # Half of a surrogate pair is text that no file can hold.
        answer = answer[:_MAX_ANSWER_CHARACTERS].encode("utf-8", "replace").decode()
    return [_number(result["score"], "score"), None if correct is None else bool(correct), named, answer]


def _name(name: Any) -> str:
    if not isinstance(name, str) or not METRIC_PART.fullmatch(name):
        raise MisuseError(
            f"it returned a part called {_shown(name)}; names have letters, digits and any of '_.@-' only"
        )
    return name


def _number(value: Any, what: str) -> float:
    """The value as a float, which may be NaN or infinite."""
    if hasattr(value, "tolist"):
        value = value.tolist()  # A number of numpy or torch.
    if isinstance(value, numbers.Number) and not isinstance(value, complex):
        try:
            return float(value)  # type: ignore[arg-type]
        except (OverflowError, ValueError):
            return math.inf
    raise MisuseError(f"it returned {what}={_shown(value)}; it must be a number")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "?"
    text = text if len(text) <= 60 else text[:60] + "..."
    return text if value is None else f"{text} ({type(value).__name__})"
