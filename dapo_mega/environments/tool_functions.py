"""Functions as tools: what a model is told of them, and its arguments checked before they are called."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict  # pydantic asks for it before Python 3.12.

from dapo_mega.algorithms.own_code import MisuseError

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_BLOCK: Final = re.compile(r"^Args:\n((?: +.*\n|\n)+)", re.MULTILINE)
# With the lines below it that are further in.
_PARAMETER: Final = re.compile(r"^( +)(\w+)(?: *\(.*?\))?:(.*(?:\n\1 .*)*)", re.MULTILINE)
_TYPED_DICT: Final[Any] = TypedDict  # Its names may be any, unlike those of a model's fields.
_WRONG: Final = {"missing": "it is missing", "extra_forbidden": "there is no such parameter"}


class ArgumentsError(Exception):
    """Arguments that a tool does not take; the text is for the model."""


@dataclass(frozen=True)
class ToolFunction:
    """What is known of a function before it is called: `schema` is that of OpenAI."""

    name: str
    schema: dict[str, Any]
    arguments: TypeAdapter[dict[str, Any]]

    def checked(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the function's hints have them. Types are those of JSON: 1 is a float and a list may become
        a tuple, but neither "1" nor 1.0 nor true is an int. Raises ArgumentsError."""
        try:
            return self.arguments.validate_json(json.dumps(given), strict=True)
        except ValidationError as error:
            wrong = "; ".join(_told(detail) for detail in error.errors())
        except RecursionError:
            wrong = "they are nested too deep"
        takes = json.dumps(self.schema["function"]["parameters"], ensure_ascii=False)
        raise ArgumentsError(f"wrong arguments for {self.name}: {wrong}. It takes {takes}")


def _told(detail: Any) -> str:
    where, what = ".".join(map(str, detail["loc"])), _WRONG.get(detail["type"])
    return f"{where}: {what or detail['msg']}" + ("" if what or not where else f", not {detail['input']!r:.80}")


class _Schemas(GenerateJsonSchema):
    """Without titles, and in the order in which models have seen schemas."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # As pydantic has it.

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        return value


def tool_function(function: Callable[..., Any]) -> ToolFunction:
    """Read a function or method: its hints, the first paragraph of its docstring, and what stands under `Args:` of its
    parameters (Google's style). Raises MisuseError where it cannot be a tool."""
    name = getattr(function, "__name__", "")
    if not inspect.isroutine(function) or not _NAME.fullmatch(name):
        raise MisuseError(f"{name or repr(function)} cannot be a tool; give a function with a name of ASCII letters")
    is_method = inspect.ismethod(function)  # Made anew for every trajectory, its function is not.
    return _read(getattr(function, "__func__", function), is_method)


@lru_cache(maxsize=256)
def _read(function: Callable[..., Any], is_method: bool) -> ToolFunction:
    tool, doc = f"the tool {function.__name__}", inspect.getdoc(function) or ""
    summary = " ".join(doc.split("\n\n")[0].split())
    if not summary or doc.startswith("Args:"):
        raise MisuseError(f"{tool} has no docstring; say in its first paragraph what it does: the model reads it")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = [*inspect.signature(function).parameters.values()][is_method:]
    except (NameError, TypeError, ValueError) as error:
        raise MisuseError(f"the hints of {tool} cannot be read: {error}") from None
    block = _BLOCK.search(doc + "\n")
    described = {name: " ".join(text.split()) for _, name, text in _PARAMETER.findall(block[1])} if block else {}
    if unknown := described.keys() - {parameter.name for parameter in parameters}:
        raise MisuseError(f"the docstring of {tool} describes {min(unknown)!r}, which is no parameter of it")
    fields: dict[str, Any] = {}
    for parameter in parameters:
        name, has_default = parameter.name, parameter.default is not parameter.empty
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise MisuseError(f"{tool} takes {parameter}; give it parameters that have names")
        if name not in hints:
            raise MisuseError(f"{tool} has no type hint for {name!r}; write what it is, such as {name}: str")
        info = {"description": described.get(name), **({"default": parameter.default} if has_default else {})}
        hint: Any = Annotated[hints[name], Field(**info)]
        fields[name] = NotRequired[hint] if has_default else hint
    arguments = _TYPED_DICT("arguments", fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    try:
        adapter = TypeAdapter(arguments)
        schema = adapter.json_schema(schema_generator=_Schemas)
    except (PydanticUserError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise MisuseError(f"{tool} has hints that have no JSON form; give plain types: {reason}") from None
    shown = {key: value for key, value in schema.items() if key not in ("title", "additionalProperties")}
    described_tool = {"name": function.__name__, "description": summary, "parameters": shown}
    return ToolFunction(function.__name__, {"type": "function", "function": described_tool}, adapter)
