"""Rewards that are computed in this process: answer, coin, R1's format and language consistency, repetition, length."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from dapo_mega.rewards.budget import Budgeted
from dapo_mega.rewards.records import Reward, RewardRecord, Score, ScoringFailure
from dapo_mega.rewards.thoughts import spoken
from dapo_mega.rewards.verifier import AnswerVerifier
from dapo_mega.types import TokenIds

Scores = list[Score | ScoringFailure]

_SCRIPTS: Final = {
    "ar": ("ARABIC",), "el": ("GREEK",), "en": ("LATIN",), "he": ("HEBREW",), "hi": ("DEVANAGARI",),
    "ja": ("CJK", "HIRAGANA", "KATAKANA"), "ko": ("HANGUL",), "ru": ("CYRILLIC",), "th": ("THAI",), "zh": ("CJK",),
}  # fmt: skip
"""First words of the Unicode names of a language's letters."""
_WORD_OF_ONE_CHARACTER: Final = frozenset({"CJK", "HIRAGANA", "KATAKANA", "THAI"})
# Each opening bracket ends the one before, so that a text of openings costs linear time.
_NOT_PROSE: Final = re.compile(
    r"```.*?```|`[^`\n]*`|\$[^$]*\$|\\\([^\\]*(?:\\(?![()])[^\\]*)*\\\)|\\\[[^\\]*(?:\\(?![\[\]])[^\\]*)*\\\]|\\[A-Za-z]+"
    r"|</?\w+>",
    re.DOTALL,
)
_LETTERS: Final = re.compile(r"[^\W\d_]+")
_R1_TAGS: Final = ("<think>", "</think>", "<answer>", "</answer>")


class AnswerReward(Budgeted):
    """Compares answers with ground truths. DAPO eq. 7."""

    def __init__(self, verifier: AnswerVerifier, correct: float = 1.0, incorrect: float = -1.0) -> None:
        self._verifier = verifier
        self.budget = verifier.budget
        self._correct = correct
        self._incorrect = incorrect

    def score(self, records: Sequence[RewardRecord]) -> Scores:
        # Nothing of a thought that the prompt has opened can hold the answer.
        texts = [spoken(each.whole_response) if each.opened_thought else each.response for each in records]
        verdicts = self._verifier.verify([(text, each.ground_truth) for text, each in zip(texts, records, strict=True)])
        return [
            Score(
                accuracy_reward(verdict.correct, self._correct, self._incorrect),
                verdict.correct,
                answer=verdict.answer,
                outcome=verdict.outcome,
            )
            for verdict in verdicts
        ]

    def close(self) -> None:
        self._verifier.close()


class _RewardOfOne(Reward):
    """A reward that needs one record only, and no resources."""

    def score(self, records: Sequence[RewardRecord]) -> Scores:
        return [self.of(record) for record in records]

    def of(self, record: RewardRecord) -> Score:
        raise NotImplementedError


class EnvironmentReward(_RewardOfOne):
    """The sum of the rewards of all turns; the last turn with `correct` decides whether the response is. A response
    without turns, as one that was made up, is worth 0 and not correct."""

    def of(self, record: RewardRecord) -> Score:
        sums = Counter[str]()
        for turn in record.turns:
            sums.update(turn)
        said = [turn["correct"] for turn in record.turns if "correct" in turn] if record.turns else [0.0]
        parts = {name: total for name, total in sums.items() if name not in ("reward", "correct")}
        return Score(sums["reward"], bool(said[-1]) if said else None, parts)


class CoinReward(_RewardOfOne):
    """Calls a response correct by a fair coin, which the seed and the request's id decide."""

    def __init__(self, seed: int, correct: float = 1.0, incorrect: float = -1.0) -> None:
        self._seed = seed
        self._correct = correct
        self._incorrect = incorrect

    def is_heads(self, request_id: int) -> bool:
        return bool(np.random.Philox(key=[self._seed, request_id]).random_raw() & 1)

    def of(self, record: RewardRecord) -> Score:
        heads = self.is_heads(record.request_id)
        return Score(accuracy_reward(heads, self._correct, self._incorrect), heads)


class R1FormatReward(_RewardOfOne):
    """1 for <think>...</think> <answer>...</answer> and nothing else, else 0. arXiv 2501.12948, section 2.2.2."""

    def of(self, record: RewardRecord) -> Score:
        return Score(float(is_r1_format(record.whole_response.strip())))


