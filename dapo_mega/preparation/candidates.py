"""Reads a source's row as a problem and an answer, or says why it is neither."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dapo_mega.config.preparation import PreparationSourceConfig
from dapo_mega.data.ground_truths import ground_truth_text, parsed_answer
from dapo_mega.data.numbers import NOT_FINITE, NumberText, plain
from dapo_mega.data.readers import Row
from dapo_mega.data.templates import PROBLEM, TEMPLATES, as_messages, refuse_shown_answer, template_text
from dapo_mega.errors import InputError

INVALID_REASONS = ("no prompt", "prompt is no text", "no answer", "answer cannot be parsed")
"""Reasons for which a row is invalid, whatever the filters are."""

_OWN_COLUMNS = ("prompt", "reward_model", "data_source", "__index_level_0__")
"""Columns that are written anew, or that are an index of pandas."""


@dataclass(frozen=True)
class Invalid:
    """Why a row is left out: one of `INVALID_REASONS`, and what stands there."""

    reason: str
    evidence: str


@dataclass(frozen=True)
class Candidate:
    """A row's conversation, the text of all its turns, its last question, and its answer, without instruction."""

    messages: tuple[Mapping[str, str], ...]
    text: str
    problem: str
    answer: str


class CandidateReader:
    """Reads the rows of one source. `num_instructions` counts prompts from which an instruction was taken off."""

    def __init__(self, name: str, config: PreparationSourceConfig, *, keep_unparsed: bool) -> None:
        self._name = name
        self._config = config
        self._keep_unparsed = keep_unparsed
        self._frames = instruction_frames(config.instruction)
        self.num_instructions = 0
        # Datasets repeat answers: integers, or a problem with its answer a hundred times.
        self._parsed = lru_cache(maxsize=2**16)(lambda text: _parsed(text, config))

    def read(self, row: Row) -> Candidate | Invalid:
        prompt = _read_prompt(row, self._config)
        if isinstance(prompt, Invalid):
            return prompt
        last_user = max(i for i, message in enumerate(prompt) if message["role"] == "user")
        problem = prompt[last_user]["content"]
        bare = without_instruction(problem, self._frames)
        if bare is not None:
            self.num_instructions += 1
            problem = bare
        if not problem.strip():
            return Invalid("no prompt", "the prompt is empty")
        messages = [*prompt[:last_user], {"role": "user", "content": problem}, *prompt[last_user + 1 :]]
        text = "\n".join(message["content"] for message in messages)
        answer = self._answer(row)
        if isinstance(answer, Invalid):
            return answer
        return Candidate(tuple(messages), text, problem, answer)

    def values(self, row: Row, candidate: Candidate) -> dict[str, Any]:
        columns = self._config.columns
        source = row.optional(columns.data_source or "data_source")
        extra = row.without(columns.prompt, columns.ground_truth)
        kept = extra if columns.extra is None else {name: plain(row.optional(name)) for name in columns.extra}
        reward_model = extra.get("reward_model")
        style = reward_model.get("style") if isinstance(reward_model, Mapping) else None
        return {
            "data_source": str(source) if source else self._name,
            "prompt": [{"content": m["content"], "role": m["role"]} for m in candidate.messages],
            "reward_model": {"ground_truth": candidate.answer, "style": str(style or "rule")},
            **{name: value for name, value in kept.items() if name not in _OWN_COLUMNS},
        }

    def _answer(self, row: Row) -> str | Invalid:
        column = self._config.columns.ground_truth
        value = row.optional(column)
        if _is_missing(value):
            return Invalid("no answer", f"column {column!r} is absent, null, empty or NaN")
        try:
            text = ground_truth_text(row, self._config)
        except InputError:
            return Invalid("answer cannot be parsed", f"a {type(value).__name__}: {value!r:.200}")
        answer, problem = self._parsed(text)
        if answer is not None:
            return answer
        return text if self._keep_unparsed else Invalid("answer cannot be parsed", problem)


def _parsed(text: str, config: PreparationSourceConfig) -> tuple[str | None, str]:
    try:
        return parsed_answer(text, config), ""
    except ValueError as error:
        return None, str(error)


def _read_prompt(row: Row, config: PreparationSourceConfig) -> list[dict[str, str]] | Invalid:
    column = config.columns.prompt
    value = row.optional(column)
    if _is_missing(value):
        return Invalid("no prompt", f"column {column!r} is absent, null, empty or NaN")
    if isinstance(value, NumberText):
        return Invalid("prompt is no text", f"a number: {value:.200}")
    try:
        messages = as_messages(value)
        refuse_shown_answer(messages)
    except InputError as error:
        return Invalid("prompt is no text", str(error))
    for message in messages:
        if not message["content"].isascii() and any("\ud800" <= c <= "\udfff" for c in message["content"]):
            return Invalid("prompt is no text", "it holds half of a surrogate pair, which is no character")
    return messages


def _is_missing(value: Any) -> bool:
    if isinstance(value, NumberText):
        return value in NOT_FINITE
    if isinstance(value, float):
        return not math.isfinite(value)
    return value is None or value in ("", [])


def instruction_frames(instruction: str) -> list[tuple[str, str]]:
    """What stands before and after the problem, for each instruction that may be taken off: `auto` for all known ones,
    `none`, or a template."""
    if instruction == "none":
        return []
    texts = TEMPLATES.values() if instruction == "auto" else [template_text(instruction)]
    frames = [(text.partition(PROBLEM)[0].strip(), text.rpartition(PROBLEM)[2].strip()) for text in texts]
    return [frame for frame in frames if any(frame)]


def without_instruction(prompt: str, frames: Sequence[tuple[str, str]]) -> str | None:
    """The problem within a prompt that stands in one of `frames`, None where it stands in none."""
    stripped = prompt.strip()
    for before, after in frames:
        if stripped.startswith(before) and stripped.endswith(after):
            return stripped[len(before) : len(stripped) - len(after)].strip()
    return None
