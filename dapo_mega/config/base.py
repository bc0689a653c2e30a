"""What several sections of the configuration use."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.config import JsonDict

from dapo_mega.declared import Section as Section

FREE: JsonDict = {"resume": "free"}
"""`json_schema_extra` of a field or section that may change when a run resumes, because it does not change the training
result. All other fields may not."""


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
    if get_origin(field.annotation) is dict:
        rest = rest.partition(".")[2]
    return bool(rest) and any(may_change_at_resume(inner, rest) for inner in _sections_in(field.annotation))


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a field of this type holds, if any: itself, or the values of a mapping by names."""
    return next(_sections_in(annotation), None)


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    candidates = (annotation, *get_args(annotation))
    for kind in (get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in candidates):
        if isinstance(kind, type) and issubclass(kind, Section):
            yield kind


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]
