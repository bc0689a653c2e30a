"""What a configuration key, a metric or a method means: `dapo-mega explain max_staleness policy/entropy gspo`."""

import argparse
import difflib
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache, partial

import yaml
from pydantic.fields import FieldInfo

from dapo_mega.config import PRESETS, AlgorithmConfig, PromptSamplingConfig, RunConfig, Section, SftConfig
from dapo_mega.config.base import flat, may_change_at_resume
from dapo_mega.config.choices import FLAT, kinds_of, owner_of
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
    pairs = _keys()
    keys = dict(pairs)
    end = name.rpartition(".")[2]
    owners = (owner_of(kind, end) for kind in (AlgorithmConfig, PromptSamplingConfig))
    wanted = [name, *(".".join(owner) for owner in owners if owner)]  # By its name in earlier versions, too.
    found = [text for key, text in pairs if any(key == each or key.endswith(f".{each}") for each in wanted)]
    if metric := describe(name):
        about = PREFIXES.get(metric.prefix, "")
        found.append(_wrapped(f"metric {name}", metric.text().replace("\n\n", "\n"), about))
    if name in PRESETS:
        dapo, method = (
            flat(AlgorithmConfig.model_validate({"preset": preset}).model_dump()) for preset in ("dapo", name)
        )
        changes = {key: value for key, value in method.items() if key != "preset" and value != dapo.get(key, ...)}
        settings = ", ".join(f"{key}={_shown(value)}" for key, value in changes.items())
        found.append(_wrapped(f"method algorithm.preset={name}", f"Changes to DAPO's defaults: {settings or 'none'}."))
    if found:
        return "\n\n".join(dict.fromkeys(found))
    everything = [*keys, *(each for metric in CATALOGUE for each in metric.names()), *PRESETS]
    ends = {each.rpartition(".")[2]: each for each in everything}
    ends |= {flat: f"{choice}.{key}" for choice, flats in FLAT.items() for flat, key in flats.items()}
    near = dict.fromkeys(difflib.get_close_matches(name, everything, _MOST_NEAR, 0.7))
    near |= dict.fromkeys(ends[end] for end in difflib.get_close_matches(name, ends, _MOST_NEAR, 0.7))
    hint = (
        f"near it are {', '.join(list(near)[:_MOST_NEAR])}" if near else "see configs/ and dapo_mega/metrics/README.md"
    )
    raise InputError(f"no key, metric or method is called {name!r}; {hint}")


@cache
def _keys() -> tuple[tuple[str, str], ...]:
    """Every key's dotted name and text. A mapping's sections have NAME in theirs."""
    return tuple(dict.fromkeys(pair for root in (RunConfig, SftConfig) for pair in _keys_of(root, "", root)))


def _keys_of(section: type[Section], prefix: str, root: type[Section]) -> Iterator[tuple[str, str]]:
    for key, field in section.model_fields.items():
        name = f"{prefix}{key}"
        if field.description:
            yield name, _key(f"key {name}", field, may_change_at_resume(root, name))
        if kinds := kinds_of(field.annotation):
            yield from _keys_of_kinds(name, kinds)
            continue
        for inner in sections_in(field.annotation):
            below = f"{name}.NAME." if str(field.annotation).startswith("dict[") else f"{name}."
            if not field.description:
                yield below[:-1], _section(f"section {below[:-1]}", inner)
            yield from _keys_of(inner, below, root)


def _keys_of_kinds(name: str, kinds: Mapping[str, type[Section]]) -> Iterator[tuple[str, str]]:
    """The kinds of a choice, and their keys; what several kinds have is one text."""
    texts: dict[tuple[str, str], list[str]] = {}
    for kind, section in kinds.items():
        yield f"{name}.{kind}", _section(f"kind {kind} of {name}", section)
        for key, field in section.model_fields.items():
            if key != "kind":
                text = _key("", field, may_change_at_resume(section, key))
                texts.setdefault((f"{name}.{key}", text), []).append(kind)
    for (key, text), having in texts.items():
        whole = f"key {key} of {', '.join(having)}{text}"
        yield key, whole
        yield from ((f"{name}.{kind}{key.removeprefix(name)}", whole) for kind in having)


def _key(title: str, field: FieldInfo, is_free: bool) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    given = "It must be given." if field.is_required() else f"Default: {_shown(default)}."
    kinds = f"Kinds: {', '.join(kinds_of(field.annotation))}." if kinds_of(field.annotation) else ""
    changes = "may change" if is_free else "may not change"
    return _wrapped(title, field.description or "", kinds, f"{given} It {changes} at a resume.")


def _section(title: str, section: type[Section]) -> str:
    about = " ".join((section.__doc__ or "").split("\n\n")[0].split())
    return _wrapped(title, about, f"Keys: {', '.join(section.model_fields)}.")


def _shown(value: object) -> str:
    plain = value.model_dump(mode="json") if isinstance(value, Section) else value
    plain = plain["kind"] if isinstance(plain, dict) and "kind" in plain else plain
    plain = dict(plain) if isinstance(plain, Mapping) else list(plain) if isinstance(plain, tuple) else plain
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).partition("\n")[0]


def _wrapped(title: str, *paragraphs: str) -> str:
    lines = [line for text in paragraphs if text for line in text.splitlines()]
    fill = partial(textwrap.fill, width=100, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([title, *map(fill, lines)])
