"""Brings values of response tokens, which the processes of the last pipeline stage hold, to rank 0.

Each process has some runs of consecutive tokens of some samples: data parallelism spreads samples, context parallelism
cuts them. A process sends the place of each run and the values of its tokens, so 4 bytes per token and value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.distributed.processes import Processes

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class TokenRuns:
    """Runs of consecutive tokens: `places` [R, 3] are each run's sample, the position in the sequence of its first
    token, and its length; `values` [C, sum of lengths] are those of the tokens, run after run."""

    places: npt.NDArray[np.int32]
    values: Floats


def runs_of(batches: Sequence[MicroBatch], columns: Sequence[Sequence[Tensor]]) -> TokenRuns:
    """This process's runs. `columns[c][i]` [N] are value c of the response tokens of micro-batch i."""
    ids = [np.empty(0, np.int32)]
    positions = [np.empty(0, np.int32)]
    for micro in batches:
        of_batch, predicting = micro.places()
        ids.append(of_batch.numpy())
        positions.append((predicting + 1).int().numpy())
    sample, position = np.concatenate(ids), np.concatenate(positions)
    values = np.stack(
        [
            np.concatenate([np.empty(0, np.float32), *(of_batch.detach().float().cpu().numpy() for of_batch in column)])
            for column in columns
        ]
    )
    is_first = np.ones(len(sample), bool)
    is_first[1:] = (sample[1:] != sample[:-1]) | (position[1:] != position[:-1] + 1)
    starts = np.flatnonzero(is_first)
    lengths = np.diff(starts, append=len(sample))
    places = np.stack([sample[starts], position[starts], lengths.astype(np.int32)], axis=1)
    return TokenRuns(places, values)


def gather_runs(own: TokenRuns | None, num_columns: int, processes: Processes) -> list[TokenRuns]:
    """All processes' runs, on rank 0; empty on the others. Collective; processes whose outputs do not count pass
    None."""
    empty = TokenRuns(np.empty((0, 3), np.int32), np.empty((num_columns, 0), np.float32))
    own = own or empty
    sizes = [torch.zeros(2, dtype=torch.int64) for _ in range(processes.world_size)]
    dist.all_gather(sizes, torch.tensor([len(own.places), own.values.shape[1]]), group=processes.control)
    if processes.rank:
        if len(own.places):
            dist.send(torch.from_numpy(own.places), dst=0, group=processes.control)
            dist.send(torch.from_numpy(own.values), dst=0, group=processes.control)
        return []
    gathered = [own] if len(own.places) else []
    for rank, (num_runs, num_tokens) in enumerate(size.tolist() for size in sizes):
        if rank and num_runs:
            places = torch.empty(num_runs, 3, dtype=torch.int32)
            values = torch.empty(num_columns, num_tokens)
            dist.recv(places, src=rank, group=processes.control)
            dist.recv(values, src=rank, group=processes.control)
            gathered.append(TokenRuns(places.numpy(), values.numpy()))
    return gathered


def by_trajectory(
    gathered: Sequence[TokenRuns], num_columns: int, places: Sequence[tuple[int, int]], lengths: Sequence[int]
) -> list[Floats]:
    """The values [C, R] of every trajectory's rows, NaN where no process had any; `lengths` are their numbers of rows.
    `places[i]` is (trajectory, shift) for sample i: its position p is row p + shift of the trajectory."""
    found = [np.full((num_columns, length), np.nan, np.float32) for length in lengths]
    for runs in gathered:
        start = 0
        for sample, position, length in runs.places.tolist():
            trajectory, shift = places[sample]
            found[trajectory][:, shift + position :][:, :length] = runs.values[:, start : start + length]
            start += length
    return found
