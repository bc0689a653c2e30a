"""Which engine passes weights on to which: chains, as many as there are processes that send.

An engine receives and sends at the same time, so all engines of a chain are busy together, each some chunks behind the
one before. A tree would be shallower, but an engine that sends to two halves its rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit


def sources_of(urls: Sequence[str], num_chains: int) -> dict[str, str]:
    """For every engine that gets its weights from another one, that one's URL; the others get them from the trainer.

    Chains are as equal as possible. Engines of one machine follow each other, so that few links between machines carry
    the weights.
    """
    ordered = sorted(urls, key=lambda url: (str(urlsplit(url).hostname), url))
    length, longer = divmod(len(ordered), num_chains)
    sources: dict[str, str] = {}
    start = 0
    for chain in range(min(num_chains, len(ordered))):
        stop = start + length + (chain < longer)
        for before, after in zip(ordered[start : stop - 1], ordered[start + 1 : stop], strict=True):
            sources[after] = before
        start = stop
    return sources


def before(url: str, sources: Mapping[str, str]) -> list[str]:
    """The engines through which the weights come to this one, the nearest first; empty at the beginning of a chain."""
    passed = []
    while url in sources:
        url = sources[url]
        passed.append(url)
    return passed
