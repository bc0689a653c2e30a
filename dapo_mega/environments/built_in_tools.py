"""Tools that come with the package."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dapo_mega.environments.failures import EnvironmentFailure
from dapo_mega.rewards.expressions import value_of
from dapo_mega.rewards.sandbox.client import Isolation, Sandbox, SandboxError, SandboxLimits, start_sandbox, try_out

_MAX_EXPRESSION_CHARACTERS: Final = 300
_MAX_PROGRAM_CHARACTERS: Final = 200_000
# How programs and people write what the reader of expressions takes as LaTeX.
_SIGNS: Final = str.maketrans("×⋅÷−()", "**/-{}")
_SPELLINGS: Final = (
    (r"\*\*", "^"),
    (r"(?<![\d.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)", r"{\1*10^{\2}}"),
    (r"\^\s*([+-]?(?:\d+\.?\d*|\.\d+))", r"^{\1}"),
    (r"(?<![\\A-Za-z])(sqrt|exp|ln|sin|cos|tan|pi)(?![A-Za-z])", r"\\\1"),
    (r"(?<![\\A-Za-z])a(?:rc)?(sin|cos|tan)(?![A-Za-z])", r"\\arc\1"),
    (r"(?<=\d)\.(?!\d)", ""),
)
_OWN_FRAMES: Final = re.compile(r'  File "[^"]*sandbox/solution\.py".*\n(?:    .*\n)*')
_held: set[tuple[Isolation, SandboxLimits]] = set()


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression, to 15 digits; whole numbers exactly to 40 digits.

    Args:
        expression: Numbers with + - * / ^ ! and brackets, sqrt, exp, ln, sin, cos, tan, asin, acos, atan (radians), pi
            and e, such as 3*(2+1)^2; at most 300 characters.
    """
    from mpmath import nstr  # Imported here: only those who calculate need it.

    if len(expression) > _MAX_EXPRESSION_CHARACTERS:
        raise ValueError(f"the expression has more than {_MAX_EXPRESSION_CHARACTERS} characters")
    text = expression.translate(_SIGNS)
    for pattern, written in _SPELLINGS:
        text = re.sub(pattern, written, text)
    value = value_of(text)
    if value is None:
        raise ValueError(f"{expression!r} has no value, or is not written as described")
    if abs(value.imag) > 1e-30 * abs(value):
        raise ValueError(f"the value of {expression!r} is no real number")
    exact: str = nstr(value.real, 40, max_fixed=40)
    rounded: str = nstr(value.real, 15)
    return (exact if exact.endswith(".0") else rounded).removesuffix(".0")


class PythonTool:
    """Runs programs in a sandbox, each in a fresh process. It starts with the first program, in 0.2 s, and ends with
    the thread that ran it. `time_limit_s` is processor time; the clock allows three times as much and 2 s."""

    def __init__(
        self,
        time_limit_s: float = 5.0,
        memory_limit_mib: int = 512,
        modules: Sequence[str] = (),
        isolation: Isolation | None = None,
    ) -> None:
        self._time_limit_s = time_limit_s
        self._limits = SandboxLimits(memory_mib=memory_limit_mib, modules=tuple(modules))
        self._isolation = isolation
        self._sandbox: Sandbox | None = None

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints, and its error if it fails. Every call is a new process:
        variables, imports and files of earlier calls are gone. There is no input and no network; time and memory are
        limited.

        Args:
            code: A whole program that prints its results.
        """
        if len(code) > _MAX_PROGRAM_CHARACTERS:
            raise ValueError(f"the program has more than {_MAX_PROGRAM_CHARACTERS} characters")
        try:
            with self._started().solution(code) as run:
                result = run({"kind": "program", "stdin": "", "limit_s": self._time_limit_s})
        except SandboxError as error:
            raise EnvironmentFailure(f"the sandbox of the tool python: {error}") from error
        cause = f"The program {result['cause']}." if result["cause"] else ""
        parts = (result["output"].removesuffix("\n"), _OWN_FRAMES.sub("", result["error"]).strip(), cause)
        return "\n".join(filter(None, parts)) or "The program printed nothing."

    def close(self) -> None:
        """End the sandbox. Another program would start another one."""
        if self._sandbox is not None:
            self._sandbox.close()
        self._sandbox = None

    def _started(self) -> Sandbox:
        """A sandbox of a kind that was tried out in this process. Raises SandboxError."""
        if self._sandbox is None or not self._sandbox.is_alive:
            self.close()
            self._sandbox = start_sandbox(os.getpid() * 64, self._limits, self._isolation)
        kind = (self._sandbox.isolation, self._limits)
        if kind not in _held:
            try_out(self._sandbox, self._limits)
            _held.add(kind)
        return self._sandbox


BUILT_IN: Final[Mapping[str, Callable[..., Any]]] = {"calculator": calculator, "python": PythonTool}
