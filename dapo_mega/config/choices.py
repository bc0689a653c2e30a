"""Choices of which every kind is a section of its own, such as `policy_loss: {kind: clip, high: 0.3}`.

A kind without keys may be given by its name alone. Files of earlier versions have the keys of all kinds beside the
choice; `FLAT` says what they are called in its section.
"""

from collections.abc import Mapping
from typing import Any

from dapo_mega.config.base import merged, section_in
from dapo_mega.config.paths import sections_in
from dapo_mega.declared import Section

FLAT: Mapping[str, Mapping[str, str]] = {
    "policy_loss": {
        "clip_low": "low", "clip_high": "high", "dual_clip": "dual_clip", "soft_gate": "gate",
        "mirror_temperature": "temperature", "covariance_share": "share", "covariance_bounds": "bounds",
        "covariance_kl": "kl",
    },
    "advantage": {"gae_discount": "discount", "gae_decay": "decay"},
    "dynamic_sampling_on": {"score_threshold": "threshold"},
    "environment": {},
    "order": {"floor": "floor", "easiest": "easiest", "stages": "stages", "curriculum_epochs": "epochs"},
}  # fmt: skip
"""For each choice, the keys that earlier versions had beside it, and their names in its section."""

Values = Mapping[str, Any]


def kinds_of(annotation: Any) -> dict[str, type[Section]]:
    """The sections of a choice by their kinds; none for other fields."""
    sections = sections_in(annotation)
    if len(sections) < 2 or any("kind" not in section.model_fields for section in sections):
        return {}
    return {section.model_fields["kind"].default: section for section in sections}


def choices_of(section: type[Section]) -> dict[str, dict[str, type[Section]]]:
    """The kinds of every choice of `FLAT` that the section has."""
    return {name: kinds_of(section.model_fields[name].annotation) for name in FLAT if name in section.model_fields}


def layered(section: type[Section], below: Values, above: Values) -> dict[str, Any]:
    """`above` over `below`, both values of the section, section by section. Where `above` chooses a kind, keys of other
    kinds are left behind. Raises ValueError for a key that stands in `above` twice."""
    below, above = _gathered(section, below), _gathered(section, above)
    for name, kinds in choices_of(section).items():
        kind = _kind(above, name) or (None if _kind(below, name) else _kind_of_preset(section, above, name))
        if kind in kinds and isinstance(given := below.get(name, {}), Mapping):
            given = {**{key: below.pop(flat) for flat, key in FLAT[name].items() if flat in below}, **given}
            keys = kinds[kind].model_fields.keys() - {"kind"}
            below[name] = {key: value for key, value in given.items() if key in keys}
    result = dict(below)
    for key, value in above.items():
        field = section.model_fields.get(key)
        inner = section_in(field.annotation) if field else None
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            is_plain = inner is not None and sections_in(field.annotation if field else None) == [inner]
            result[key] = layered(inner, result[key], value) if inner and is_plain else merged(result[key], value)
        else:
            result[key] = value
    return result


def settled(section: type[Section], values: Any, preset: Values, *, is_record: bool = False) -> Any:
    """`values` over those of the preset, with every choice as a mapping with its kind. Flat keys that are of no use to
    the kind are left out if they have the value that they would have without being given, or in a run's record; others
    stay, and are unknown. Raises ValueError for a key that stands there twice."""
    if not isinstance(values, Mapping):
        return values
    result = layered(section, preset, values)
    for name, kinds in choices_of(section).items():
        if not isinstance(result.get(name, {}), Mapping):
            continue
        result[name] = {"kind": section.model_fields[name].default.kind, **result.get(name, {})}
        is_whole = is_record or all(flat in values for flat in FLAT[name])  # As only a program writes it.
        for flat, key in FLAT[name].items():
            usual = [kind.model_fields[key].default for kind in kinds.values() if key in kind.model_fields]
            given = tuple(result[flat]) if isinstance(result.get(flat), list) else result.get(flat)
            if flat in result and (is_whole or given in (None, preset.get(flat), *usual)):
                del result[flat]
    return result


def owner_of(section: type[Section], key: str) -> tuple[str, str] | None:
    """The choice that a flat key is of, and what the key is called there; None for other keys."""
    return next(((name, FLAT[name][key]) for name in choices_of(section) if key in FLAT[name]), None)


def _gathered(section: type[Section], values: Values) -> dict[str, Any]:
    """`values` with each choice as a mapping, into which go the flat keys that its kind has, or that any kind has where
    none is chosen."""
    result = dict(values)
    for name, kinds in choices_of(section).items():
        given = result.get(name, {})
        if isinstance(given, str):
            given = {"kind": given}
        if not isinstance(given, Mapping):
            continue
        if "kind" not in given and "path" in given:
            given = {"kind": "function", **given}
        kind = given.get("kind")
        for flat, key in FLAT[name].items():
            if flat in result and (kind not in kinds or key in kinds[kind].model_fields):
                if key in given:
                    raise ValueError(f"{flat} and {name}.{key} are the same key; give one of them")
                given = {**given, key: result.pop(flat)}
        if given:
            result[name] = given
    return result


def _kind(values: Values, name: str) -> str | None:
    given = values.get(name)
    kind = given.get("kind") if isinstance(given, Mapping) else None
    return kind if isinstance(kind, str) else None


def _kind_of_preset(section: type[Section], values: Values, name: str) -> str | None:
    from dapo_mega.config.presets import PRESETS

    if "preset" not in values:
        return None
    return str(PRESETS.get(str(values["preset"]), {}).get(name, section.model_fields[name].default.kind))
