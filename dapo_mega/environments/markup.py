"""Thinking and calls in what a policy wrote: JSON between <tool_call> tags, as Hermes, Qwen and others are trained."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

THINK: Final = "<think>"
CALL: Final = "<tool_call>"
ENDS: Final = {THINK: "</think>", CALL: "</tool_call>"}
"""Opening tag: closing tag."""

_OPENS: Final = re.compile("|".join(ENDS))


class Read(NamedTuple):
    """A turn of the policy. `text` is what it said, `reasoning` what it thought. `calls` are {id, name, arguments,
    problem}; `arguments` is None where there is a problem."""

    text: str
    reasoning: str
    calls: list[dict[str, Any]]


def read_markup(text: str) -> Read:
    """A turn's thinking, calls and what is left. Thinking begins where nothing was said before it."""
    said, start, position = "", 0, 0
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    while tag := _OPENS.search(text, position):
        position = tag.end()
        before = text[start : tag.start()]
        if tag[0] == THINK and (said + before).strip():
            continue
        end = text.find(ENDS[tag[0]], position)
        body = text[position:end] if end >= 0 else text[position:]
        if tag[0] == THINK:
            thoughts.append(body.strip())
        else:
            calls.append(_read_call(len(calls), body, end >= 0))
        said += before
        start = position = end + len(ENDS[tag[0]]) if end >= 0 else len(text)
    return Read((said + text[start:]).strip() if start else text, "\n".join(thoughts), calls)


def _read_call(number: int, body: str, is_closed: bool) -> dict[str, Any]:
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # Neither NaN nor half a character.
    except (ValueError, RecursionError):
        return call_of(number, None, None, "bad_json" if is_closed else "unclosed")
    fields = value if isinstance(value, dict) else {}
    return call_of(number, fields.get("name"), fields.get("arguments", {}), "" if is_closed else "unclosed")


def call_of(number: int, name: Any, arguments: Any, problem: str) -> dict[str, Any]:
    """Ids of nine letters and digits, as Mistral's template demands."""
    name = name if isinstance(name, str) and name else None
    if not problem:
        problem = "no_name" if name is None else "" if isinstance(arguments, dict) else "bad_arguments"
    return {"id": f"call{number:05}", "name": name, "arguments": None if problem else arguments, "problem": problem}
