"""Messages from rank 0 to the processes that send weights, through rank 0's store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Message:
    """What the process is to do: `join` the groups of these engines, `send` its bucket of round `number` to the engine,
    or free it, being `done`: these engines have it."""

    kind: str
    urls: tuple[str, ...] = ()
    number: int = 0


class Mail:
    """Every process reads the messages to it in the order in which rank 0 posted them."""

    def __init__(self, store: dist.Store, rank: int, timeout_s: float) -> None:
        """`store` is rank 0's, which waits at most `timeout_s` for a message to be read."""
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._posted: dict[int, int] = {}
        self._num_read = 0
        # Rank 0's store serves one call at a time, so rank 0 may not wait in it for what it posts itself.
        self._own: SimpleQueue[Message] = SimpleQueue()

    def post(self, rank: int, message: Message) -> None:
        """On rank 0; one call at a time."""
        if rank == self._rank:
            self._own.put(message)
            return
        number = self._posted.get(rank, 0)
        self._posted[rank] = number + 1
        self._store.set(f"mail/{rank}/{number}", json.dumps([message.kind, message.urls, message.number]))

    def read(self) -> Message:
        """Wait for the next message to this process. Raises RuntimeError if none comes."""
        if self._rank == 0:
            try:
                return self._own.get(timeout=self._timeout_s)
            except Empty:
                raise RuntimeError(f"no message for {self._timeout_s:g} s") from None
        key = f"mail/{self._rank}/{self._num_read}"
        kind, urls, number = json.loads(self._store.get(key))
        self._store.delete_key(key)
        self._num_read += 1
        return Message(kind, tuple(urls), number)

    def report_failure(self, update: int, url: str) -> None:
        """Let every process know, on rank 0, from any thread."""
        self._store.set(f"failed/{update}/{url}", "")

    def has_failed(self, update: int, url: str) -> bool:
        answer: Any = self._store.check([f"failed/{update}/{url}"])
        return bool(answer)
