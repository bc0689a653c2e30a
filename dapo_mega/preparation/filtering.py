"""Applies the filters that a recipe switches on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dapo_mega.config.preparation import FiltersConfig
from dapo_mega.preparation.candidates import Candidate
from dapo_mega.preparation.filters import integer_of, multiple_choice, proof, true_or_false

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Filters:
    """The filters of a recipe, in the order of their cost. Raises `InputError` if one needs what is not there."""

    def __init__(self, config: FiltersConfig) -> None:
        self._config = config
        self._tokenizer: PreTrainedTokenizerBase | None = None
        rules: list[tuple[bool, str, Callable[[Candidate], str | None]]] = [
            (True, "too many characters", self._enormous),
            (config.answer_type == "integer", "answer is no integer", _not_integer),
            (config.multiple_choice, "multiple choice", lambda c: multiple_choice(c.problem)),
            (config.true_false, "true or false", lambda c: true_or_false(c.problem, c.answer)),
            (config.proofs, "proof", lambda c: proof(c.problem)),
        ]
        self._rules = [(reason, rule) for is_on, reason, rule in rules if is_on]
        if config.languages:
            from dapo_mega.preparation.languages import LanguageFilter

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

    def _enormous(self, candidate: Candidate) -> str | None:
        num_characters = len(candidate.text)
        return f"{num_characters} characters" if num_characters > self._config.max_characters else None

    def _too_long(self, candidate: Candidate) -> str | None:
        if self._tokenizer is None or self._config.max_prompt_tokens is None:
            return None
        num_tokens = len(self._tokenizer(candidate.text, add_special_tokens=False)["input_ids"])
        return f"{num_tokens} tokens" if num_tokens > self._config.max_prompt_tokens else None


def _not_integer(candidate: Candidate) -> str | None:
    return None if integer_of(candidate.answer) is not None else f"the answer is {candidate.answer:.200}"
