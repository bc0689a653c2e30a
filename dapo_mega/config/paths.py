"""Paths in a configuration: relative to the file that holds them, and on a command line to the working folder."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from dapo_mega.config.base import Section
from dapo_mega.errors import InputError

DATASET_SUFFIXES = (".parquet", ".json", ".jsonl", ".arrow", ".csv")

PathKind = Literal["path", "output", "path or hub name", "function"]
"""What stands under a key: what is read; what is written; a path or a name on the Hugging Face hub; FILE.py:NAME or
package.module:NAME."""

LocalPath = Annotated[str, "path"]
LocalPathOrNone = Annotated[str | None, "path"]
OutputPath = Annotated[str, "output"]
OutputPathOrNone = Annotated[str | None, "output"]
HubPath = Annotated[str, "path or hub name"]
HubPathOrNone = Annotated[str | None, "path or hub name"]

_NO_FOLDER = re.compile(r"~|\$|\w+://")
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?")


class _Elsewhere(str):
    """A path that names nothing where it is looked for, and something where it might be meant: `advice` says so."""

    advice: str


def is_hub_name(text: str) -> bool:
    """Whether a dataset or tokenizer on the Hugging Face hub could be called this."""
    return bool(_HUB_NAME.fullmatch(text)) and not text.endswith(DATASET_SUFFIXES)


def kind_of_path(field: FieldInfo) -> PathKind | None:
    """What kind of path stands under a key, None for other keys."""
    return next((kind for kind in get_args(PathKind) if kind in field.metadata), None)


def located(kind: type[Section], given: Mapping[str, Any], folder: Path, other: Path | None = None) -> dict[str, Any]:
    """`given`, values of the section or of a part of it, with all relative paths made absolute from `folder` on. They
    are of a file in `folder`, or of a command line beside a file in `other`. Raises InputError for an output that is
    meant for no folder here."""
    result = dict(given)
    for key, field in kind.model_fields.items():
        value = given.get(key)
        if value is None and other is None and field.default == ".":  # The file's own folder.
            value = "."
        if path_kind := kind_of_path(field):
            if path_kind == "output" and isinstance(value, str) and _NO_FOLDER.match(os.path.expanduser(value)):
                raise InputError(
                    f"{key}={value} would be a folder of that name; give one of a mounted file system, with ~/ for the "
                    f"home folder: there are no URLs, variables or unknown users in paths"
                )
            result |= {key: _located(path_kind, value, folder, other)} if isinstance(value, str) and value else {}
        elif isinstance(value, Mapping | list | tuple) and (inner := sections_in(field.annotation)):
            is_named = get_origin(field.annotation) is dict
            result[key] = _located_below(inner, value, folder, other, is_named=is_named)
    return result


def paths_in(section: Section, prefix: str = "") -> Iterator[tuple[str, PathKind, str]]:
    """All paths that a section and those below it have: dotted key, kind and value."""
    for key, field in type(section).model_fields.items():
        value, kind = vars(section)[key], kind_of_path(field)
        if kind and value:
            yield prefix + key, kind, value
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, tuple) else ()
        for name, inner in (("", value), *items):
            if isinstance(inner, Section):
                yield from paths_in(inner, f"{prefix}{key}.{name}{'.' if name != '' else ''}")


def misplaced(values: Any, name: str = "") -> Iterator[str]:
    """For each path that `located` found in the other of the two folders only, what to write instead."""
    if isinstance(values, _Elsewhere):
        yield f"{name}={values.advice}"
    elif isinstance(values, Mapping | list | tuple):
        items = values.items() if isinstance(values, Mapping) else enumerate(values)
        for key, value in items:
            yield from misplaced(value, f"{name}.{key}" if name else str(key))


def _located_below(
    kinds: list[type[Section]], value: Any, folder: Path, other: Path | None, *, is_named: bool = False
) -> Any:
    """Of a section, a list of sections, or (`is_named`) sections by name. Several kinds are told apart by `kind`."""
    if isinstance(value, list | tuple):
        return [_located_below(kinds, item, folder, other) for item in value]
    if not isinstance(value, Mapping):
        return value
    if is_named:
        return {name: _located_below(kinds, item, folder, other) for name, item in value.items()}
    suiting = [k for k in kinds if len(kinds) == 1 or k.model_fields["kind"].default == value.get("kind")]
    if "kind" not in value:  # A part of a choice whose kind stands elsewhere.
        suiting = suiting or [k for k in kinds if value.keys() <= k.model_fields.keys()]
    return located(suiting[0], value, folder, other) if suiting else value


def sections_in(annotation: Any) -> list[type[Section]]:
    """All sections that a field of this type may hold, also in a list or by name."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in sections_in(part)]


def _located(kind: PathKind, text: str, folder: Path, other: Path | None) -> str:
    place, name = text, ""
    if kind == "function":
        place, colon, name = text.rpartition(":")
        if not place.endswith(".py"):
            return text
        name = colon + name
    if "://" in place:
        return text
    folder, second = (Path(_absolute(str(start), Path.cwd())) for start in (folder, other or Path()))
    here, there = _absolute(place, folder), _absolute(place, second)
    is_missing = not os.path.exists(here)
    can_be_meant = kind != "output" or other is None
    if is_missing and can_be_meant and here != there and os.path.exists(there):
        found = _Elsewhere(here + name)
        start = "the file in which it is written" if other is None else "the working folder, being on the command line"
        found.advice = (
            f"{text} is relative to {start}, and {here} does not exist, but {there} does; for that one write "
            f"{os.path.relpath(there, folder)}{name} or {there}{name}"
        )
        return found
    if kind == "path or hub name" and is_missing and is_hub_name(text):
        return text
    return here + name


def _absolute(path: str, folder: Path) -> str:
    """The path from `folder` on. `..` at its start is the folder above as it is named; behind a symbolic link it is
    the folder above what the link points to, as everywhere."""
    parts = Path(os.path.expanduser(path)).parts
    while parts[:1] == ("..",):
        folder, parts = folder.parent, parts[1:]
    whole = Path(folder, *parts)
    return os.path.realpath(whole) if ".." in parts else str(whole)