def is_r1_format(text: str) -> bool:
    """Whether a text is <think>...</think> <answer>...</answer>, each tag once and only whitespace between the two."""
    if any(text.count(tag) != 1 for tag in _R1_TAGS):
        return False
    positions = [text.index(tag) for tag in _R1_TAGS]
    between = text[positions[1] + len("</think>") : positions[2]]
    is_whole = positions[0] == 0 and text.endswith("</answer>")
    return is_whole and positions == sorted(positions) and not between.strip()


class LanguageReward(_RewardOfOne):
    """The share of words in the script of one language. arXiv 2501.12948, section 2.3.1.

    Raises ValueError for a language whose script is not known.
    """

    def __init__(self, language: str) -> None:
        if language not in _SCRIPTS:
            raise ValueError(f"language {language!r}; choose one of {', '.join(_SCRIPTS)}")
        self._scripts = _SCRIPTS[language]

    def of(self, record: RewardRecord) -> Score:
        counts = words_by_script(record.response)
        total = sum(counts.values())
        return Score(sum(counts[script] for script in self._scripts) / total if total else 1.0)


def words_by_script(text: str) -> Counter[str]:
    """How many words a text has in each script, without formulas, code and tags.

    A word is a run of letters of one script; in scripts without spaces each letter is one. Single letters of other
    scripts are taken for variables.
    """
    counts: Counter[str] = Counter()
    for run, times in Counter(_LETTERS.findall(_NOT_PROSE.sub(" ", text))).items():
        for script, letters in groupby(run, _script):
            length = len(list(letters))
            if script in _WORD_OF_ONE_CHARACTER:
                counts[script] += times * length
            elif length > 1:
                counts[script] += times
    return counts


@lru_cache(maxsize=1 << 16)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "UNKNOWN").partition(" ")[0]


class RepetitionReward(_RewardOfOne):
    """Minus the share of n-grams of tokens that occurred before in the response, in [-1, 0]. As in arXiv 2502.03373."""

    def __init__(self, ngram_tokens: int) -> None:
        self._size = ngram_tokens

    def of(self, record: RewardRecord) -> Score:
        return Score(-repeated_share(np.asarray(record.token_ids), self._size))


def repeated_share(token_ids: TokenIds, size: int) -> float:
    """The share of a sequence's n-grams that occurred before in it; 0 for one that is shorter than two n-grams need.

    N-grams are told apart by a hash of 64 bits.
    """
    count = len(token_ids) - size + 1
    if count < 2:
        return 0.0
    hashes: npt.NDArray[np.uint64] = np.zeros(count, np.uint64)
    values = token_ids.astype(np.uint64)
    for offset in range(size):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + values[offset : offset + count] + np.uint64(1)
        hashes ^= hashes >> np.uint64(29)
    return 1.0 - len(np.unique(hashes)) / count


class OverlongReward(_RewardOfOne):
    """DAPO's soft overlong punishment. DAPO eq. 13."""

    def __init__(self, max_length: int, cache_length: int) -> None:
        self._max_length = max_length
        self._cache_length = cache_length

    def of(self, record: RewardRecord) -> Score:
        return Score(soft_overlong_punishment(len(record.token_ids), self._max_length, self._cache_length))


def accuracy_reward(correct: bool, correct_reward: float = 1.0, incorrect_reward: float = -1.0) -> float:
    """Rule-based outcome reward: +1 for an equivalent answer, -1 otherwise. DAPO eq. 7."""
    return correct_reward if correct else incorrect_reward


def soft_overlong_punishment(length: int, max_length: int, cache_length: int) -> float:
    """Length penalty in [-1, 0], to be added to the accuracy reward. DAPO eq. 13.

    It is 0 up to `max_length - cache_length`, falls linearly to -1 at `max_length`, and stays at -1 beyond.
    All three arguments count response tokens; `max_length` is the longest generation (20480 in the paper)
    and `cache_length` the interval of soft punishment (4096).

    Raises ValueError where `cache_length` is not in 1..`max_length` or `length` is negative.
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(
            f"cache_length={cache_length} with max_length={max_length}; choose 1 <= cache_length <= max_length"
        )
    if length < 0:
        raise ValueError(f"length={length}; a response has 0 tokens or more")
    unpunished = max_length - cache_length
    if length <= unpunished:
        return 0.0
    if length <= max_length:
        return (unpunished - length) / cache_length
    return -1.0


def length_rewards(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """Kimi k1.5's length reward of every response of one group, in [-0.5, 0.5] (arXiv 2501.12599, section 2.3.3).

    With l = 0.5 - (length - shortest) / (longest - shortest), a correct response gets l and a wrong one min(0, l):
    short correct responses gain, long ones lose, and no wrong one gains. Responses of equal length get 0. `lengths`
    count response tokens.
    """
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [share if is_correct else min(0.0, share) for share, is_correct in zip(shares, correct, strict=True)]
