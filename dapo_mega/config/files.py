"""Reads configuration files with overrides, and reports each problem in one line."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError

from dapo_mega.config.base import Section, merged, section_in
from dapo_mega.config.components import KINDS
from dapo_mega.config.own_code import CODE_TAG, NAME_TAG
from dapo_mega.config.paths import located, misplaced
from dapo_mega.errors import InputError

ConfigT = TypeVar("ConfigT", bound=Section)
_PASSWORD = re.compile(r"[^\s/'\"@:=]*:[^\s/'\"@]*@")
"""`user:password@` in what was given, which no message repeats."""


class _Loader(yaml.SafeLoader):
    """Refuses a mapping in which a key stands twice, of which YAML's own loader drops the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if (first := lines.get((key.tag, key.value))) is not None:
                raise yaml.YAMLError(f"{key.value!r} stands twice, in lines {first} and {line}; keep one of them")
            lines[key.tag, key.value] = line
        return node


def load_config(kind: type[ConfigT], path: Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Read a YAML file, apply `section.key=value` overrides (values are YAML) and validate. Relative paths start at the
    file's folder, those of overrides at the working folder.

    Raises `InputError`, one line per problem, naming the nearest valid key for an unknown one.
    """
    is_record = path.name == "config.yaml" and path.with_name("versions.json").is_file()
    raw = read_yaml(path)
    algorithm = raw.get("algorithm")
    if is_record and isinstance(algorithm, dict) and algorithm.get("entropy_target") is not None:
        algorithm.setdefault("entropy_max", None)  # Nor did they bound the entropy bonus.
    return configured(kind, raw, overrides, _start_of(raw, path.parent) if is_record else path.parent)


def _start_of(record: Mapping[str, Any], run: Path) -> Path:
    """Where relative paths of the record in a run's folder start. Records have whole paths; earlier versions wrote
    them as seen from the folder the run was begun in, which its `output_dir` tells unless the run was moved."""
    output = Path(str(record.get("output_dir")))
    for whole in (run.absolute(), run.resolve()):
        if not output.is_absolute() and whole.parts[-len(output.parts) :] == output.parts:
            return whole.parents[len(output.parts) - 1]
    return Path()


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `InputError` if there is none."""
    if not path.is_file():
        raise InputError(
            f"configuration file {path} does not exist; give the path of a YAML file such as those in configs/"
        )
    try:
        raw = yaml.load(path.read_text(), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds {type(raw).__name__}, expected a mapping of sections")
    return raw


def configured(kind: type[ConfigT], raw: Mapping[str, Any], overrides: Sequence[str], folder: Path = Path()) -> ConfigT:
    """The section with the values of `raw`, whose relative paths start at `folder`, after `section.key=value`
    overrides. Raises `InputError`, one line per problem."""
    values = located(kind, raw, folder)
    for override in overrides:
        values = merged(values, located(kind, _overridden(kind, override), Path(), folder))
    if problems := list(misplaced(values)):
        raise InputError("; ".join(problems))
    return validated(kind, values)


def validated(kind: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """The section with these values, whose paths stay as they are. Raises `InputError`, one line per problem."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_explain(kind, detail) for detail in error.errors())
        raise InputError(_PASSWORD.sub("***@", problems)) from None  # pydantic's own text repeats what was given.


def dump_config(config: Section) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _overridden(kind: type[Section], override: str) -> dict[str, Any]:
    """The sections that an override gives, with nothing but its value in them."""
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        given = _PASSWORD.sub("***@", repr(override))
        raise InputError(f"override {given} is not of the form section.key=value, e.g. algorithm.clip_high=0.3")
    parts = name.strip().split(".")
    value: Any = text if _takes_text(kind, parts, text) else _yaml_value(text, override)
    for part in reversed(parts):
        value = {part: value}
    return dict(value)


def _yaml_value(text: str, override: str) -> Any:
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        problem = f"the value of override {override!r} is not valid YAML: {' '.join(str(error).split())}"
        raise InputError(_PASSWORD.sub("***@", problem)) from None
    # YAML 1.1 reads 1e-4 (no dot) as text, but people write learning rates this way.
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    return value


def _takes_text(kind: type[Section], parts: Sequence[str], text: str) -> bool:
    """Whether to take the value verbatim: YAML would cut a path at ' #' or read one with ': ' as a mapping."""
    section = _section_at(kind, parts[:-1])
    field = section.model_fields.get(parts[-1]) if section else None
    if (
        field is None
        or text in ("null", "")
        or get_origin(field.annotation) is dict
        or (get_origin(field.annotation) is tuple and text.startswith("["))
    ):
        return False
    return field.annotation is str or str in get_args(field.annotation)


def _section_at(kind: type[Section], location: Sequence[str]) -> type[Section] | None:
    """The section with this dotted name in `kind`, if any. A mapping of sections has one name more."""
    section: type[Section] | None = kind
    parts = iter(location)
    for part in parts:
        field = section.model_fields.get(part) if section else None
        section = section_in(field.annotation) if field else None
        if field and get_origin(field.annotation) is dict and next(parts, None) is None:
            return None
    return section


def _explain(kind: type[Section], detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    component = None
    location = [part for part in location if part not in (NAME_TAG, CODE_TAG)]
    if location[:2] == ["reward", "components"] and len(location) > 3:
        component = location.pop(3)  # pydantic puts a component's kind between its number and its key.
    name = ".".join(location) or "configuration"
    if detail["type"] == "extra_forbidden":
        valid = list(KINDS[component].model_fields) if component else _keys_at(kind, location[:-1])
        near = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*location[:-1], near[0]])!r}?" if near else f"valid keys: {', '.join(valid)}"
        return f"unknown key {name!r}; {hint}"
    if detail["type"] == "missing":
        return f"{name} is missing; add it to the file or as {name}=VALUE"
    if detail["type"] in ("union_tag_not_found", "union_tag_invalid", "model_attributes_type"):
        return f"{name}={detail['input']!r} must be a mapping with a kind, which is one of {', '.join(KINDS)}"
    if detail["type"] == "model_type":
        return f"{name}={detail['input']!r} must be a name, or a mapping with kind: function, path and settings"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    given = detail.get("input")
    return f"{name}={given!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _keys_at(kind: type[Section], location: Sequence[str]) -> list[str]:
    """The valid keys of the section at `location`."""
    section = _section_at(kind, location)
    return list(section.model_fields) if section else []
