"""How the benchmarks measure: several sides in turn, wall clock and CPU seconds, medians.

Machines are shared: sides that take turns meet the same disturbances, and the CPU seconds of a one-threaded process
hardly notice them. Ratios are therefore medians over rounds of the quotient within one round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Duration:
    """One measurement, in seconds."""

    wall: float
    cpu: float


def measure(action: Callable[[], object]) -> Duration:
    """Run `action` once. CPU seconds are those of all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Duration(time.perf_counter() - wall, time.process_time() - cpu)


def take_turns(
    sides: Mapping[str, Callable[[], Duration]], num_rounds: int, limit_s: float = 240.0
) -> dict[str, list[Duration]]:
    """Measure every side once per round, after one round that does not count.

    Stops after `num_rounds`, or, after three at least, when `limit_s` seconds have passed.
    """
    for run in sides.values():
        run()
    durations: dict[str, list[Duration]] = {name: [] for name in sides}
    started = time.perf_counter()
    for done in range(num_rounds):
        if done >= 3 and time.perf_counter() - started > limit_s:
            break
        for name, run in sides.items():
            durations[name].append(run())
    return durations


def median_cpu(durations: Sequence[Duration]) -> float:
    return statistics.median(d.cpu for d in durations)


def median_wall(durations: Sequence[Duration]) -> float:
    return statistics.median(d.wall for d in durations)


def speed_ratio(ours: Sequence[Duration], theirs: Sequence[Duration]) -> Duration:
    """How many times as fast `ours` is: medians over the rounds, above 1 where it is faster."""
    pairs = list(zip(ours, theirs, strict=True))
    return Duration(
        statistics.median(b.wall / a.wall for a, b in pairs), statistics.median(b.cpu / a.cpu for a, b in pairs)
    )
