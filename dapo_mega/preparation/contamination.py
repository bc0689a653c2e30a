"""Finds problems of evaluation sets in training prompts, by the runs of words (n-grams) that both have."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from dapo_mega.preparation.normalization import DRAWING, NormalText, normal_text

_CLUE: Final = 3
"""Words of a clue: a run that few evaluation problems have, so that it tells which one to compare with."""
_CLUE_PROBLEMS: Final = 8
"""Problems that may have a clue at most."""
_CLUE_SHARE: Final = 0.15
"""Clues that a prompt shares with a problem before the two are compared, as a share of the problem's words."""
_ORDERED_SHARE: Final = 0.85
"""Share of a problem's words that must stand in the prompt in their order where no long runs are shared."""
_STRETCH: Final = 2.0
"""Words of the prompt that hold these words, at most, as a multiple of the problem's."""


@dataclass(frozen=True)
class EvaluationProblem:
    """A problem of an evaluation set: where it stands, and its text."""

    where: str
    text: str


@dataclass(frozen=True)
class Contamination:
    """What a prompt shares with a problem: the longest run of words, and the share of the problem's words that stand
    in shared n-grams."""

    problem: EvaluationProblem
    run: tuple[str, ...]
    share: float

    def evidence(self) -> str:
        """One line that names the problem and quotes what is shared."""
        shown = " ".join(self.run)
        return (
            f"{self.share:.0%} of {self.problem.where} stands here in runs of words; the longest has "
            f"{len(self.run)} words: {shown if len(shown) <= 300 else shown[:300] + ' ...'}"
        )


class EvaluationIndex:
    """The n-grams of evaluation problems.

    A prompt contains a problem if at least `min_share` of the problem's words stand in runs of `ngram` words that both
    have. A problem of fewer than `ngram` words, but at least `min_words`, must stand in the prompt as a whole; a still
    shorter one must be the whole prompt. The code of a drawing counts only where the other words are fewer than twice
    `ngram`, so that problems with other drawings may share them. Where words were put in so that no run is left, the
    words of the problem are looked for in their order, numbers included. Memory: about 300 bytes per word of the
    problems.
    """

    def __init__(self, problems: Iterable[EvaluationProblem], ngram: int, min_words: int, min_share: float) -> None:
        self._ngram = ngram
        self._min_share = min_share
        self._problems: list[tuple[EvaluationProblem, tuple[str, ...]]] = []
        self._grams: dict[int, dict[tuple[str, ...], list[int]]] = {}
        self._whole: dict[tuple[str, ...], int] = {}
        self._clues: dict[tuple[str, ...], list[int]] = {}
        for problem in problems:
            bare = normal_text(DRAWING.sub(" ", problem.text)).words
            own = bare if len(bare) >= 2 * ngram else normal_text(problem.text).words
            self._add(problem, own, min_words)
        self._clues = {clue: found for clue, found in self._clues.items() if len(found) <= _CLUE_PROBLEMS}

    def __len__(self) -> int:
        return len(self._problems)

    def find(self, text: NormalText) -> Contamination | None:
        """The problem of which the largest share stands in `text`, if that is enough; the first one of equals."""
        found = text.words
        whole = self._whole.get(found)
        if whole is not None:
            problem, own = self._problems[whole]
            return Contamination(problem, own, 1.0)
        candidates: dict[int, None] = {}
        for size, grams in self._grams.items():
            for gram in _grams(found, size):
                candidates.update(dict.fromkeys(grams.get(gram, ())))
        best: Contamination | None = None
        for number in sorted(candidates):
            problem, own = self._problems[number]
            run, share = _shared(own, found, min(self._ngram, len(own)))
            if share >= self._min_share and (best is None or share > best.share):
                best = Contamination(problem, run, share)
        return best or self._in_order(found)

    def _in_order(self, found: tuple[str, ...]) -> Contamination | None:
        """The problem whose words stand in `found` in their order, with others between them."""
        clues: Counter[int] = Counter()
        for clue in set(_grams(found, _CLUE)):
            clues.update(self._clues.get(clue, ()))
        best: Contamination | None = None
        for number, count in sorted(clues.items()):
            problem, own = self._problems[number]
            if len(own) < 2 * self._ngram or count < max(_CLUE, _CLUE_SHARE * len(own)):
                continue
            share = _ordered_words(own, _around(own, found)) / len(own)
            numbers, others = (Counter(filter(str.isdecimal, words)) for words in (own, found))
            if share >= _ORDERED_SHARE and numbers <= others and (best is None or share > best.share):
                best = Contamination(problem, _shared(own, found, _CLUE)[0], share)
        return best

    def _add(self, problem: EvaluationProblem, own: tuple[str, ...], min_words: int) -> None:
        if not own:
            return
        number = len(self._problems)
        self._problems.append((problem, own))
        self._whole.setdefault(own, number)
        size = min(self._ngram, len(own))
        if size >= min_words:
            grams = self._grams.setdefault(size, {})
            for gram in set(_grams(own, size)):
                grams.setdefault(gram, []).append(number)
        for clue in set(_grams(own, _CLUE)):
            self._clues.setdefault(clue, []).append(number)


def _grams(words: tuple[str, ...], size: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(size)), strict=False)


def _around(own: tuple[str, ...], found: tuple[str, ...]) -> tuple[str, ...]:
    """The part of `found`, of at most `_STRETCH` times the problem's words, that has the most clues of it."""
    length = int(_STRETCH * len(own))
    if len(found) <= length:
        return found
    clues = set(_grams(own, _CLUE))
    places = [place for place, clue in enumerate(_grams(found, _CLUE)) if clue in clues]
    most = first = end = 0
    for at, place in enumerate(places):
        while end < len(places) and places[end] < place + length:
            end += 1
        if end - at > most:
            most, first = end - at, at
    begin = max(0, places[first] - len(own) // 4)
    return found[begin : begin + length]


def _ordered_words(own: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Length of the longest common subsequence (Hyyrö 2004, one bit of an integer per word of `own`)."""
    places: dict[str, int] = {}
    for place, word in enumerate(own):
        places[word] = places.get(word, 0) | 1 << place
    full = (1 << len(own)) - 1
    row = full
    for word in other:
        matched = row & places.get(word, 0)
        row = (row + matched | row - matched) & full
    return len(own) - row.bit_count()


def _shared(own: tuple[str, ...], other: tuple[str, ...], size: int) -> tuple[tuple[str, ...], float]:
    """The longest run of `own` made of n-grams that `other` has, and the share of its words in such n-grams."""
    theirs = set(_grams(other, size))
    begins = [start for start, gram in enumerate(_grams(own, size)) if gram in theirs]
    covered: set[int] = set()
    run: tuple[str, ...] = ()
    begin = previous = -2
    for start in begins:
        begin = start if start != previous + 1 else begin
        previous = start
        covered.update(range(start, start + size))
        if start + size - begin > len(run):
            run = own[begin : start + size]
    return run, len(covered) / len(own)
