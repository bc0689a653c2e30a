"""The tokens of a trajectory: what was sampled and what was observed, each once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple, TypeVar

import numpy as np

from dapo_mega.types import (
    GenerationRequest,
    LogProbs,
    Response,
    Routes,
    TokenIds,
    Trajectory,
    Turn,
    extend_spans,
    no_routes,
    sampled_rows,
    with_last_token,
)

T = TypeVar("T")

LONGEST_TOKEN: Final = 1024
"""Characters: no vocabulary has longer ones. What is too long by them is not encoded: megabytes take minutes, and all
memory."""


class Rows:
    """One piece of a trajectory. In `token_ids` the ids of the request's prompt are before those of its rows."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._prompt_length = len(request.prompt_token_ids)
        self.token_ids = request.prompt_token_ids
        self._logprobs, self._sampled = np.empty(0, np.float32), np.empty(0, np.bool_)
        self.turns: list[Turn] = []
        self._versions: list[tuple[int, int]] = []
        self._engines: list[tuple[str, int]] = []
        self._routes = no_routes()

    def __len__(self) -> int:
        return len(self._sampled)

    @property
    def engine(self) -> str:
        """The one that is asked next: it has the prefix."""
        return self._engines[-1][0] if self._engines else self._request.engine

    def next_request(self, number: int, max_new_tokens: int) -> GenerationRequest:
        """The request of a turn, whose random numbers depend on its number. The first has the request's own."""
        seed = self._request.seed
        return replace(
            self._request,
            prompt_token_ids=self.token_ids,
            seed=int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:16], "big") if number else seed,
            engine=self.engine,
            routes_from=None if self._request.routes_from is None else len(self._routes),
            sampling=replace(self._request.sampling, max_new_tokens=max_new_tokens),
        )

    def of_turn(self, turn: int) -> tuple[list[int], list[int]]:
        """The prompt of a turn, and what was sampled for it."""
        stop = self.turns[turn].stop
        begin = self.turns[turn - 1].stop if turn else 0
        split, end = self._prompt_length + sampled_rows(self._sampled, begin, stop).start, self._prompt_length + stop
        return self.token_ids[:split].tolist(), self.token_ids[split:end].tolist()

    def add(self, response: Response) -> None:
        """Add a turn of the policy. Rows that were observed before it have its first version and engine."""
        start, length = len(self), len(response.token_ids)
        self.append(response.token_ids, response.logprobs)
        versions = response.version_spans or ((response.weight_version, length),)
        extend_spans(self._versions, versions, start)
        extend_spans(self._engines, response.engine_spans, start)
        if response.routes.size:
            # They end before the last token. A turn that is repeated may have been asked behind other rows.
            missing = len(self.token_ids) - 1 - len(self._routes) - len(response.routes)
            unknown = np.full((max(missing, 0), *response.routes.shape[1:]), -1, np.int16)
            known = self._routes.reshape(-1, *response.routes.shape[1:])
            self._routes = np.concatenate([known, unknown, response.routes[max(-missing, 0) :]])
        self.turns.append(Turn(start + length, response.finish_reason))

    def note(self, parts: Mapping[str, float]) -> None:
        """Say what the last turn earned."""
        self.turns[-1] = replace(self.turns[-1], parts=parts)

    def append(self, token_ids: Sequence[int] | TokenIds, logprobs: LogProbs | None = None) -> None:
        """Add rows, which were observed where they have no log-probs."""
        length = len(token_ids)
        self.token_ids = np.concatenate([self.token_ids, np.asarray(token_ids, np.int32)])
        of_rows = np.zeros(length, np.float32) if logprobs is None else logprobs
        self._logprobs = np.concatenate([self._logprobs, of_rows])
        self._sampled = np.concatenate([self._sampled, np.full(length, logprobs is not None)])

    def trajectory(self) -> Trajectory:
        """Its rows up to its last turn."""
        length = self.turns[-1].stop
        return Trajectory(
            self._request.request_id,
            self.token_ids[self._prompt_length : self._prompt_length + length],
            self._logprobs[:length],
            self._sampled[:length],
            tuple(self.turns),
            tuple(self._versions),
            tuple(self._engines),
            (length,),
            routes=with_last_token(self._routes),
        )


