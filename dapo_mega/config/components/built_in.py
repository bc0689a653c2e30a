"""Rewards that are computed from the response alone, or from it and the ground truth."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from dapo_mega.config.components.base import ComponentConfig, CorrectnessOf

Extraction = Literal["dapo", "boxed", "r1", "gsm8k", "auto", "none"]
"""Where a response's answer is."""

Language = Literal["ar", "el", "en", "he", "hi", "ja", "ko", "ru", "th", "zh"]


def check_values(correct: float, incorrect: float) -> None:
    """Raises ValueError unless a right answer is worth more than a wrong one."""
    if correct <= incorrect:
        raise ValueError(f"reward.correct={correct} must be larger than reward.incorrect={incorrect}")


def check_phase_in(steps: tuple[int, int]) -> None:
    """Raises ValueError unless the steps are the first and last of a range."""
    first, last = steps
    if not 0 <= first <= last:
        raise ValueError(f"reward.length_phase_in={[first, last]} must be [first, last] with 0 <= first <= last")


class AnswerComponent(ComponentConfig):
    """Compares the response's answer with the ground truth, and so decides whether the response is correct."""

    kind: Literal["answer"] = "answer"
    extraction: Extraction = "dapo"
    """Where the answer is: as reward.extraction."""
    numeric_tolerance: float = Field(default=0.0, ge=0, lt=1)
    """As reward.numeric_tolerance."""
    correct: float = 1.0
    """Value of a right answer; larger than incorrect."""
    incorrect: float = -1.0
    """Value of a wrong or missing answer."""

    gives_correctness: ClassVar[CorrectnessOf] = "always"
    reads_answers: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_values(self.correct, self.incorrect)
        return self


class EnvironmentComponent(ComponentConfig):
    """What an environment of your own gave in all turns of a trajectory together, and what it last said of correct."""

    kind: Literal["environment"] = "environment"

    gives_correctness: ClassVar[CorrectnessOf] = "maybe"
    may_be_penalty: ClassVar[bool] = True


class CoinComponent(ComponentConfig):
    """A fair coin that calls a response correct or not: `reward.source=random`, and in no list of components."""

    kind: Literal["coin"] = "coin"
    correct: float = 1.0
    """Value of heads."""
    incorrect: float = -1.0
    """Value of tails."""

    gives_correctness: ClassVar[CorrectnessOf] = "always"


class R1FormatComponent(ComponentConfig):
    """The format reward of DeepSeek-R1: 1 for <think>...</think> <answer>...</answer> and nothing else, else 0. The
    first tag may stand at the prompt's end, as in the template r1."""

    kind: Literal["r1_format"] = "r1_format"


class LanguageComponent(ComponentConfig):
    """The language consistency of DeepSeek-R1: the share of words in the script of one language, 1 without words.
    Formulas, code and single letters do not count. Languages of one script cannot be told apart."""

    kind: Literal["language"] = "language"
    language: Language = "en"
    """The language whose script the words should have."""


class RepetitionComponent(ComponentConfig):
    """Repetition penalty: minus the share of the response's n-grams of tokens that occurred before in it."""

    kind: Literal["repetition"] = "repetition"
    ngram_tokens: int = Field(default=20, ge=1)
    """Tokens of an n-gram. Short ones repeat in every long text: 3 is strict."""


class LengthDapoComponent(ComponentConfig):
    """DAPO's soft overlong punishment, from 0 to -1 over the last tokens before rollout.max_response_tokens."""

    kind: Literal["length_dapo"] = "length_dapo"
    cache_tokens: int = Field(default=4096, ge=1)
    """As reward.overlong_cache_tokens."""

    shapes_length: ClassVar[bool] = True


class LengthKimiComponent(ComponentConfig):
    """Kimi k1.5's length reward, which compares the responses of a group: as reward.length_weight. Needs a component
    that decides correctness."""

    kind: Literal["length_kimi"] = "length_kimi"
    phase_in: tuple[int, int] = (0, 0)
    """[first, last] step over which its weight grows: as reward.length_phase_in."""

    shapes_length: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_phase_in(self.phase_in)
        return self

    def weight_at(self, step: int) -> float:
        """Its weight at a step, counted from 1."""
        first, last = self.phase_in
        if step >= last:
            return self.weight
        return self.weight * max(step - first, 0) / (last - first)
