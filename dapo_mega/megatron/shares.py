"""Shares a pipeline stage's buckets of weights among the processes that send them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# So many buckets of equal size per process keep the shares equal within their number's inverse.
FEWEST_BUCKETS = 10
# A smaller bucket takes an engine longer than its bytes do.
_SMALLEST_BUCKET = 16 * 2**20


def share_limit(num_bytes: int, num_places: int, limit: int) -> int:
    """The size limit of buckets of a stage's `num_bytes`, at most `limit`: small enough that `num_places` processes can
    have equal shares."""
    if num_places == 1:
        return limit
    return min(limit, max(num_bytes // (num_places * FEWEST_BUCKETS), _SMALLEST_BUCKET))


def rounds_of(sizes: Sequence[int], num_places: int) -> Iterator[list[tuple[int, int]]]:
    """The buckets of each round, as places with indices into `sizes`: in a round every place has at most one.

    The largest bucket goes first, each to the place with the fewest bytes, so that a round's buckets are of similar
    size and all places get about the same number of bytes.
    """
    shares: list[list[int]] = [[] for _ in range(num_places)]
    totals = [0] * num_places
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        place = totals.index(min(totals))
        shares[place].append(index)
        totals[place] += sizes[index]
    for number in range(max(map(len, shares))):
        yield [(place, share[number]) for place, share in enumerate(shares) if number < len(share)]
