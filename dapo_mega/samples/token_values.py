"""Values of response tokens, which the processes of the last pipeline stage hold, by trajectory on rank 0.

Each process has some runs of consecutive tokens of some samples: data parallelism spreads samples, context parallelism
cuts them. A process sends the place of each run and the values of its tokens, so 4 bytes per token and value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dapo_mega.batching.microbatch import MicroBatch

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class TokenRuns:
    """Runs of consecutive tokens: `places` [R, 3] are each run's sample, the position in the sequence of its first
    token, and its length; `values` [C, sum of lengths] are those of the tokens, run after run."""

    places: npt.NDArray[np.int32]
    values: Floats

    def only(self, samples: Sequence[int] | None) -> Self:
        """The runs of these samples; None: all."""
        if samples is None:
            return self
        keep = np.isin(self.places[:, 0], samples)
        return type(self)(self.places[keep], np.ascontiguousarray(self.values[:, np.repeat(keep, self.places[:, 2])]))


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
