"""What a program asked of the policy, token by token.

A request whose messages go on behind a recorded turn gets this turn's tokens and, encoded, what is new; nothing that
was sampled is encoded again. Any other begins a piece of the trajectory with all of its prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from dapo_mega.config.environment import InTurns
from dapo_mega.environments.account import DiffersError
from dapo_mega.environments.dialogues import Dialogue
from dapo_mega.environments.rows import LONGEST_TOKEN, Pieces, Rows, turns_of
from dapo_mega.errors import InputError
from dapo_mega.types import GenerationRequest, Response, Trajectory

T = TypeVar("T")

Message = dict[str, Any]
Place = tuple["Recorded | None", list[int]]
"""The recorded turn that a prompt follows, and what follows; None, and all of it."""

_OBSERVED = ("user", "tool", "system")


class RefusedError(Exception):
    """An error to answer with, in OpenAI's form."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(eq=False)
class Recorded:
    """A turn of the policy: its prompt ends at `start` of the ids of `rows`, and it at `end`. `history` are its
    messages as they are compared, its own the last, empty where it was asked for by tokens. `names` are those of its
    calls, by id."""

    rows: Rows
    start: int
    end: int
    response: Response
    history: tuple[Any, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def prompt_ids(self) -> list[int]:
        return self.rows.token_ids[: self.start].tolist()

    @property
    def sampled_ids(self) -> list[int]:
        return self.rows.token_ids[self.start : self.end].tolist()


@dataclass
class Ask:
    """A turn that the policy is to take."""

    request: GenerationRequest
    answer: asyncio.Future[Response]

    def done(self, response: Response) -> None:
        if not self.answer.done():
            self.answer.set_result(response)


@dataclass
class Ended:
    """The end of a program; `failure` says why it failed, if it did."""

    failure: str = ""
    printed: str = ""


class Session:
    """One life of a program. But for what it is made of, all in the endpoint's thread. `events` are those that the
    trajectory's coroutine waits for, `so_far` is what there is of the trajectory, `stop` the limit that ended it.
    `on_wait` is called when the program begins to wait for the policy, with True, and when it goes on. The turns of
    `begun`, an earlier life, are said again to the same prompts; it must ask for all of them before another one."""

    def __init__(self, request: GenerationRequest, limits: InTurns, begun: Trajectory | None = None) -> None:
        self.id, self.key = secrets.token_hex(8), f"sk-{secrets.token_urlsafe(24)}"
        self.events: asyncio.Queue[Ask | Ended | DiffersError] = asyncio.Queue()
        self.so_far: Trajectory | None = None
        self.earned: Mapping[str, float] = {}
        self.stop = ""
        self.answers: dict[str, Any] = {}
        self._request = request
        self._limits = limits
        self.on_wait: Callable[[bool], None] = lambda is_waiting: None
        self._to_repeat: dict[bytes, list[Response]] = {}
        for turn in turns_of(begun, request) if begun else ():
            self._to_repeat.setdefault(turn.prompt_ids.tobytes(), []).append(turn.response)
        self._pieces = Pieces(request)
        self._turns: list[Recorded] = []
        self._num_waiting = 0
        self._lock = asyncio.Lock()

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def num_to_repeat(self) -> int:
        """Turns of an earlier life that it did not ask for yet."""
        return sum(map(len, self._to_repeat.values()))

    async def turn(self, find: Callable[[], Place | None], max_tokens: int | None, note: Callable[[Recorded], T]) -> T:
        """What `note` makes of one turn of the policy behind what `find` finds; None is too long. One at a time; others
        wait. Raises RefusedError where a limit ends the trajectory."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self.on_wait(True)
        try:
            async with self._lock:
                if not self.stop and len(self._turns) == self._limits.max_turns:
                    self.stop = "turns"
                place = None if self.stop else find()
                rows = self._place(*place) if place else None
                if rows is None:
                    self.stop = self.stop or "context"
                    why = {"turns": "max_turns", "tokens": "max_tokens"}.get(self.stop, "context_length_exceeded")
                    raise RefusedError(
                        f"the trajectory is over ({self.stop}): it has reached the run's limit", code=why
                    )
                response = await self._sampled(rows, max_tokens)
                start = len(rows.token_ids)
                rows.add(response)
                recorded = Recorded(rows, start, len(rows.token_ids), response)
                self._turns.append(recorded)
                noted = note(recorded)
                self.so_far = self._pieces.trajectory()
                return noted
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self.on_wait(False)

    async def _sampled(self, rows: Rows, max_tokens: int | None) -> Response:
        """The policy's turn. Its random numbers depend on its prompt, and how often that was asked, not on the order of
        requests."""
        prompt = rows.token_ids.tobytes()
        if self.num_to_repeat:
            if responses := self._to_repeat.get(prompt):
                return responses.pop(0)
            self.events.put_nowait(DiffersError("it asks the policy for something else than before at the same point"))
            raise RefusedError("the trajectory begins anew", status=503)
        again = sum(turn.rows.token_ids[: turn.start].tobytes() == prompt for turn in self._turns)
        number = int.from_bytes(hashlib.sha256(prompt + str(again).encode()).digest()[:8], "big")
        limits = [each for each in (max_tokens, self._limits.max_turn_tokens) if each]
        ask = Ask(
            rows.next_request(number, min([*limits, self._pieces.left])), asyncio.get_running_loop().create_future()
        )
        self.events.put_nowait(ask)
        return await ask.answer

    def _place(self, turn: Recorded | None, ids: list[int]) -> Rows | None:
        """The rows that a turn is to be sampled behind, with what it observes. None where that has no place, which ends
        the trajectory."""
        left, row = self._pieces.left, self._request.prompt_token_ids.tolist()
        if left <= 0:
            self.stop = "tokens"
            return None
        is_end = turn is not None and turn.end == len(turn.rows.token_ids)
        is_first = turn is None and not self._pieces.has_row and bool(row) and ids[: len(row)] == row
        is_long = turn is not None and len(ids) > self._limits.max_observation_tokens
        if is_first:
            ids = ids[len(row) :]
        elif turn and not is_end:
            ids = [*turn.prompt_ids, *turn.sampled_ids, *ids]
        if is_long or len(ids) >= left:
            self.stop = "context"
            return None
        if turn and is_end:
            turn.rows.append(ids)
            return turn.rows
        if not ids and not is_first:
            raise RefusedError("the prompt is empty", param="messages")
        return self._pieces.begin(ids, is_first)

    def behind_tokens(self, token_ids: list[int]) -> Place:
        """Where a prompt of these tokens goes on."""
        found = [t for t in reversed(self._turns) if t.rows.token_ids[: t.end].tolist() == token_ids[: t.end]]
        best = max(found, key=lambda turn: turn.end, default=None)
        return best, token_ids[best.end if best else 0 :]

    def behind_messages(self, kind: str, messages: Sequence[Message], dialogue: Dialogue) -> Place | None:
        """Where a prompt of these messages goes on, among turns of the same kind; None where it is far too long. Raises
        RefusedError for messages that the template refuses."""
        keys = (kind, *map(compared, messages))
        names = {id: name for turn in self._turns for id, name in turn.names.items()}
        shown = [
            message | {"name": names.get(message["tool_call_id"], message["name"])}
            if message["role"] == "tool"
            else message
            for message in messages
        ]
        found = [t for t in reversed(self._turns) if t.history and keys[: len(t.history)] == t.history]
        said = {call["id"] for message in messages for call in message.get("tool_calls", ())}
        # Of several answers to the same messages that are told alike, the one whose calls have these ids.
        best = max(found, key=lambda turn: (len(turn.history), len(said & turn.names.keys())), default=None)
        new = shown[len(best.history) - 1 :] if best else []
        if 0 < self._pieces.left * LONGEST_TOKEN < len(str(new or shown)):
            return None
        if best and all(message["role"] in _OBSERVED for message in new):
            with contextlib.suppress(InputError):  # The whole may be possible all the same.
                ids = dialogue.extend(best.prompt_ids, best.sampled_ids, new)
                if ids is not None:
                    return best, ids
        try:
            return None, dialogue.whole(shown)
        except InputError as error:
            raise RefusedError(str(error), param="messages") from None

    def ended(self, stop: str) -> Trajectory | None:
        """The trajectory with what it earned, None without any turn."""
        found = self._pieces.trajectory(stop)
        if found is None:
            return None
        last = replace(found.turns[-1], parts={**found.turns[-1].parts, **self.earned})
        return replace(found, turns=(*found.turns[:-1], last))


def compared(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two messages have in common where clients drop and rewrite what means nothing: ids, the white space around a
    text, how arguments are written, and all parallel calls but the first."""
    calls = message.get("tool_calls") or [None]
    first = json.dumps(calls[0]["function"], sort_keys=True) if calls[0] else None
    return message["role"], message["content"].strip(), first
