"""Python functions as tools of the policy, in an environment like those of the user's own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from traceback import format_exception_only
from typing import Any, Final

from pydantic_core import to_json

from dapo_mega.algorithms.own_code import MisuseError, check_call
from dapo_mega.environments.built_in_tools import BUILT_IN
from dapo_mega.environments.failures import EnvironmentFailure
from dapo_mega.environments.tool_functions import ArgumentsError, ToolFunction, tool_function

_NO_TOOLS: Final = ("reset", "close", "snapshot", "restore")
_KINDS: Final = ("calls", "bad_json", "unclosed", "unknown", "bad_arguments", "cut_off", "errors")
_UNREAD: Final = {
    "bad_json": ("bad_json", "The call is not valid JSON and was not run."),
    "unclosed": ("unclosed", "The call has no end and was not run."),
    "no_name": ("unknown", "The call names no tool and was not run."),
    "bad_arguments": ("bad_arguments", "The call's arguments are no JSON object, and it was not run."),
}
_CUT_OFF: Final = ("cut_off", "Your turn was too long and was cut off, so none of its calls was run. Write less.")
_MIN_RESULT_CHARACTERS: Final = 100


class ToolEnvironment:
    """The policy calls tools until it takes a turn without a call, which ends the trajectory.

    What is wrong with a call, and what a tool raises, is told to the policy and counted in `parts`, where `tool_calls`
    is the number of all calls. None of it is a reward. An EnvironmentFailure of a tool is raised. Has `snapshot` and
    `restore` unless the tools' class has none. Not for several threads at once.
    """

    tools: list[dict[str, Any]]

    def __init__(
        self,
        source: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        built_in: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
        max_unreadable: int = 3,
        max_result_characters: int = 4000,
    ) -> None:
        """Raises MisuseError for what cannot be tools.

        `source`: a function, a list of them, or a class whose public methods are the tools. It is made with the
        `settings`; its `reset(task, seed)`, `close`, `snapshot` and `restore` are no tools, but called with those here.
        `built_in`: names of tools of the package, perhaps with their settings.
        `max_unreadable`: after so many turns in a row without a call that could be read the trajectory ends.
        `max_result_characters`: a longer result is cut in its middle.
        """
        if max_unreadable < 1 or max_result_characters < _MIN_RESULT_CHARACTERS:
            raise MisuseError(f"max_unreadable is at least 1, max_result_characters {_MIN_RESULT_CHARACTERS}")
        self._most_unreadable, self._most_characters = max_unreadable, max_result_characters
        self._num_unreadable = 0
        self._runner: asyncio.Runner | None = None
        self._made: list[Any] = []
        functions = self._functions(source, settings or {})
        self._own = self._made[0] if self._made else None
        for name in built_in:
            if name not in BUILT_IN:
                raise MisuseError(f"there is no built-in tool {name!r}; there are {', '.join(BUILT_IN)}")
            functions += self._functions(BUILT_IN[name], built_in[name] if isinstance(built_in, Mapping) else {})
        self._tools: dict[str, tuple[ToolFunction, Callable[..., Any]]] = {}
        for function in functions:
            tool = tool_function(function)
            if tool.name in self._tools:
                raise MisuseError(f"two tools are called {tool.name}; rename one")
            self._tools[tool.name] = (tool, function)
        if not self._tools:
            raise MisuseError(f"there is no tool; give functions, public methods or one of {', '.join(BUILT_IN)}")
        self.tools = [tool.schema for tool, _ in self._tools.values()]
        has_both = [hasattr(self._own, name) for name in ("snapshot", "restore")]
        if any(has_both) and not all(has_both):
            raise MisuseError("it has one of the methods snapshot and restore; give it both or none")
        if self._own is None or all(has_both):
            self.snapshot, self.restore = self._snapshot, self._restore

    def _functions(self, source: Any, settings: Mapping[str, Any]) -> list[Callable[..., Any]]:
        if inspect.isclass(source):
            check_call(source, (), settings)
            self._made.append(made := source(**settings))
            names = dict.fromkeys(name for owner in reversed(source.__mro__[:-1]) for name in vars(owner))
            public = [getattr(made, name) for name in names if not name.startswith("_") and name not in _NO_TOOLS]
            return [value for value in public if inspect.isroutine(value)]
        if settings:
            raise MisuseError("settings are for a class, and these tools are functions")
        return [] if source is None else [*source] if isinstance(source, list | tuple) else [source]

    def reset(self, task: Mapping[str, Any], seed: int) -> dict[str, Any] | None:
        """What `reset` of the tools' class returns, if it has one."""
        observation: dict[str, Any] | None = self._ask(self._own, "reset", task, seed)
        return observation

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """The results of the turn's calls, in their order. Nothing of a turn that was cut off is run."""
        calls, messages = action["calls"], []
        parts = {f"tool_{kind}": 0 for kind in _KINDS}
        parts["tool_calls"] = len(calls)
        if not calls:
            return {"done": True, "parts": parts}
        is_cut_off = action["finish_reason"] == "length"
        for call in calls:
            kind, content = _CUT_OFF if is_cut_off else self._called(call)
            if kind:
                parts[f"tool_{kind}"] += 1
            reply = {"role": "tool", "content": self._shown(content), "tool_call_id": call["id"]}
            messages.append({**reply, "name": self._shown(call["name"] or "")})
        is_unreadable = is_cut_off or all(call["problem"] for call in calls)
        self._num_unreadable = self._num_unreadable + 1 if is_unreadable else 0
        if self._num_unreadable >= self._most_unreadable:
            return {"done": True, "stop": "parse", "parts": parts}
        return {"messages": messages, "parts": parts}

    def close(self) -> None:
        """Close the object that has the tools, once, and end what was started for it."""
        try:
            while self._made:
                self._ask(self._made.pop(), "close")
        finally:
            if self._runner is not None:
                self._runner.close()
            self._runner = None

    def _called(self, call: Mapping[str, Any]) -> tuple[str, str]:
        """What went wrong, "" if nothing did, and what the policy is told."""
        known = f"The tools are: {', '.join(self._tools)}."
        if call["problem"]:
            kind, text = _UNREAD[call["problem"]]
            return kind, f"{text} {known}"
        if call["name"] not in self._tools:
            return "unknown", f"There is no tool {call['name']!r:.80}. {known}"
        tool, function = self._tools[call["name"]]
        try:
            result = self._awaited(function(**tool.checked(call["arguments"])))
        except ArgumentsError as error:
            return "bad_arguments", f"The call was not run: {error}"
        except EnvironmentFailure:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # argparse exits where arguments are wrong.
            if isinstance(error, ExceptionGroup) and (failures := error.subgroup(EnvironmentFailure)):
                raise EnvironmentFailure(str(failures.exceptions[0])) from error
            return "errors", "".join(format_exception_only(error)).strip()
        try:
            return "", result if isinstance(result, str) else to_json(result).decode()
        except ValueError as error:
            what = f"the tool {tool.name} returned {type(result).__name__}, which is not of JSON"
            raise MisuseError(f"{what}; return a str or plain data: {error}") from error

    def _shown(self, text: str) -> str:
        """The text, so that it can be encoded and is not too long."""
        text = text.encode(errors="replace").decode()
        if len(text) <= self._most_characters:
            return text
        note = f"\n[the middle of {len(text)} characters is left out here]\n"
        kept = self._most_characters - len(note)
        return text[: kept - kept // 2] + note + text[len(text) - kept // 2 :]

    def _ask(self, made: Any, method: str, *arguments: Any) -> Any:
        """What the object's method returns; None if it has none."""
        function = getattr(made, method, None)
        return None if function is None else self._awaited(function(*arguments))

    def _awaited(self, value: Any) -> Any:
        """Of a coroutine what it comes to, in the one event loop of this environment."""
        if not inspect.isawaitable(value):
            return value
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(_result(value))

    def _snapshot(self) -> bytes:
        return f"{self._num_unreadable}\n".encode() + (self._ask(self._own, "snapshot") or b"")

    def _restore(self, state: bytes) -> None:
        unreadable, _, own = state.partition(b"\n")
        self._num_unreadable = int(unreadable)
        self._ask(self._own, "restore", own)


async def _result(value: Any) -> Any:
    return await value
