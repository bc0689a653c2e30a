r"""The filters that a recipe switches on, and the rules of those that tell problems that a comparison of answers cannot
reward: choices, true or false, proofs, wrong types.

Every rule returns what it found, as evidence, or None.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dapo_mega.config.preparation import FiltersConfig
from dapo_mega.errors import InputError
from dapo_mega.preparation.candidates import Candidate
from dapo_mega.preparation.normalization import DRAWING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LABELS = "ABCDE"
_OPTION = re.compile(
    r"(?<![\w\\])\(\s*([A-E])\s*\)"  # (A)
    r"|\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\(?([A-E])\)?\s*[.:)]?\s*\}"  # \textbf{(A)}
    r"|(?:^|[\s$~])([A-E])(?:[.):](?=\s|\$|\\)|[\uff0e\uff1a\u3001])",  # A.  A)  A:
    re.MULTILINE,
)
_TRUE_FALSE_ANSWER = re.compile(r"\W*(?:\\(?:text|textbf|mathrm)\W*)?(true|false|yes|no)\W*", re.IGNORECASE)
_TRUE_FALSE_QUESTION = re.compile(
    r"\btrue\s+or\s+false\b|\b(?:say|state|decide|determine|answer)\s+(?:whether|if)\b[^.?!]{0,200}\b(?:true|false)\b",
    re.IGNORECASE,
)
_PROOF = re.compile(
    r"(?:^|[.!?:;,\n]|\b(?:and|then|also|please|\w\))\s)\s{0,20}(?:\W{0,4}|\(?\w\)\s{0,20})"
    r"((?:prove|show|demonstrate|verify|disprove)\s+(?:or\s+disprove\s+)?(?:that|the\s+(?:following|inequality|identity))\b)",
    re.IGNORECASE,
)
_PROOF_CHINESE = re.compile(r"证明|求证")
_ASKS = re.compile(
    r"\b(?:find|compute|calculate|evaluate|determine|solve|what|how\s+(?:many|much))\b|\?", re.IGNORECASE
)
_INTEGER = re.compile(r"[+-]?\d+(?:\.0+)?|[+-]?\d{1,3}(?:,\d{3})+")
_WRAPPED = re.compile(r"\\boxed\s*\{(.*)\}|\$+([^$]+)\$+|\\[(\[](.*)\\[)\]]", re.DOTALL)


def multiple_choice(problem: str) -> str | None:
    """The options, if at least three stand in the order of the alphabet, beginning with A."""
    expected = iter(_LABELS)
    wanted = next(expected)
    first = 0
    problem = DRAWING.sub(" ", problem)
    for option in _OPTION.finditer(problem):
        if next(group for group in option.groups() if group) == wanted:
            first = option.start() if wanted == "A" else first
            if wanted == "C":
                return _shown(problem[first:])
            wanted = next(expected)
    return None


def true_or_false(problem: str, answer: str) -> str | None:
    """The answer, if it is true, false, yes or no, or the sentence that asks for it."""
    if found := _TRUE_FALSE_ANSWER.fullmatch(answer):
        return f"the answer is {found[1]}"
    question = _TRUE_FALSE_QUESTION.search(problem)
    return _shown(question[0]) if question else None


def proof(problem: str) -> str | None:
    """The demand for a proof, if the problem asks for nothing else."""
    demand = _PROOF.search(problem)
    if demand and not _ASKS.search(problem):
        return _shown(problem[demand.start(1) :])
    chinese = _PROOF_CHINESE.search(problem)
    return _shown(problem[chinese.start() :]) if chinese else None


def integer_of(answer: str) -> str | None:
    """The whole number that an answer is, written with digits and a minus only: `27.0` and `27,000` are `27` and
    `27000`; None for any other answer."""
    text = answer.strip()
    while wrapped := _WRAPPED.fullmatch(text):
        text = next(group for group in wrapped.groups() if group is not None).strip()
    text = text.replace("{,}", ",").replace("\N{MINUS SIGN}", "-").removesuffix(".")
    if not _INTEGER.fullmatch(text):
        return None
    sign = "-" if text.startswith("-") else ""
    digits = text.lstrip("+-").partition(".")[0].replace(",", "").lstrip("0") or "0"
    return "0" if digits == "0" else sign + digits


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:200] + " ..."


class Filters:
    """The filters of a recipe, in the order of their cost. Raises `InputError` if one needs what is not there."""

    def __init__(self, config: FiltersConfig) -> None:
        self._config = config
        self._tokenizer: PreTrainedTokenizerBase | None = None
        rules: list[tuple[bool, str, Callable[[Candidate], str | None]]] = [
            (
                True,
                "too many characters",
                lambda c: f"{len(c.text)} characters" if len(c.text) > config.max_characters else None,
            ),
            (
                config.answer_type == "integer",
                "answer is no integer",
                lambda c: None if integer_of(c.answer) else f"the answer is {c.answer:.200}",
            ),
            (config.multiple_choice, "multiple choice", lambda c: multiple_choice(c.problem)),
            (config.true_false, "true or false", lambda c: true_or_false(c.problem, c.answer)),
            (config.proofs, "proof", lambda c: proof(c.problem)),
        ]
        self._rules = [(reason, rule) for is_on, reason, rule in rules if is_on]
        if config.languages:
            language = LanguageFilter(config.languages)
            self._rules.append(("language", lambda c: language.refusal(c.problem)))
        if config.tokenizer:
            from dapo_mega.data.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(config.tokenizer)
            self._rules.append(("too many tokens", self._too_long))

    def refusal(self, candidate: Candidate) -> tuple[str, str] | None:
        """The reason why a problem is left out, and the evidence; None for one that stays."""
        for reason, rule in self._rules:
            evidence = rule(candidate)
            if evidence is not None:
                return reason, evidence
        return None

    def versions(self) -> dict[str, str]:
        """What decides besides packages: the tokenizer's content."""
        if self._tokenizer is None:
            return {}
        backend: Any = self._tokenizer
        content = backend.backend_tokenizer.to_str() if self._tokenizer.is_fast else repr(self._tokenizer)
        return {"tokenizer_sha256": hashlib.sha256(content.encode()).hexdigest()}

    def _too_long(self, candidate: Candidate) -> str | None:
        if self._tokenizer is None or self._config.max_prompt_tokens is None:
            return None
        num_tokens = len(self._tokenizer(candidate.text, add_special_tokens=False)["input_ids"])
        return f"{num_tokens} tokens" if num_tokens > self._config.max_prompt_tokens else None


