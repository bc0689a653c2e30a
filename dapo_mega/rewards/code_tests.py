"""Tests of programs as the columns of public datasets hold them, and what counts as the expected output.

| form | datasets |
|---|---|
| a record of `inputs` and `outputs`, with `fn_name` where a function is called | APPS, TACO, Eurus-2, DeepCoder |
| a list of {`input`, `output`, `testtype`}, with the function's name in another column | LiveCodeBench |
| a list of assert statements | MBPP, AceCode |
| Python code: asserts, `check(candidate)`, test functions, test cases | HumanEval, KodCode |
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import zip_longest
from typing import Any

_MAX_NUMBER_CHARACTERS = 400


@dataclass(frozen=True)
class ProgramCase:
    """A program reads `stdin` and must print `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallCase:
    """The function `name`, of the module or of its class Solution, must return `expected`."""

    name: str
    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True)
class TestsCase:
    """Test code must raise nothing. `setup` is run before it; `entry_point` is what check(candidate) is given.

    `weight`: how many statements of a list it stands for.
    """

    __test__ = False  # For pytest.

    setup: str
    code: str
    entry_point: str
    weight: int = 1


Case = ProgramCase | CallCase | TestsCase


def read_cases(tests: Any, *, function: str = "", setup: str = "", entry_point: str = "") -> list[Case]:
    """The cases of one row. Raises ValueError where the column holds no tests, or in none of the forms above."""
    tests = _parsed(tests)
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        cases = _from_pairs(tests["inputs"], tests["outputs"], str(tests.get("fn_name") or function))
    elif isinstance(tests, str):
        cases = [TestsCase(setup, tests, entry_point)] if tests.strip() else []
    elif _is_list(tests) and all(isinstance(item, str) for item in tests):
        cases = [TestsCase(setup, item, entry_point) for item in tests]
    elif _is_list(tests) and all(isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in tests):
        cases = [_from_record(item, function) for item in tests]
    else:
        raise ValueError(
            f"tests are {_shown(tests)}; give a record of inputs and outputs, a list of {{input, output}}, a list of "
            "assert statements, or Python code"
        )
    if not cases:
        raise ValueError("there are no tests")
    return cases


def joined(cases: Sequence[Case]) -> list[Case]:
    """The same with adjacent test code in one case, which is run once. Passes if all pass."""
    result: list[Case] = []
    for case in cases:
        last = result[-1] if result else None
        if isinstance(case, TestsCase) and isinstance(last, TestsCase) and not case.entry_point:
            result[-1] = TestsCase(last.setup, f"{last.code}\n{case.code}", "", last.weight + case.weight)
        else:
            result.append(case)
    return result


def _parsed(tests: Any) -> Any:
    """Text that is JSON as what it holds; other text as it is, which is code."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "[", '"'):
        try:
            return json.loads(tests)
        except (ValueError, RecursionError):
            return tests
    return tests.tolist() if hasattr(tests, "tolist") else tests


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _from_pairs(inputs: Any, outputs: Any, function: str) -> list[Case]:
    inputs, outputs = _parsed(inputs), _parsed(outputs)
    if not _is_list(inputs) or not _is_list(outputs) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs are not two lists of one length")
    if not function:
        return [ProgramCase(_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
    return [_call(function, given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]


def _from_record(record: Mapping[str, Any], function: str) -> Case:
    if record.get("testtype", "stdin") == "stdin" and not function:
        return ProgramCase(_text(record["input"]), _text(record["output"]))
    if not function:
        raise ValueError("a test calls a function, and no column has its name; set function_column")
    return _call(function, record["input"], record["output"])


def _call(function: str, given: Any, wanted: Any) -> CallCase:
    """Arguments are a list, or text with one JSON value per line."""
    try:
        arguments = (
            [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
        )
        expected = json.loads(wanted) if isinstance(wanted, str) and isinstance(given, str) else wanted
        json.dumps([arguments, expected])
    except (ValueError, TypeError) as error:
        raise ValueError(f"arguments and result of {function} must be JSON: {error}") from None
    if not _is_list(arguments):
        raise ValueError(f"arguments of {function} are {_shown(arguments)}; give a list")
    return CallCase(function, tuple(arguments), expected)


def _text(value: Any) -> str:
    """Standard input or output. Some datasets hold its lines."""
    if isinstance(value, str):
        return value
    if _is_list(value) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ValueError(f"standard input or output is {_shown(value)}; give text, or set function_column")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def prints_the_same(printed: str, expected: str, tolerance: float) -> bool:
    """Whether two outputs agree line by line, without white space at the ends of lines and of the output.

    Where words of a line differ, they must be equal numbers; where the expected one has a decimal point, within the
    tolerance, absolute or relative.
    """
    got, wanted = (text.strip().splitlines() for text in (printed, expected))
    if len(got) != len(wanted):
        return False
    words = (pair for lines in zip(got, wanted, strict=True) for pair in zip_longest(*map(str.split, lines)))
    return all(mine == theirs or _same_number(mine, theirs, tolerance) for mine, theirs in words)


def _same_number(got: str | None, wanted: str | None, tolerance: float) -> bool:
    if got is None or wanted is None or max(len(got), len(wanted)) > _MAX_NUMBER_CHARACTERS:
        return False
    try:
        mine, theirs = Decimal(got), Decimal(wanted)
        if not (mine.is_finite() and theirs.is_finite()):
            return False
        return mine == theirs or ("." in wanted and _close(float(mine), float(theirs), tolerance))
    except (InvalidOperation, OverflowError, ValueError):
        return False


def _close(got: float, wanted: float, tolerance: float) -> bool:
    return math.isclose(got, wanted, rel_tol=tolerance, abs_tol=tolerance)


def returns_the_same(returned: Any, expected: Any, tolerance: float) -> bool:
    """Whether an encoded value (`sandbox/plain.py`) is the expected one, which is JSON.

    Tuples equal lists. An expected list of one element also stands for this element, as in APPS.
    """
    if _equals(returned, expected, tolerance):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _equals(returned, expected[0], tolerance)


def _equals(returned: Any, expected: Any, tolerance: float) -> bool:
    # Nothing is built from what the solution sent: sets and dictionaries can be made to take very long.
    kind, content = _tagged(returned)
    if isinstance(expected, Mapping):
        return kind == "dict" and len(content) == len(expected) and _same_items(content, expected, tolerance)
    if _is_list(expected):
        return (
            kind in ("list", "tuple")
            and len(content) == len(expected)
            and all(_equals(mine, theirs, tolerance) for mine, theirs in zip(content, expected, strict=True))
        )
    if kind == "int":
        return isinstance(expected, int) and not isinstance(expected, bool) and content == hex(expected)
    if kind or type(returned) is bool or type(expected) is bool or expected is None or returned is None:
        return not kind and returned is expected
    if isinstance(returned, str) or isinstance(expected, str):
        return bool(returned == expected)
    return bool(returned == expected) or (isinstance(expected, float) and _close(returned, expected, tolerance))


def _tagged(returned: Any) -> tuple[str, Any]:
    if isinstance(returned, list):
        return "list", returned
    if isinstance(returned, dict) and len(returned) == 1:
        ((kind, content),) = returned.items()
        if kind == "int" or isinstance(content, list):
            return kind, content
    return ("unknown", None) if isinstance(returned, dict) else ("", None)


def _same_items(pairs: list[Any], expected: Mapping[str, Any], tolerance: float) -> bool:
    """JSON has texts as keys, where the function returned perhaps numbers."""
    wanted = {str(key): value for key, value in expected.items()}
    seen = set()
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
            return False
        key = str(pair[0])
        if key in seen or key not in wanted or not _equals(pair[1], wanted[key], tolerance):
            return False
        seen.add(key)
    return True
