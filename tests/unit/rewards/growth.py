"""How the time of a call grows with the length of its text, whatever else this machine does meanwhile."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")

LINEAR, QUADRATIC = 3.0, 6.0
"""Most growth of the time from a text to one of twice its length: between 2, 4 and 8 for powers of 1, 2 and 3."""
_BARELY_MEASURABLE_S = 0.01


def growing_too_fast(
    call: Callable[[Case, str], object],
    cases: Iterable[Case],
    text: Callable[[Case, int], str],
    *,
    length: int = 10_000,
    most: float = LINEAR,
) -> dict[Case, float]:
    """The cases for which twice the text takes more than `most` times this thread's processor time, with how much more.

    `text` makes a case's text of about so many characters: `length`, and twice that.
    """
    return {case: factor for case in cases if (factor := _factor(call, case, text, length, most)) > most}


def _factor(
    call: Callable[[Case, str], object], case: Case, text: Callable[[Case, int], str], length: int, most: float
) -> float:
    factors = []
    for _ in range(3):  # A collection of garbage in one of them, or the first call of a library, is no growth.
        short, long = (_processor_s(call, case, text(case, size)) for size in (length, 2 * length))
        factors.append(long / max(short, _BARELY_MEASURABLE_S / 2))
        if factors[-1] <= most or (long > 0.5 and len(factors) > 1):
            break
    return min(factors)


def _processor_s(call: Callable[[Case, str], object], case: Case, text: str) -> float:
    begin = time.thread_time()
    call(case, text)
    return time.thread_time() - begin
