"""How the time of a call grows with the length of its text, whatever else this machine does meanwhile."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")

_SHORT, _LONG = 10_000, 20_000
_LINEAR = 3.0
"""Between 2 for linear and 4 for quadratic time."""
_BARELY_MEASURABLE_S = 0.01


def growing_too_fast(
    call: Callable[[Case, str], object], cases: Iterable[Case], text: Callable[[Case, int], str]
) -> dict[Case, float]:
    """The cases for which twice the text takes far more than twice the processor time, with how much more.

    `text` makes a case's text of about so many characters.
    """
    return {case: factor for case in cases if (factor := _factor(call, case, text)) > _LINEAR}


def _factor(call: Callable[[Case, str], object], case: Case, text: Callable[[Case, int], str]) -> float:
    factors = []
    for _ in range(3):  # A collection of garbage in one of them is no growth.
        short, long = (_processor_s(call, case, text(case, length)) for length in (_SHORT, _LONG))
        factors.append(long / max(short, _BARELY_MEASURABLE_S / 2))
        if factors[-1] <= _LINEAR or long > 0.5:
            break
    return min(factors)


def _processor_s(call: Callable[[Case, str], object], case: Case, text: str) -> float:
    begin = time.process_time()
    call(case, text)
    return time.process_time() - begin
