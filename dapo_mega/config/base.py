"""The base class of configuration sections, and helpers that several sections use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo
from pydantic.config import JsonDict

FREE: JsonDict = {"resume": "free"}
"""`json_schema_extra` of a field or section that may change when a run resumes, because it does not change the training
result. All other fields may not."""


class Section(BaseModel):
    """Base of every configuration section: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def beside_run_file(path: str, info: ValidationInfo) -> str:
    """`path` as it is seen from the working directory, where relative paths start; one that names something beside the
    run's file means that."""
    folder = (info.context or {}).get("folder")
    if folder is not None and not Path(path).is_absolute() and (folder / path).exists():
        return str(folder / path)
    return path


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `defaults`, section by section."""
    result = dict(defaults)
    for key, value in given.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of all sections by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = value
    return found


def differences(before: Section, after: Section) -> dict[str, tuple[Any, Any]]:
    """The keys that have other values, by dotted name, with the values before and after."""
    old, new = flat(before.model_dump()), flat(after.model_dump())
    names = sorted(old.keys() | new.keys())
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def may_change_at_resume(section: type[BaseModel], name: str) -> bool:
    """Whether the field with this dotted name, or a section that contains it, is marked `FREE`."""
    first, _, rest = name.partition(".")
    field = section.model_fields.get(first)
    if field is None:
        return False
    if field.json_schema_extra == FREE:
        return True
    inner = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)]
    return bool(rest) and any(issubclass(t, BaseModel) and may_change_at_resume(t, rest) for t in inner)


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]
