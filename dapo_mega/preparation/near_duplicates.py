"""Finds near duplicates by MinHash and locality-sensitive hashing, with the keys of all rows on disk.

`datasketch` makes the signatures. Its own index would hold every signature in memory, some 4 kB a row; here the keys of
one band at a time are sorted, so that two million rows need about 200 MB.
"""

import hashlib
import zlib
from array import array
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from datasketch import MinHash

from dapo_mega.preparation.normalization import NormalText, normal_text

NUM_BANDS = 20
ROWS_PER_BAND = 6
"""120 permutations. Rows of similarity s meet in a band with probability 1 - (1 - s^6)^20: 0.998 at s = 0.8, 0.27 at
0.5, 0.01 at 0.3."""
SEED = 1

_KEY_BYTES = 8
_MAX_COMPARED = 16
"""Rows of one bucket that a later row is compared with: a bucket of n rows costs at most 16 n comparisons."""
_CACHED_TEXTS = 4096


class NearDuplicates:
    """Rows are added in order; `found` then names those that are near duplicates of an earlier row. `num_compared`
    counts its comparisons.

    Two rows are near duplicates if they hold the same numbers, have the same answer, and the Jaccard similarity of
    their shingles is at least `threshold`: with another number, or another question about the same facts, it is another
    problem. Numbers and answer are part of the keys, so that thousands of problems of one pattern cost no comparisons.
    MinHash only proposes pairs; the similarity is computed from the texts, so none is removed by
    chance, but a pair above the threshold is missed with the probability given at `NUM_BANDS`.
    """

    def __init__(self, file: Path, threshold: float) -> None:
        self._path = file
        self._file = file.open("wb")
        self._threshold = threshold
        self._sketch = MinHash(num_perm=NUM_BANDS * ROWS_PER_BAND, seed=SEED, hashfunc=zlib.crc32)
        self._num_rows = 0
        self.num_compared = 0

    def add(self, text: NormalText, answer: str) -> None:
        self._sketch.clear()
        self._sketch.update_batch(text.shingles())
        equal = "\n".join((*text.numbers, normal_text(answer).spelling)).encode("utf-8", "surrogatepass")
        keys = b"".join(
            hashlib.blake2b(band.tobytes() + equal, digest_size=_KEY_BYTES).digest()
            for band in self._sketch.hashvalues.reshape(NUM_BANDS, ROWS_PER_BAND).astype("<u4")
        )
        self._file.write(keys)
        self._num_rows += 1

    def found(self, text_of: Callable[[int], NormalText]) -> dict[int, tuple[int, float]]:
        """For each row that repeats an earlier one, that row and the similarity. `text_of` gives a row's text again.

        Rows that are removed have no duplicates of their own: a chain of small changes ends when it has come too far
        from the row that stays.
        """
        self._file.close()

        @lru_cache(maxsize=_CACHED_TEXTS)
        def shingles(row: int) -> set[bytes]:
            return text_of(row).shingles()

        removed: dict[int, tuple[int, float]] = {}
        for later, earlier in self._pairs():
            if later in removed or earlier in removed:
                continue
            self.num_compared += 1
            own, other = shingles(later), shingles(earlier)
            similarity = len(own & other) / len(own | other)
            if similarity >= self._threshold:
                removed[later] = earlier, similarity
        return removed

    def _pairs(self) -> list[tuple[int, int]]:
        """Pairs (later row, earlier row) with an equal key, sorted."""
        if not self._num_rows:
            return []
        keys = np.memmap(self._path, dtype="<u8", mode="r", shape=(self._num_rows, NUM_BANDS))
        pairs = np.empty(0, dtype=np.int64)
        for band in range(NUM_BANDS):
            pairs = np.union1d(pairs, _pairs_of_band(np.ascontiguousarray(keys[:, band]), self._num_rows))
        return [divmod(pair, self._num_rows) for pair in pairs.tolist()]


def _pairs_of_band(keys: np.ndarray, num_rows: int) -> np.ndarray:
    """Pairs of rows with an equal key, as later row * number of rows + earlier row, unsorted."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    sizes = np.diff(np.append(begins, len(keys)))
    found = array("q")
    for begin, size in zip(begins[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        rows = order[begin : begin + size].tolist()  # Ascending, as the sort is stable.
        for place, later in enumerate(rows):
            found.extend(later * num_rows + earlier for earlier in rows[: min(place, _MAX_COMPARED)])
    return np.array(found, dtype=np.int64)
