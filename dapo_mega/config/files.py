"""Reads configuration files with overrides, and reports each problem in one line."""

import contextlib
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError

from dapo_mega.config.base import Section
from dapo_mega.config.choices import FLAT, choices_of, kinds_of, layered, owner_of, settled
from dapo_mega.config.paths import located, misplaced, sections_in
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
    if is_record and isinstance(algorithm, dict):
        if algorithm.get("entropy_target") is not None:
            algorithm.setdefault("entropy_max", None)  # Earlier versions did not bound the entropy bonus.
        raw = _without_idle_keys(kind, raw)
    return configured(kind, raw, overrides, _start_of(raw, path.parent) if is_record else path.parent)


def _without_idle_keys(kind: type[Section], raw: dict[str, Any]) -> dict[str, Any]:
    """A record without keys that earlier versions wrote beside a choice for kinds that were not chosen."""
    result = dict(raw)
    for key, field in kind.model_fields.items():
        inner = sections_in(field.annotation)
        if len(inner) == 1 and isinstance(raw.get(key), dict):
            result[key] = settled(inner[0], _without_idle_keys(inner[0], raw[key]), {}, is_record=True)
    return result


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
    try:
        for override in overrides:
            values = layered(kind, values, located(kind, _overridden(kind, override), Path(), folder))
    except ValueError as error:
        raise InputError(str(error)) from error
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
        raise InputError(f"override {given} is not of the form section.key=value, e.g. algorithm.policy_loss.high=0.3")
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
    fields = [section.model_fields.get(parts[-1]) for section in _sections_at(kind, parts[:-1])]
    field = next(filter(None, fields), None)
    if (
        field is None
        or text in ("null", "")
        or get_origin(field.annotation) is dict
        or (get_origin(field.annotation) is tuple and text.startswith("["))
    ):
        return False
    return field.annotation is str or str in get_args(field.annotation)


def _sections_at(kind: type[Section], location: Sequence[str]) -> list[type[Section]]:
    """The sections that may have this dotted name in `kind`: of a choice all kinds. A mapping of sections has one name
    more."""
    found, parts = [kind], iter(location)
    for part in parts:
        fields = [field for section in found if (field := section.model_fields.get(part))]
        found = [inner for field in fields for inner in sections_in(field.annotation)]
        if any(get_origin(field.annotation) is dict for field in fields) and next(parts, None) is None:
            return []
    return found


def _explain(root: type[Section], detail: Any) -> str:
    """One line on an error of pydantic's, whose place has the kind behind the name of a choice."""
    location: list[str] = []
    sections = [root]
    kinds: dict[str, type[Section]] = {}
    others: dict[str, type[Section]] = {}
    for part in map(str, detail["loc"]):
        if part in kinds:
            sections, kinds, others = [kinds[part]], {}, kinds
            continue
        location.append(part)
        if fields := [field for section in sections if (field := section.model_fields.get(part))]:
            sections, kinds = sections_in(fields[0].annotation), kinds_of(fields[0].annotation)
    name, given, problem = ".".join(location) or "configuration", detail.get("input"), detail["type"]
    if problem == "extra_forbidden":
        return _unknown_key(location, sections[0], others)
    if problem == "missing":
        return f"{name} is missing; add it to the file or as {name}=VALUE"
    if kinds and problem in ("union_tag_not_found", "model_attributes_type"):
        is_component = location[-1].isdigit()
        what = "a mapping with a kind, which is one of" if is_component else "a kind, or a mapping with one:"
        return f"{name}={given!r} must be {what} {', '.join(kinds)}"
    if kinds and problem == "union_tag_invalid":
        chosen = str(given.get("kind") if isinstance(given, Mapping) else given)
        near = difflib.get_close_matches(chosen, kinds, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{name}.kind={chosen!r} must be one of {', '.join(kinds)}{hint}"
    if problem == "value_error":
        return str(detail["ctx"]["error"])
    return f"{name}={given!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _unknown_key(location: Sequence[str], section: type[Section], others: Mapping[str, type[Section]]) -> str:
    """One line on a key that the section has not. `others` are the kinds that might have been chosen in its place."""
    name, key = ".".join(location), location[-1]
    if owner := owner_of(section, key):
        choice = ".".join([*location[:-1], owner[0]])
        having = [kind for kind, of_kind in choices_of(section)[owner[0]].items() if owner[1] in of_kind.model_fields]
        return (
            f"{name} is a key of {choice} {' or '.join(having)}, and another kind is chosen; leave it out, or choose "
            f"{choice}={having[0]}"
        )
    if having := [kind for kind, other in others.items() if key in other.model_fields]:
        chosen = section.model_fields["kind"].default
        return f"{name} is a key of kind {' or '.join(having)}, and the kind is {chosen}, which has {_keys_of(section)}"
    known = {key: key for key in section.model_fields}
    known |= {flat: f"{choice}.{inner}" for choice in choices_of(section) for flat, inner in FLAT[choice].items()}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    whole = ".".join([*location[:-1], known[near[0]]]) if near else ""
    hint = f"did you mean {whole!r}?" if near else f"valid keys: {_keys_of(section)}"
    return f"unknown key {name!r}; {hint}"


def _keys_of(section: type[Section]) -> str:
    return ", ".join(section.model_fields)