MIN_LETTERS = 24
"""Texts with fewer letters outside of formulas are not judged; an ideograph or a kana counts as six."""
MIN_PROBABILITY = 0.55
"""A language is only named if it is this probable."""

# Each opening ends the one before, so that a text of openings costs linear time.
_FORMULA = re.compile(
    r"\$\$.*?\$\$|\$.*?\$|\\\[(?:(?!\\\[).)*?\\\]|\\\((?:(?!\\\().)*?\\\)"
    r"|\\begin\{(\w+\*?)\}(?:(?!\\begin\{).)*?\\end\{\1\}|\\(?:begin|end)\{\w+\*?\}",
    re.DOTALL,
)
_COMMAND = re.compile(r"\\[a-zA-Z]+|[\d_^{}=+*/<>|\\]")
_IDEOGRAPH = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


class LanguageFilter:
    """Refuses texts of other languages. Raises `InputError` for unknown codes, and without py3langid."""

    def __init__(self, languages: Sequence[str]) -> None:
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError as error:
            raise InputError(
                'filters.languages needs the package py3langid; install it with pip install "dapo_mega[language]"'
            ) from error
        self._identifier: LanguageIdentifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        known = set(self._identifier.labels)
        if unknown := sorted(set(languages) - known):
            raise InputError(f"filters.languages: {unknown[0]!r} is not one of {', '.join(sorted(known))}")
        self._languages = frozenset(languages)

    def refusal(self, text: str) -> str | None:
        """The language, if it is probably none of those to keep."""
        prose = _COMMAND.sub(" ", _FORMULA.sub(" ", text))
        num_letters = sum(map(str.isalpha, prose)) + 5 * len(_IDEOGRAPH.findall(prose))
        if num_letters < MIN_LETTERS:
            return None
        language, probability = self._identifier.classify(prose)
        if language in self._languages or probability < MIN_PROBABILITY:
            return None
        return f"{language} with probability {probability:.2f}"
