"""Finds exact duplicates: problems of one spelling. Keeps a hash and a place per distinct problem, no text."""

import hashlib
from array import array
from functools import lru_cache

from dapo_mega.data.readers import Row
from dapo_mega.preparation.normalization import normal_text

_DIGEST_BYTES = 16
_CACHED_TEXTS = 2**15


class DistinctProblems:
    """The distinct problems so far, numbered from 0. About 230 bytes each."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._answers = array("q")
        self._rows = array("q")
        self._sources = array("I")
        self._source_numbers: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, text: str) -> int | None:
        """The number of the problem that has the spelling of `text`."""
        return self._numbers.get(_digest(text))

    def add(self, text: str, answer: str, row: Row) -> int:
        """Add a problem, also one whose text was there before; returns its number."""
        number = len(self)
        self._numbers.setdefault(_digest(text), number)
        self._answers.append(_short_hash(answer))
        self._rows.append(row.number)
        self._sources.append(self._source_numbers.setdefault((row.source, row.unit), len(self._source_numbers)))
        return number

    def has_answer(self, number: int, answer: str) -> bool:
        """Whether this is the answer of the problem of this number."""
        return self._answers[number] == _short_hash(answer)

    def where(self, number: int) -> str:
        """The place of the row of this number."""
        source, unit = list(self._source_numbers)[self._sources[number]]
        return f"{source}, {unit} {self._rows[number]}"

    def source(self, number: int) -> str:
        """The name of the source of the row of this number."""
        return list(self._source_numbers)[self._sources[number]][0].partition("/")[0]


@lru_cache(maxsize=_CACHED_TEXTS)  # The public DAPO-Math-17k repeats each of its texts a hundred times.
def _digest(text: str) -> bytes:
    spelling = normal_text(text).spelling
    return hashlib.blake2b(spelling.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def _short_hash(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little", signed=True
    )
