"""Tells the language of a problem by py3langid, from its words outside of formulas."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dapo_mega.errors import InputError

if TYPE_CHECKING:
    pass

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
