"""The text of single tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dapo_mega.types import TokenIds

_BROKEN = "\ufffd"


class TokenPieces:
    """Texts of tokens such that those of a sequence, joined, are its text with special tokens.

    Where a character takes several tokens, the first has all of it and the others are empty. Not safe for threads.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known = np.empty(0, dtype=object)
        self._is_broken = np.empty(0, dtype=bool)
        self._array = pa.array([], pa.string())
        self._runs: dict[bytes, str] = {}

    def of(self, token_ids: TokenIds) -> pa.Array:
        """The text of each token of one or several joined sequences, [N] string."""
        self._learn(np.unique(token_ids))
        pieces = self._array.take(pa.array(token_ids))
        broken = self._is_broken[token_ids]
        if not broken.any():
            return pieces
        mended = pieces.to_numpy(zero_copy_only=False)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], broken, [False]])))
        for start, end in edges.reshape(-1, 2).tolist():
            mended[start:end] = ""
            mended[start] = self._joined(token_ids[start:end])
        return pa.array(mended, pa.string())

    def _learn(self, token_ids: npt.NDArray[Any]) -> None:
        if not len(token_ids):
            return
        size = int(token_ids[-1]) + 1
        if size > len(self._known):
            more = size - len(self._known)
            self._known = np.concatenate([self._known, np.full(more, None, dtype=object)])
            self._is_broken = np.concatenate([self._is_broken, np.zeros(more, dtype=bool)])
        new = [int(i) for i in token_ids if self._known[i] is None]
        for i, text in zip(new, self._decode([[i] for i in new]), strict=True):
            self._known[i] = text
            self._is_broken[i] = _BROKEN in text
        if new:
            self._array = pa.array(self._known, pa.string())

    def _joined(self, token_ids: TokenIds) -> str:
        key = token_ids.tobytes()
        if key not in self._runs:
            if len(self._runs) > 100_000:
                self._runs.clear()
            (self._runs[key],) = self._decode([token_ids.tolist()])
        return self._runs[key]

    def _decode(self, sequences: Sequence[list[int]]) -> list[str]:
        if not sequences:
            return []
        texts: list[str] = self._tokenizer.batch_decode(sequences, skip_special_tokens=False)
        return texts
