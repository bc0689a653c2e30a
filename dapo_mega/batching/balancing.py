"""Partitions items into bins of even load: longest first into the emptiest bin, then one local search.

Loads may have several dimensions (tokens and cost).
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# The penalty of a load is its 128th power; the exponent is about the inverse of the unevenness that matters.
_NUM_SQUARINGS = 7
_NUM_PARTNERS = 8
_MAX_ROUNDS = 800
_MAX_COLUMNS = 32


def best_fit_count(sizes: Ints, capacity: int) -> int:
    """The number of bins of `capacity` that best-fit decreasing needs: each item, the largest first, goes to the
    fullest bin with room. Every size is at most `capacity`."""
    rooms: list[int] = []
    for size in np.sort(sizes)[::-1].tolist():
        k = bisect.bisect_left(rooms, size)
        room = capacity if k == len(rooms) else rooms.pop(k)
        bisect.insort(rooms, room - size)
    return len(rooms)


def partition(sizes: Ints, num_parts: int) -> list[list[int]]:
    """Assign n items with `sizes` [n] to parts, the largest item first, each to the part with the least load."""
    emptiest = [(0, p) for p in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for i in np.argsort(-sizes, kind="stable").tolist():
        load, p = emptiest[0]
        parts[p].append(i)
        heapq.heapreplace(emptiest, (load + int(sizes[i]), p))
    return parts


def partition_equal_count(sizes: Floats, num_parts: int) -> list[list[int]]:
    """Assign n items with `sizes` [n] to parts of n / `num_parts` items each; `num_parts` divides n.

    In each round every part gets one item; the part with the least load gets the round's largest.
    """
    order = np.argsort(-sizes, kind="stable").reshape(-1, num_parts)
    loads = np.zeros(num_parts)
    rounds = []
    for row in order:
        dealt = np.empty(num_parts, dtype=np.int64)
        dealt[np.argsort(loads, kind="stable")] = row
        loads += sizes[dealt]
        rounds.append(dealt)
    parts: list[list[int]] = np.stack(rounds, axis=1).tolist()
    return parts


def rebalance(
    bins: Sequence[Sequence[int]], sizes: Floats, limits: Floats, *, bins_per_rank: int = 1
) -> list[list[int]]:
    """Local search: while some bin exceeds a limit, make the swap or move of an item that reduces the overload most.

    `sizes` [n, d] are the items' loads in d dimensions and `limits` [d] the limits. The limit of the first dimension
    (tokens) is per bin, the others (cost) per rank of `bins_per_rank` consecutive bins.

    The bin furthest over its limits exchanges one item with one of the few bins that have most room in its worst
    dimension. Each exchange lowers the sum of the two bins' penalties, load ** 128, so the search cannot cycle. A bin
    that no exchange helps is skipped until another exchange changes it. The number of rounds is bounded.
    """
    scaled = np.vstack([sizes / limits, np.zeros(len(limits))])
    empty = len(sizes)
    width = max(len(indices) for indices in bins) + 2
    slots = np.full((len(bins), width), empty)
    for b, indices in enumerate(bins):
        slots[b, : len(indices)] = indices
    loads = np.stack([scaled[row].sum(axis=0) for row in slots])
    by_rank = loads[:, 1:].reshape(len(bins) // bins_per_rank, bins_per_rank, len(limits) - 1)
    loads[:, 1:] = np.repeat(by_rank.sum(axis=1), bins_per_rank, axis=0)
    stuck = np.zeros(len(bins), dtype=bool)
    stride = -(-width // _MAX_COLUMNS)
    for round_ in range(_MAX_ROUNDS):
        height = np.where(stuck, 0.0, loads.max(axis=1))
        worst = int(height.argmax())
        if height[worst] <= 1.0:
            break
        columns = np.arange(round_ % stride, width, stride)
        if columns[-1] != width - 1:
            columns = np.append(columns, width - 1)  # An empty slot: a swap with it is a move.
        partner = _exchange(slots, loads, scaled, worst, columns, bins_per_rank)
        if partner is None:
            stuck[worst] = True
        else:
            stuck[partner] = False
    return [[int(i) for i in row if i != empty] for row in slots]


def _exchange(slots: Ints, loads: Floats, scaled: Floats, worst: int, columns: Ints, bins_per_rank: int) -> int | None:
    """Make the best exchange of one item between bin `worst` and another; returns the other bin, None without gain."""
    reference = loads[worst].max()
    others = np.argsort((loads * _penalties(loads[worst] / reference)).sum(axis=1), kind="stable")[:_NUM_PARTNERS]
    others = others[others != worst]
    if not len(others):
        return None
    delta = scaled[slots[others][:, columns].reshape(-1)][None] - scaled[slots[worst, columns]][:, None]
    other_loads = np.repeat(loads[others], len(columns), axis=0)[None]
    before = _penalties(loads[worst] / reference) + _penalties(other_loads / reference)
    after = _penalties((loads[worst] + delta) / reference) + _penalties((other_loads - delta) / reference)
    gain = (before - after).sum(axis=-1)
    mine, k = divmod(int(gain.argmax()), gain.shape[1])
    if gain[mine, k] <= 1e-6:
        return None
    partner, theirs = int(others[k // len(columns)]), columns[k % len(columns)]
    here, there = slots[worst, columns[mine]], slots[partner, theirs]
    slots[worst, columns[mine]], slots[partner, theirs] = there, here
    for b, change in ((worst, delta[mine, k]), (partner, -delta[mine, k])):
        first = b - b % bins_per_rank
        loads[b, :1] += change[:1]
        loads[first : first + bins_per_rank, 1:] += change[1:]
    return partner


def _penalties(loads: Floats) -> Floats:
    """`loads` to the power 128, elementwise; squaring is far faster than a general power."""
    powers = np.minimum(loads, 100.0)  # 100 ** 128 is within range.
    for _ in range(_NUM_SQUARINGS):
        powers = powers * powers
    return powers
