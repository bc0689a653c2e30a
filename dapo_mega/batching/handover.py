"""Hands samples from rank 0 to the other processes as flat tensors, not pickles.

A step's samples go to the replica that trains on them only: headers to everyone, from which all compute the same
plan, then token ids and log-probs to the replicas' leaders, and from each leader to the rest of its replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.batching.packing import SampleColumns

_DTYPES = (np.int32, np.int64, np.int64, np.float32, np.uint8, np.int64, np.int64, np.int64, np.float32)
_PIECE_WORDS = 4 * 2**20
_PIECES_IN_FLIGHT = 8


def broadcast_columns(columns: SampleColumns | None, group: dist.ProcessGroup) -> SampleColumns:
    """All columns that rank 0 gives, on every process of `group`; the others pass None. For few samples."""
    names = [field.name for field in fields(SampleColumns)]
    sizes = torch.zeros(len(names), dtype=torch.int64)
    if columns is not None:
        sizes = torch.tensor([len(vars(columns)[name]) for name in names])
    dist.broadcast(sizes, src=0, group=group)
    received = {}
    for name, size, dtype in zip(names, sizes.tolist(), _DTYPES, strict=True):
        array = np.empty(size, dtype=dtype) if columns is None else np.ascontiguousarray(vars(columns)[name], dtype)
        dist.broadcast(torch.from_numpy(array), src=0, group=group)
        received[name] = array
    return SampleColumns(**received)


def broadcast_names(names: Sequence[str], group: dist.ProcessGroup) -> tuple[str, ...]:
    """The names that rank 0 gives, on every process of `group`."""
    box: list[Any] = [tuple(names)]
    dist.broadcast_object_list(box, src=0, group=group)
    received: tuple[str, ...] = box[0]
    return received


@dataclass(frozen=True)
class HandoverGroups:
    """gloo groups: `control` of all processes, `leaders` of the replicas' leaders in the order of replicas (used by
    leaders only), `replica` of this replica's processes, its leader first. Rank 0 leads replica 0."""

    control: dist.ProcessGroup
    leaders: dist.ProcessGroup
    replica: dist.ProcessGroup


@dataclass(frozen=True)
class SampleHeaders:
    """What every process knows of all S samples; fields as in `SampleColumns`."""

    lengths: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int64]
    advantages: npt.NDArray[np.float32]
    in_loss: npt.NDArray[np.uint8]
    off_policy_tokens: npt.NDArray[np.int64]
    engines: npt.NDArray[np.int64]
    engine_starts: npt.NDArray[np.int64]


def broadcast_headers(columns: SampleColumns | None, group: dist.ProcessGroup) -> SampleHeaders:
    """The headers of the columns that rank 0 gives, on every process of `group`; the others pass None."""
    size = torch.tensor([0 if columns is None else len(columns)])
    dist.broadcast(size, src=0, group=group)
    received: dict[str, Any] = {}
    dtypes = dict(zip((field.name for field in fields(SampleColumns)), _DTYPES, strict=True))
    for field in fields(SampleHeaders):
        given = None if columns is None else vars(columns)[field.name]
        array = np.empty(int(size), dtypes[field.name]) if given is None else np.array(given, dtypes[field.name])
        dist.broadcast(torch.from_numpy(array), src=0, group=group)
        received[field.name] = array
    return SampleHeaders(**received)


def distribute_samples(
    columns: SampleColumns | None,
    headers: SampleHeaders,
    samples: Sequence[npt.NDArray[np.int64]],
    *,
    data_rank: int,
    groups: HandoverGroups,
) -> SampleColumns:
    """The samples of this process's replica, `samples[data_rank]`, in that order; rank 0 alone gives `columns`.

    Rank 0 sends each leader its replica's token ids and log-probs once, as int32 words, and each leader passes them
    on within its replica. They travel in pieces of 16 MiB, a round of pieces for all replicas at a time; at most
    `_PIECES_IN_FLIGHT` are copied and on their way at once.
    """
    own = samples[data_rank]
    num_tokens = int(headers.lengths[own].sum())
    num_responses = num_tokens - int(headers.prompt_lengths[own].sum())
    words = np.empty(num_tokens + num_responses, dtype=np.int32)
    pieces = [words[start : start + _PIECE_WORDS] for start in range(0, len(words), _PIECE_WORDS)]
    if columns is not None:
        _send(columns, samples, pieces, groups)
    else:
        _receive(pieces, groups)
    return SampleColumns(
        token_ids=words[:num_tokens],
        lengths=headers.lengths[own],
        prompt_lengths=headers.prompt_lengths[own],
        advantages=headers.advantages[own],
        in_loss=headers.in_loss[own],
        off_policy_tokens=headers.off_policy_tokens[own],
        engines=headers.engines[own],
        engine_starts=headers.engine_starts[own],
        rollout_logprobs=words[num_tokens:].view(np.float32),
    )


