"""The groups in which engines pass weights on to each other, kept by rank 0 from update to update."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping

import torch.distributed as dist

from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.engines.sglang.weight_protocol import failure_key, limited_group, relay_group
from dapo_mega.weight_sync.update import UpdateCalls

logger = logging.getLogger(__name__)

_CALL_LIMIT_S = 45.0  # Engines give up joining earlier, so that they can still answer.


class Relays:
    """Each pair is an engine that gets weights from another one, and that one; it has a group of its own."""

    def __init__(self, run_id: str, store: dist.Store, address: tuple[str, int], backend: str, limit_s: float) -> None:
        """Engines meet at rank 0's `store`, which listens at `address`. An engine waits at most `limit_s` for a bucket
        of another one."""
        self._run_id = run_id
        self._store = store
        self._address, self._port = address
        self._backend = backend
        self._limit_s = limit_s
        self._call_limit_s = min(_CALL_LIMIT_S, limit_s)
        self._groups: dict[tuple[str, str], str] = {}
        self._refused: set[tuple[str, str]] = set()
        self._num_made = 0

    def connect(self, sources: Mapping[str, str], sizes: Mapping[str, int], session: UpdateCalls) -> dict[str, str]:
        """The pairs of `sources` (an engine, and where it gets weights from) that can be used now. Makes the groups of
        new pairs, and has engines leave those of others. `sizes` are the engines' numbers of ranks.

        Engines that cannot connect to each other are remembered, and get weights from the trainer, until one of them
        joins the trainer again (`forget`).
        """
        pairs = set(sources.items())
        stale = self._groups.keys() - pairs
        self._leave({pair: self._groups.pop(pair) for pair in stale}, session)
        new = sorted(pairs - self._groups.keys() - self._refused)
        # An engine that joins two groups joins one after the other; every second pair of a chain shares no engine.
        depth = {pair: _depth(pair[0], sources) for pair in new}
        for turn in (0, 1):
            self._join([pair for pair in new if depth[pair] % 2 == turn], sizes, session)
        return {engine: source for engine, source in sources.items() if (engine, source) in self._groups}

    def name(self, engine: str, source: str) -> str:
        """The group of a pair that `connect` has returned."""
        return self._groups[engine, source]

    def end(self, engine: str, source: str) -> None:
        """The source is gone: the engine, which may wait for it, hears so. From any thread."""
        if name := self._groups.get((engine, source)):
            self._store.set(failure_key(name), "")

    def drop(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Use the groups of these pairs no longer; the next update that needs them makes new ones."""
        for pair in pairs:
            self._groups.pop(pair, None)

    def forget(self, urls: Iterable[str]) -> None:
        """Forget the groups of engines that have failed, or are about to join again."""
        gone = set(urls)
        for pair in [pair for pair in self._groups if gone & set(pair)]:
            del self._groups[pair]
        self._refused = {pair for pair in self._refused if not gone & set(pair)}

    def _join(self, pairs: Iterable[tuple[str, str]], sizes: Mapping[str, int], session: UpdateCalls) -> None:
        """Make the groups of pairs of which no two share an engine."""
        names: dict[tuple[str, str], str] = {}
        for pair in pairs:
            names[pair] = limited_group(relay_group(f"{self._run_id}-{self._num_made}"), self._limit_s)
            self._num_made += 1
        if not names:
            return
        roles = {url: (pair, offset) for pair in names for offset, url in ((1, pair[0]), (0, pair[1]))}
        failed: dict[tuple[str, str], str] = {}

        async def join(client: EngineClient) -> None:
            if client.url not in roles:
                return
            pair, offset = roles[client.url]
            call = client.init_weights_update_group(
                address=self._address,
                port=self._port,
                rank_offset=offset,
                world_size=1 + sizes[pair[0]],
                name=names[pair],
                backend=self._backend,
            )
            if reason := await _failure_of(call, self._call_limit_s):
                failed.setdefault(pair, f"{client.url}: {reason}")
                self._store.set(failure_key(names[pair]), "")  # The other one need not wait.

        session.call(join)
        present = {target.url for target in session.targets}
        for pair, name in names.items():
            if pair not in failed and present.issuperset(pair):
                self._groups[pair] = name
            elif present.issuperset(pair):
                self._refused.add(pair)
                logger.warning(
                    "engine %s gets its weights from the trainer, not from engine %s, as these two cannot connect to "
                    "each other: %s (weight_sync.relays=false never tries)",
                    *pair,
                    failed[pair],
                )

    def _leave(self, groups: Mapping[tuple[str, str], str], session: UpdateCalls) -> None:
        if not groups:
            return

        async def leave(client: EngineClient) -> None:
            for pair, name in groups.items():
                if client.url in pair:
                    await _failure_of(client.destroy_weights_update_group(name), self._call_limit_s)

        session.call(leave)


def _depth(engine: str, sources: Mapping[str, str]) -> int:
    depth = 0
    while engine in sources:
        engine, depth = sources[engine], depth + 1
    return depth


async def _failure_of(call: Awaitable[None], limit_s: float) -> str:
    """Why the call failed, or did not end within the limit; empty if it succeeded. Whether the engine can go on shows
    in its next call."""
    try:
        async with asyncio.timeout(limit_s):
            await call
    except EngineError as error:
        return error.reason
    except TimeoutError:
        return f"no answer within {limit_s:g} s"
    return ""
