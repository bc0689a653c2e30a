"""What an environment returns, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dapo_mega.algorithms.own_code import MisuseError
from dapo_mega.rewards.records import LARGEST
from dapo_mega.types import METRIC_PART

Message = Mapping[str, Any]

EARNED: Final = ("reward", "correct")
"""What an environment may say of a turn, beside its named parts."""
_KEYS: Final = ("text", "messages", "done", "reward", "correct", "parts", "stop", "rewrite")
_ROLES: Final = ("user", "tool", "system")
_STOPS: Final = ("", "done", "parse")


@dataclass(frozen=True)
class Observation:
    """What the policy sees next, and what its turn earned. `stop` says why the trajectory is over, and is empty while
    it goes on. With `rewrite` the messages stand for all that was said before, too."""

    messages: tuple[Message, ...]
    earned: Mapping[str, float]
    stop: str
    rewrite: bool = False


def read_observation(returned: Any, where: str) -> Observation:
    """What a method returned. `where` names it. Raises MisuseError for another form."""
    found = {} if returned is None else returned
    if not isinstance(found, dict) or (unknown := [key for key in found if key not in _KEYS]):
        also = f", not {unknown[0]!r}" if isinstance(found, dict) else ""
        raise MisuseError(f"{where} returned {found!r:.200}; give a dict with any of {', '.join(_KEYS)}{also}")
    text, messages, parts = found.get("text", ""), found.get("messages"), found.get("parts") or {}
    done, rewrite, stop = found.get("done", False), found.get("rewrite", False), found.get("stop", "")
    numbers = list(parts.values()) if isinstance(parts, dict) else [None]
    numbers += [] if (reward := found.get("reward")) is None else [reward]
    correct = found.get("correct")
    is_right = (
        isinstance(text, str)
        and isinstance(done, bool)
        and isinstance(rewrite, bool)
        and (correct is None or isinstance(correct, bool))
    )
    if not is_right or not all(map(_is_number, numbers)):
        raise MisuseError(
            f"{where} returned {found!r:.200}; text is a str, done a bool, as rewrite, reward a finite number "
            f"or None, correct a bool or None, and parts a dict of finite numbers by names"
        )
    if unusual := [name for name in parts if name in EARNED or not METRIC_PART.fullmatch(name)]:
        raise MisuseError(
            f"{where} returned a part called {unusual[0]!r}; give it another name, of letters, digits and any of "
            f"'_.@-', and neither of {', '.join(EARNED)}"
        )
    if stop not in _STOPS or (stop and not done):
        raise MisuseError(f"{where} returned stop={stop!r}; with done=True it may be 'done' or 'parse'")
    if messages is None:
        messages = [{"role": "user", "content": text}] if text else []
    elif text or not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise MisuseError(
            f"{where} returned messages={messages!r:.200}; give text, or a list of {{'role': one of "
            f"{', '.join(_ROLES)}, 'content': str}}, a result of a tool with its tool_call_id and name"
        )
    earned = {name: float(value) for name, value in parts.items()}
    earned |= {name: float(found[name]) for name in EARNED if found.get(name) is not None}
    return Observation(tuple(messages), earned, (stop or "done") if done else "", rewrite)


def read_tools(given: Any) -> list[Any]:
    """Schemas of tools as OpenAI has them. Raises MisuseError for another form."""
    for i, tool in enumerate(given if isinstance(given, list) else [given]):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MisuseError(f"tools[{i}] must be {{type: function, function: {{name, ...}}}}, not {tool!r:.80}")
    return list(given)


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in _ROLES
        and isinstance(message.get("content"), str)
        and all(isinstance(value, str) for value in message.values())
    )


def _is_number(value: Any) -> bool:
    """Whether it is a number that is neither NaN nor infinite."""
    return isinstance(value, int | float) and abs(value) <= LARGEST