def _send(
    columns: SampleColumns,
    samples: Sequence[npt.NDArray[np.int64]],
    own_pieces: Sequence[npt.NDArray[np.int32]],
    groups: HandoverGroups,
) -> None:
    """Rank 0: every other leader its pieces; replica 0's go into `own_pieces` and to the rest of the replica."""
    replicas = [_Words(columns, indices) for indices in samples]
    # A buffer must live until its send is done.
    in_flight: deque[tuple[dist.Work, Tensor]] = deque()
    for number in range(-(-max(len(words) for words in replicas) // _PIECE_WORDS)):
        start = number * _PIECE_WORDS
        for replica, words in enumerate(replicas):
            if start >= len(words):
                continue
            if replica == 0:
                words.copy(start, own_pieces[number])
                _pass_on(own_pieces[number], groups.replica)
                continue
            piece = np.empty(min(len(words) - start, _PIECE_WORDS), dtype=np.int32)
            words.copy(start, piece)
            buffer = torch.from_numpy(piece)
            if len(in_flight) == _PIECES_IN_FLIGHT:
                in_flight.popleft()[0].wait()
            leader = dist.get_global_rank(groups.leaders, replica)
            work = dist.isend(buffer, dst=leader, group=groups.leaders, tag=number)
            assert work is not None
            in_flight.append((work, buffer))
    for work, _ in in_flight:
        work.wait()


def _receive(pieces: Sequence[npt.NDArray[np.int32]], groups: HandoverGroups) -> None:
    """Fill `pieces`: a leader from rank 0, passing on each as it comes; the others from their leader."""
    if dist.get_rank(groups.replica) != 0:
        for piece in pieces:
            _pass_on(piece, groups.replica)
        return
    arriving = [
        dist.irecv(torch.from_numpy(piece), src=0, group=groups.leaders, tag=number)
        for number, piece in enumerate(pieces)
    ]
    for work, piece in zip(arriving, pieces, strict=True):
        assert work is not None
        work.wait()
        _pass_on(piece, groups.replica)


def _pass_on(piece: npt.NDArray[np.int32], replica: dist.ProcessGroup) -> None:
    if dist.get_world_size(replica) > 1:
        dist.broadcast(torch.from_numpy(piece), src=dist.get_global_rank(replica, 0), group=replica)


class _Words:
    """Token ids of chosen samples, then their log-probs, as one sequence of int32 words that is never made whole."""

    def __init__(self, columns: SampleColumns, indices: npt.NDArray[np.int64]) -> None:
        responses = columns.lengths - columns.prompt_lengths
        self._runs = []
        for values, lengths in ((columns.token_ids, columns.lengths), (columns.rollout_logprobs, responses)):
            ends = np.cumsum(lengths)
            self._runs += [values.view(np.int32)[ends[i] - lengths[i] : ends[i]] for i in indices]
        self._ends = np.cumsum([0] + [len(run) for run in self._runs])[1:]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def copy(self, start: int, piece: npt.NDArray[np.int32]) -> None:
        """Fill `piece` with the words from `start` on."""
        filled = 0
        run = int(np.searchsorted(self._ends, start, side="right"))
        while filled < len(piece):
            left = int(self._ends[run]) - start - filled
            taken = min(left, len(piece) - filled)
            words = self._runs[run]
            piece[filled : filled + taken] = words[len(words) - left : len(words) - left + taken]
            filled += taken
            run += 1
