"""What a configuration key, a metric or a method means: `dapo-mega explain clip_high policy/entropy gspo`."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial

import yaml

from dapo_mega.config import PRESETS, RunConfig, Section, SftConfig
from dapo_mega.config.base import flat, may_change_at_resume
from dapo_mega.config.components import KINDS
from dapo_mega.config.paths import sections_in
from dapo_mega.errors import InputError
from dapo_mega.metrics.catalogue import CATALOGUE, PREFIXES, describe

_MOST_NEAR = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="dapo-mega explain", description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("names", nargs="+", metavar="NAME", help="a key, whole or its end; a metric; a method (preset)")
    for name in parser.parse_args().names:
        print(explained(name))


def explained(name: str) -> str:
    """All that is known under this name. Raises InputError with near names if there is nothing."""
    keys = dict(_keys())
    found = [text for key, text in keys.items() if key == name or key.endswith(f".{name}")]
    if metric := describe(name):
        about = PREFIXES.get(metric.prefix, "")
        found.append(_wrapped(f"metric {name}", metric.text().replace("\n\n", "\n"), about))
    if name in PRESETS:
        settings = ", ".join(f"{key}={_shown(value)}" for key, value in flat(PRESETS[name]).items())
        found.append(_wrapped(f"method algorithm.preset={name}", f"Changes to DAPO's defaults: {settings or 'none'}."))
    if found:
        return "\n\n".join(found)
    everything = [*keys, *(each for metric in CATALOGUE for each in metric.names()), *PRESETS]
    ends = {each.rpartition(".")[2]: each for each in everything}
    near = dict.fromkeys(difflib.get_close_matches(name, everything, _MOST_NEAR, 0.7))
    near |= dict.fromkeys(ends[end] for end in difflib.get_close_matches(name, ends, _MOST_NEAR, 0.7))
    hint = (
        f"near it are {', '.join(list(near)[:_MOST_NEAR])}" if near else "see configs/ and dapo_mega/metrics/README.md"
    )
    raise InputError(f"no key, metric or method is called {name!r}; {hint}")


def _keys() -> Iterator[tuple[str, str]]:
    """Every key's dotted name and text. A mapping's sections have NAME in theirs, components' keys their kind."""
    seen = set()
    for root in (RunConfig, SftConfig):
        for key, text in _keys_of(root, "", root):
            if key not in seen:
                seen.add(key)
                yield key, text
    for kind, section in KINDS.items():
        yield from _keys_of(section, f"reward.components.{kind}.", RunConfig)


def _keys_of(section: type[Section], prefix: str, root: type[Section]) -> Iterator[tuple[str, str]]:
    for key, field in section.model_fields.items():
        inner = [kind for kind in sections_in(field.annotation) if kind not in KINDS.values()]
        if field.description:
            default = field.get_default(call_default_factory=True, validated_data={})
            given = "It must be given." if field.is_required() else f"Default: {_shown(default)}."
            changes = "may change" if may_change_at_resume(root, prefix + key) else "may not change"
            yield prefix + key, _wrapped(f"key {prefix}{key}", field.description, f"{given} It {changes} at a resume.")
        for kind in inner:
            name = f"{prefix}{key}.NAME." if str(field.annotation).startswith("dict[") else f"{prefix}{key}."
            if not field.description:
                about = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
                yield name[:-1], _wrapped(f"section {name[:-1]}", about, f"Keys: {', '.join(kind.model_fields)}.")
            yield from _keys_of(kind, name, root)


def _shown(value: object) -> str:
    plain = value.model_dump(mode="json") if isinstance(value, Section) else value
    plain = dict(plain) if isinstance(plain, Mapping) else list(plain) if isinstance(plain, tuple) else plain
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).partition("\n")[0]


def _wrapped(title: str, *paragraphs: str) -> str:
    lines = [line for text in paragraphs if text for line in text.splitlines()]
    fill = partial(textwrap.fill, width=100, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([title, *map(fill, lines)])
