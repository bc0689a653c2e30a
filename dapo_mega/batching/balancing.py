"""Divides items over parts of even load, deterministically: best fit, greedy spreading and local search.

Items and loads may have several dimensions (tokens and cost). Loads are measured in units of their limits, so that
a part is even enough when none of its loads is above 1.

Every process must come to the same result, whatever its CPU. So floating-point numbers are only added, multiplied,
divided and compared, which IEEE 754 defines to the last bit; exponentials and matrix products are not.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# The penalty of a load is its 128th power: about the inverse of the unevenness that matters.
_NUM_SQUARINGS = 7
_NUM_PARTNERS = 8
_MAX_ROUNDS = 800
_MAX_COLUMNS = 32


def best_fit(sizes: Ints, capacity: int) -> list[list[int]]:
    """Bins of at most `capacity`, as few as best-fit decreasing finds; every size must be at most `capacity`.

    Each item, largest first, goes to the fullest bin that still has room. O(n log n) comparisons; the sorted list
    of rooms is moved in memory. At most 11/9 of the optimal number of bins (Johnson 1974), in practice within one
    or two where small items abound.
    """
    rooms: list[int] = []
    bin_of_room: list[int] = []
    bins: list[list[int]] = []
    for i in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[i])
        k = bisect.bisect_left(rooms, size)
        if k == len(rooms):
            room, b = capacity, len(bins)
            bins.append([])
        else:
            room, b = rooms.pop(k), bin_of_room.pop(k)
        bins[b].append(i)
        k = bisect.bisect_left(rooms, room - size)
        rooms.insert(k, room - size)
        bin_of_room.insert(k, b)
    return bins


def spread(sizes: Floats, num_parts: int, limits: Floats) -> list[list[int]]:
    """Parts of the n items with `sizes` [n, d] whose loads stay within `limits` [d] as far as found.

    Items come largest first (by their largest dimension) and each goes where it adds least to the penalty
    sum over parts p and dimensions k of (1 + load[p, k] / limits[k]) ** 129, to first order. In one dimension this
    is longest-processing-time-first; in several it is the dot-product rule of vector bin packing with weights that
    grow with the load, so that the dimension in which a part is ahead decides. `even_out` follows.
    """
    scaled = sizes / limits
    loads = np.zeros((sizes.shape[1], num_parts))
    weights = np.ones_like(loads)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for i in np.argsort(-scaled.max(axis=1), kind="stable").tolist():
        row = scaled[i]
        p = int((row[:, None] * weights).sum(axis=0).argmin())
        parts[p].append(i)
        loads[:, p] += row
        weights[:, p] = _penalties(1.0 + loads[:, p])
    return even_out(parts, sizes, limits)


def deal(sizes: Floats, num_parts: int, limit: float) -> list[list[int]]:
    """Parts of equally many items; the number of items is a multiple of `num_parts` and `sizes` is [n].

    Round by round, the largest item left goes to the part with the least load; then items swap places.
    """
    order = np.argsort(-sizes, kind="stable").reshape(-1, num_parts)
    loads = np.zeros(num_parts)
    rounds = []
    for row in order:
        dealt = np.empty(num_parts, dtype=np.int64)
        dealt[np.argsort(loads, kind="stable")] = row
        loads += sizes[dealt]
        rounds.append(dealt)
    parts = np.stack(rounds, axis=1).tolist()
    return even_out(parts, sizes[:, None], np.array([limit]), moves=False)


def even_out(
    parts: Sequence[Sequence[int]], sizes: Floats, limits: Floats, *, moves: bool = True, team: int = 1
) -> list[list[int]]:
    """Swap items of parts over `limits` [d] with items of others, or move them, until none is or nothing helps.

    The part with the highest load exchanges one item with one of the few parts that have most room in the
    dimensions it is over in. The exchange that lowers the penalty of the two parts most is made; the sum of
    penalties falls with every exchange, so the search cannot go in circles. A part that no exchange helps is left
    until another exchange changes it. Work is bounded by a number of rounds. Without `moves` the parts keep their
    numbers of items. Each `team` consecutive parts have their loads in common, but for the first dimension.
    """
    scaled = np.vstack([sizes / limits, np.zeros(len(limits))])
    empty = len(sizes)
    width = max(len(part) for part in parts) + (2 if moves else 0)
    slots = np.full((len(parts), width), empty)
    for p, part in enumerate(parts):
        slots[p, : len(part)] = part
    loads = np.stack([scaled[row].sum(axis=0) for row in slots])
    if team > 1:
        teams = loads[:, 1:].reshape(len(parts) // team, team, len(limits) - 1)
        loads[:, 1:] = np.repeat(teams.sum(axis=1), team, axis=0)
    stuck = np.zeros(len(parts), dtype=bool)
    stride = -(-width // _MAX_COLUMNS)
    for round_ in range(_MAX_ROUNDS):
        height = np.where(stuck, 0.0, loads.max(axis=1))
        w = int(height.argmax())
        if height[w] <= 1.0:
            break
        columns = np.arange(round_ % stride, width, stride)
        if moves and columns[-1] != width - 1:
            columns = np.append(columns, width - 1)
        partner = _exchange(slots, loads, scaled, w, columns, team)
        if partner is None:
            stuck[w] = True
        else:
            stuck[partner] = False
    return [[int(i) for i in row if i != empty] for row in slots]


def _exchange(slots: Ints, loads: Floats, scaled: Floats, w: int, columns: Ints, team: int) -> int | None:
    """Make the best exchange of one item between part `w` and another; the other part, or None for no gain."""
    reference = loads[w].max()
    others = np.argsort((loads * _penalties(loads[w] / reference)).sum(axis=1), kind="stable")[:_NUM_PARTNERS]
    others = others[others != w]
    if not len(others):
        return None
    delta = scaled[slots[others][:, columns].reshape(-1)][None] - scaled[slots[w, columns]][:, None]
    other_loads = np.repeat(loads[others], len(columns), axis=0)[None]
    before = _penalties(loads[w] / reference) + _penalties(other_loads / reference)
    after = _penalties((loads[w] + delta) / reference) + _penalties((other_loads - delta) / reference)
    gain = (before - after).sum(axis=-1)
    mine, k = divmod(int(gain.argmax()), gain.shape[1])
    if gain[mine, k] <= 1e-6:
        return None
    p, theirs = int(others[k // len(columns)]), columns[k % len(columns)]
    here, there = slots[w, columns[mine]], slots[p, theirs]
    slots[w, columns[mine]], slots[p, theirs] = there, here
    for part, change in ((w, delta[mine, k]), (p, -delta[mine, k])):
        first = part - part % team
        loads[part, :1] += change[:1]
        loads[first : first + team, 1:] += change[1:]
    return p


def _penalties(loads: Floats) -> Floats:
    """`loads` to the power 128, elementwise."""
    powers = np.minimum(loads, 100.0)  # 100 ** 128 is within range.
    for _ in range(_NUM_SQUARINGS):
        powers = powers * powers
    return powers
