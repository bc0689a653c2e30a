"""The groups in which engines pass weights on to each other, kept by rank 0 from update to update."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

import torch.distributed as dist

from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError, EngineRefused
from dapo_mega.engines.sglang.weight_protocol import failure_key, limited_group, meeting_key, presence_key, relay_group
from dapo_mega.weight_sync.chains import before
from dapo_mega.weight_sync.update import UpdateCalls

logger = logging.getLogger(__name__)

_CALL_LIMIT_S = 45.0  # Engines give up joining earlier, so that they can still answer.


class Relays:
    """Each pair is an engine that gets weights from another one, and that one; it has a group of its own."""

    def __init__(self, run_id: str, store: dist.Store, address: tuple[str, int], backend: str, limit_s: float) -> None:
        """Engines meet at rank 0's `store`, which listens at `address`. `limit_s` is that of a part of an update."""
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
        """The pairs of `sources` (an engine, and where it gets weights from) that can be used now; makes the groups of
        new pairs. `sizes` are the engines' numbers of ranks.

        Engines that cannot connect to each other are remembered, and get weights from the trainer, until one of them
        joins the trainer again (`forget`).
        """
        new = sorted(set(sources.items()) - self._groups.keys() - self._refused)
        # An engine has one group with an engine before it, and one with an engine behind it: new ones replace others.
        replaced = [
            pair for pair in self._groups if any(pair[0] == engine or pair[1] == source for engine, source in new)
        ]
        self.drop(replaced)
        silent: set[str] = set()
        # An engine that joins two groups joins one after the other; every second pair of a chain shares no engine.
        for turn in (0, 1):
            self._join([pair for pair in new if len(before(pair[0], sources)) % 2 == turn], sizes, session, silent)
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

    def _join(
        self, pairs: Iterable[tuple[str, str]], sizes: Mapping[str, int], session: UpdateCalls, silent: set[str]
    ) -> None:
        """Make the groups of pairs of which no two share an engine. Engines that do not answer are added to `silent`,
        and not asked again."""
        names: dict[tuple[str, str], str] = {}
        for pair in pairs:
            if not silent.intersection(pair):
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
            try:
                async with asyncio.timeout(self._call_limit_s):
                    await client.init_weights_update_group(
                        address=self._address,
                        port=self._port,
                        rank_offset=offset,
                        world_size=1 + sizes[pair[0]],
                        name=names[pair],
                        backend=self._backend,
                    )
            except (EngineError, TimeoutError) as error:  # Whether the engine can go on shows in its next call.
                if not isinstance(error, EngineRefused):
                    silent.add(client.url)
                reason = error.reason if isinstance(error, EngineError) else "no answer"
                failed.setdefault(pair, f"{client.url}: {reason}")
                # The other one need not wait, nor this one if it has not begun.
                self._store.compare_set(
                    meeting_key(names[pair]), "", "the trainer says that the other side will not come"
                )

        # Twice the time: who joins slowly is silent, and does not fail the update.
        session.start(join, num_parts=2)
        session.finish()
        for pair, name in names.items():
            for rank in range(1 + sizes[pair[0]]):
                self._store.delete_key(presence_key(name, rank))
            if silent.intersection(pair):  # It may still come, and hears then that it need not wait.
                continue
            self._store.delete_key(meeting_key(name))
            if pair not in failed:
                self._groups[pair] = name
            else:
                self._refused.add(pair)
                logger.warning(
                    "engine %s gets its weights from the trainer, not from engine %s, as these two cannot connect to "
                    "each other: %s (weight_sync.relays=false never tries)",
                    *pair,
                    failed[pair],
                )
