"""The turns of trajectories with an environment, as the page shows them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dapo_mega.environments.markup import ENDS, THINK, read_markup
from dapo_mega.types import sampled_rows

Block = dict[str, Any]
_COLUMNS = ("sampled", "turns", "segments", "stop")


def blocks_of(table: pa.Table) -> list[list[Block] | None]:
    """The blocks that the tokens of each row are shown in, in their order; None for a single answer.

    `kind` is `turn`, `observed`, or `rewritten` for an observed history that begins a new piece; `end` is the row of
    the trajectory up to which it goes, exclusive. A turn has its `finish_reason`, `parts`, and `calls` as `read_markup`
    finds them in its text.
    """
    if not set(_COLUMNS) & set(table.column_names):
        return [None] * len(table)
    columns = [table[name] if name in table.column_names else [None] * len(table) for name in _COLUMNS]
    return [_blocks(*row) for row in zip(table["tokens"], *columns, strict=True)]


def _blocks(tokens: pa.ListScalar, *columns: pa.Scalar | None) -> list[Block] | None:
    texts = tokens.values
    mask, (turns, segments, stop) = columns[0], [column and column.as_py() for column in columns[1:]]
    sampled = np.ones(len(texts), bool) if mask is None else mask.values.to_numpy(zero_copy_only=False)
    if len(turns or [0]) == len(segments or [0]) == 1 and not stop and sampled.all():
        return None
    return list(_cut(texts, sampled, turns or [], (segments or [0])[:-1]))


def _cut(
    texts: pa.StringArray, sampled: npt.NDArray[np.bool_], turns: Sequence[Block], new_pieces: Sequence[int]
) -> Iterator[Block]:
    begin = 0
    for turn in turns:
        start = sampled_rows(sampled, begin, turn["end"]).start
        if start > begin:
            yield {"kind": "rewritten" if begin in new_pieces else "observed", "end": start}
        begin = turn["end"]
        text = "".join(texts[start : begin - (turn["finish_reason"] == "stop")].to_pylist())  # Not the stop token.
        is_thought = ENDS[THINK] in text.partition(THINK)[0]  # The template had opened it.
        calls = read_markup(THINK * is_thought + text).calls
        yield {"kind": "turn", **turn, "parts": json.loads(turn["parts"]), "calls": calls}
    if begin < len(sampled):  # Where it stopped before the next turn.
        yield {"kind": "observed", "end": len(sampled)}
