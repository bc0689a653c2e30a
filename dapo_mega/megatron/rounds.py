"""Spreads a pipeline stage's buckets of weights over the processes that send them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# So many buckets of equal size per process keep their bytes equal within the number's inverse.
FEWEST_BUCKETS = 10
# A smaller bucket takes an engine longer than its bytes do.
_SMALLEST_BUCKET = 16 * 2**20


def bucket_limit(num_bytes: int, num_senders: int, limit: int) -> int:
    """The size limit of buckets of a stage's `num_bytes`, at most `limit`: small enough that `num_senders` processes
    can send about the same number of bytes."""
    if num_senders == 1:
        return limit
    return min(limit, max(num_bytes // (num_senders * FEWEST_BUCKETS), _SMALLEST_BUCKET))


def rounds_of(sizes: Sequence[int], num_senders: int) -> Iterator[list[tuple[int, int]]]:
    """The buckets of each round, as senders with indices into `sizes`: in a round every sender has at most one.

    The largest bucket goes first, each to the sender with the fewest bytes, so that a round's buckets are of similar
    size and all senders get about the same number of bytes.
    """
    buckets: list[list[int]] = [[] for _ in range(num_senders)]
    totals = [0] * num_senders
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        sender = totals.index(min(totals))
        buckets[sender].append(index)
        totals[sender] += sizes[index]
    for number in range(max(map(len, buckets))):
        yield [(sender, indices[number]) for sender, indices in enumerate(buckets) if number < len(indices)]