class Pieces:
    """All rows of a trajectory, those of `begun` first: a piece more for each history that was rewritten. The prompt of
    the row is before the first piece, or before none."""

    def __init__(self, request: GenerationRequest, begun: Trajectory | None = None) -> None:
        self._request = request
        self._all: list[Rows] = []
        self.has_row = False
        for turn in turns_of(begun, request) if begun else ():
            row_length = len(request.prompt_token_ids) * turn.is_behind_row
            if turn.is_first:
                self.begin(turn.prompt_ids[row_length:], turn.is_behind_row)
            else:
                self.last.append(turn.prompt_ids[len(self.last.token_ids) :])
            self.last.add(turn.response)
            self.last.note(turn.parts)

    @property
    def last(self) -> Rows:
        return self._all[-1]

    @property
    def turns(self) -> list[Turn]:
        """Each with its end in its piece."""
        return [turn for rows in self._all for turn in rows.turns]

    @property
    def num_turns(self) -> int:
        return sum(len(rows.turns) for rows in self._all)

    @property
    def left(self) -> int:
        """Tokens for which there is place."""
        return self._request.sampling.max_new_tokens - sum(map(len, self._all))

    def begin(self, token_ids: Sequence[int] | TokenIds, is_behind_row: bool = False) -> Rows:
        """A new piece, which begins with these observed tokens."""
        request = self._request
        if not is_behind_row:
            engine = self.last.engine if self._all else ""
            request = replace(request, prompt_token_ids=np.empty(0, np.int32), engine=engine)
        rows = Rows(request)
        rows.append(token_ids)
        self._all.insert(0 if is_behind_row else len(self._all), rows)
        self.has_row = self.has_row or is_behind_row
        return rows

    def of_turn(self, turn: int) -> tuple[list[int], list[int]]:
        """The prompt of a turn, and what was sampled for it, where pieces follow one another."""
        for rows in self._all:
            if turn < len(rows.turns):
                return rows.of_turn(turn)
            turn -= len(rows.turns)
        raise IndexError(turn)

    def trajectory(self, stop: str = "") -> Trajectory | None:
        """All pieces in one, each up to its last turn; None without any turn."""
        pieces = [rows.trajectory() for rows in self._all if rows.turns]
        if not pieces:
            return None
        *starts, total = accumulate((piece.num_rows for piece in pieces), initial=0)
        parts = list(zip(pieces, starts, strict=True))
        is_behind_row = self.has_row and bool(self._all[0].turns)
        return Trajectory(
            self._request.request_id,
            np.concatenate([piece.token_ids for piece in pieces]),
            np.concatenate([piece.logprobs for piece in pieces]),
            np.concatenate([piece.sampled for piece in pieces]),
            tuple(replace(turn, stop=turn.stop + at) for piece, at in parts for turn in piece.turns),
            tuple((version, end + at) for piece, at in parts for version, end in piece.version_spans),
            tuple((engine, end + at) for piece, at in parts for engine, end in piece.engine_spans),
            (*(() if is_behind_row else (0,)), *starts[1:], total),
            stop,
            _joined_routes(pieces, 0 if is_behind_row else len(self._request.prompt_token_ids)),
        )


def _joined_routes(pieces: Sequence[Trajectory], num_before: int) -> Routes:
    """Those of pieces, behind so many tokens of a prompt that is before none of them."""
    before = np.full((num_before, *pieces[0].routes.shape[1:]), -1, np.int16)
    return np.concatenate([before, *(piece.routes for piece in pieces)])


class RecordedTurn(NamedTuple):
    """A turn of a trajectory. `prompt_ids` are all tokens before it; it `is_first` in its piece."""

    is_first: bool
    is_behind_row: bool
    prompt_ids: TokenIds
    response: Response
    parts: Mapping[str, float]


def turns_of(trajectory: Trajectory, request: GenerationRequest) -> Iterator[RecordedTurn]:
    """The turns of a trajectory of this request, in their order."""
    num_before = len(request.prompt_token_ids)
    for first, end, has_row in trajectory.pieces:
        at, known = first, first + num_before * (not has_row)
        for turn in (turn for turn in trajectory.turns if first < turn.stop <= end):
            rows = sampled_rows(trajectory.sampled, at, turn.stop)
            before = trajectory.token_ids[first : rows.start]
            versions = _within(trajectory.version_spans, rows)
            response = Response(
                trajectory.id,
                trajectory.token_ids[rows],
                trajectory.logprobs[rows],
                turn.finish_reason,
                min(version for version, _ in versions),
                versions,
                _within(trajectory.engine_spans, rows),
                trajectory.routes[known : num_before + turn.stop - 1],
            )
            prompt = np.concatenate([request.prompt_token_ids, before]) if has_row else before
            yield RecordedTurn(at == first, has_row, prompt, response, turn.parts)
            at, known = turn.stop, num_before + turn.stop - 1


def _within(spans: Sequence[tuple[T, int]], rows: slice) -> tuple[tuple[T, int], ...]:
    """Those of spans (what, end) that are in some rows, from the first of them."""
    ends = [end for _, end in spans]
    return tuple(
        (what, min(end, rows.stop) - rows.start)
        for (what, end), start in zip(spans, [0, *ends], strict=False)
        if end > rows.start and start < rows.stop
    )
