"""Write the generated parts of the documentation: the list of rooms, the reference of configuration keys and more.

python tools/reference.py           # writes all of them
python tools/reference.py --check   # names the outdated ones, and exits with 1 if there are any
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import types
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from dapo_mega.algorithms.policy_losses import POLICY_LOSS_METRICS
from dapo_mega.config import RunConfig, Section, SftConfig
from dapo_mega.config.base import may_change_at_resume, section_in
from dapo_mega.config.choices import kinds_of
from dapo_mega.config.components import Component
from dapo_mega.evaluation.benchmarks import BENCHMARKS, EXTRACTION, TEMPLATE
from dapo_mega.metrics.catalogue import METRIC_COLUMNS

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "dapo_mega"


@dataclass(frozen=True)
class GeneratedPart:
    """The part of a page between two comments that name it."""

    page: Path
    name: str
    make: Callable[[], str]

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: made by tools/reference.py -->"

    @property
    def end(self) -> str:
        return f"<!-- end of the {self.name} -->"

    def inserted(self, text: str) -> str:
        """The page's `text` with this part made anew. Raises ValueError if the page has no place for it."""
        head, _, rest = text.partition(self.begin)
        _, found, tail = rest.partition(self.end)
        if not found:
            raise ValueError(f"{self.page} has no lines '{self.begin}' and '{self.end}'")
        return f"{head}{self.begin}\n\n{self.make()}\n\n{self.end}{tail}"


# The rooms ---------------------------------------------------------------------------------------------------------

_ROOMS = (
    "types", "trajectory_records", "errors", "atomic_files", "declared", "algorithms", "cli",
    "config", "metrics", "distributed", "rewards", "data", "models", "batching", "megatron", "engines", "environments",
    "rollout", "weight_sync", "sglang_plugin", "checkpoints", "samples", "training", "library",
)  # fmt: skip
_SATELLITES = (
    "planning", "simulation", "evaluation", "preparation", "conversion", "ablation", "rehearsal", "commands",
    "__main__",
)  # fmt: skip
"""What no step of training goes through."""


def list_of_rooms() -> str:
    """Every room with its first sentence, from the ground up, then those beside training. Raises ValueError for a room
    that has no place in the order, and for one without a docstring."""
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    if unknown := rooms - {*_ROOMS, *_SATELLITES, "__init__"}:
        raise ValueError(f"{sorted(unknown)} have no place in the order of rooms of {__file__}")
    head = ["| room | what lives there |", "|---|---|"]
    satellites = ["", "Beside training:", "", *head, *map(_room, _SATELLITES)]
    return "\n".join([*head, *map(_room, _ROOMS), *satellites])


def _room(name: str) -> str:
    is_folder = (PACKAGE / name).is_dir()
    module = PACKAGE / name / "__init__.py" if is_folder else PACKAGE / f"{name}.py"
    text = ast.get_docstring(ast.parse(module.read_text()))
    if not text:
        raise ValueError(f"{module} has no docstring")
    sentence = " ".join(text.split("\n\n")[0].split()).split(". ")[0].removesuffix(".")
    return f"| `{name}{'/' if is_folder else '.py'}` | {sentence} |"


# The configuration keys -------------------------------------------------------------------------------------------


_KEY_COLUMNS = ("key", "type", "default", "allowed", "at a resume", "what it does")


def configuration_keys() -> str:
    """The tables of all keys: those of a run, section by section, then those that only supervised training has.
    Raises ValueError, naming the key, for one without a description."""
    run, fine_tuning = dict(_sections(RunConfig)), dict(_sections(SftConfig))
    parts = []
    for kind, prefixes in run.items():
        parts.append(_section_text(kind, prefixes, RunConfig, _inherited(kind, run)))
        choices = {key: kinds for key, field in kind.model_fields.items() if (kinds := kinds_of(field.annotation))}
        parts += [_kinds(f"{prefixes[0]}.{key}", kinds, kind) for key, kinds in choices.items()]
    shared = sorted({prefix for kind, found in fine_tuning.items() if kind in run for prefix in found})
    parts.append(
        "### Supervised training\n\nThe files of `launch/train_sft.py` have the sections "
        f"{', '.join(f'`{prefix}`' for prefix in shared)} of above, and these keys:"
    )
    own = [row for kind, found in fine_tuning.items() if kind not in run for row in _rows(kind, found[0], SftConfig)]
    parts.append(_table([*own, *_other_defaults(fine_tuning)]))
    titles = [line.removeprefix("### ") for part in parts for line in part.splitlines() if line.startswith("### ")]
    return "\n\n".join([" · ".join(f"[{title}](#{_anchor(title)})" for title in titles), *parts])


def _kinds(name: str, kinds: dict[str, type[Section]], root: type[Section]) -> str:
    """The kinds of a choice with their keys; those that all have stand in the first table only."""
    first, *others = kinds.values()
    shared = {key for key in first.model_fields if all(key in other.model_fields for other in others)}
    rows = list(_rows(first, "", root, without=("kind", *(first.model_fields.keys() - shared))))
    blocks = [f"### `{name}`\n\nEach has a `kind`" + (f" and these keys.\n\n{_table(rows)}" if rows else ".")]
    for kind, section in kinds.items():
        about = " ".join((section.__doc__ or "").split("\n\n")[0].split())
        own = list(_rows(section, "", root, without=tuple(shared)))
        blocks.append(f"**`kind: {kind}`**: {about}" + (f"\n\n{_table(own)}" if own else ""))
    return "\n\n".join(blocks)


def _anchor(title: str) -> str:
    """The name that code hosts give a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _sections(root: type[Section]) -> Iterator[tuple[type[Section], list[str]]]:
    """Every section with the dotted names under which it stands, in the order of the file."""
    found: dict[type[Section], list[str]] = {}

    def visit(kind: type[Section], prefix: str) -> None:
        found.setdefault(kind, []).append(prefix)
        for name, field in kind.model_fields.items():
            if (inner := section_in(field.annotation)) and not kinds_of(field.annotation):
                is_named = get_origin(field.annotation) is dict
                visit(inner, f"{prefix}.{name}{'.NAME' if is_named else ''}".lstrip("."))

    visit(root, "")
    yield from found.items()


def _inherited(kind: type[Section], shown: Container[type[Section]]) -> tuple[str, ...]:
    """The keys that stand in the table of the section which this one extends."""
    return tuple(
        key for base in kind.__bases__ if issubclass(base, Section) and base in shown for key in base.model_fields
    )


def _section_text(kind: type[Section], prefixes: list[str], root: type[Section], without: tuple[str, ...]) -> str:
    title = ", ".join(f"`{prefix}`" for prefix in prefixes if prefix) or "Top level"
    about = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    also = ", ".join(f"`{prefix}`" for prefix in prefixes[1:])
    if also:
        about += f" {also} {'has' if len(prefixes) == 2 else 'have'} the same keys."
    rows = _table(list(_rows(kind, prefixes[0], root, without)))
    return f"### {title}\n\n{about}\n\n{rows}"


def _rows(kind: type[Section], prefix: str, root: type[Section], without: tuple[str, ...] = ()) -> Iterator[list[str]]:
    for key, field in kind.model_fields.items():
        if key in without:
            continue
        name = f"{prefix}.{key}".lstrip(".")
        kinds = kinds_of(field.annotation)
        is_section = section_in(field.annotation) is not None
        if is_section and not field.description:
            continue  # It has a table of its own.
        if not field.description:
            raise ValueError(
                f"configuration key {name} has no description; write one below its field of {kind.__name__}"
            )
        changes = "may change" if may_change_at_resume(root, name) else "fixed"
        kind_text, allowed = "section" if is_section else _type_text(field.annotation), _allowed(field)
        if kinds and is_section:
            kind_text, allowed = "kind or section", ", ".join(f"`{each}`" for each in kinds)
        yield [f"`{name}`", kind_text, _default(field), allowed, changes, field.description]


def _other_defaults(fine_tuning: dict[type[Section], list[str]]) -> Iterator[list[str]]:
    """Rows of keys in shared sections for which supervised training has another default."""
    for section, field in SftConfig.model_fields.items():
        kind = section_in(field.annotation)
        if kind is None or not isinstance(field.default, kind):
            continue
        for row, key in zip(_rows(kind, fine_tuning[kind][0], SftConfig), kind.model_fields, strict=False):
            value = getattr(field.default, key)
            if row[0] == f"`{section}.{key}`" and value != kind.model_fields[key].default:
                yield [*row[:2], f"`{_value_text(value)}`", *row[3:]]


def _table(rows: list[list[str]], head: Sequence[str] = _KEY_COLUMNS) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _type_text(annotation: Any) -> str:
    names = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
    if annotation == Component:
        return "component"
    if annotation in names:
        return names[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "choice"
    if origin is dict:
        return "mapping"
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_type_text(arguments[0])}s".replace("texts", "text")
        return f"list of {len(arguments)} {_type_text(arguments[0])}s"
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(argument) for argument in arguments)
    raise ValueError(f"no words for the type {annotation}; add them to {__file__}")


def _allowed(field: FieldInfo) -> str:
    bounds = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = [
        f"{bounds[name]} {_bound(getattr(m, name))}" for m in field.metadata for name in bounds if hasattr(m, name)
    ]
    return ", ".join([*(f"`{choice}`" for choice in _choices(field.annotation)), *limits])


def _bound(value: float) -> str:
    return f"2^{value.bit_length() - 1}" if isinstance(value, int) and value > 2**32 else f"{value:g}"


def _choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from map(_value_text, get_args(annotation))
        return
    for argument in get_args(annotation):
        yield from _choices(argument)


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    return "required" if field.is_required() else f"`{_value_text(default)}`"


def _value_text(value: Any) -> str:
    """A value as YAML has it."""
    if value is None:
        return "null"
    if isinstance(value, Section):
        return str(getattr(value, "kind", value))
    if value == ():
        return "[]"
    if value == {}:
        return "{}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def metrics_of_losses() -> str:
    """The rows of what policy losses declare, as all others stand in the page of metrics."""
    rows = [
        (f"`{m.name.removeprefix('policy/')}`", m.unit, m.better, m.meaning, m.healthy, m.warning, m.action)
        for m in POLICY_LOSS_METRICS
    ]
    return _table([[cell or "–" for cell in row] for row in rows], METRIC_COLUMNS)


# Benchmarks -------------------------------------------------------------------------------------------------------


def benchmark_table() -> str:
    """The benchmarks that evaluations know by name."""
    head = ["name", "benchmark", "problems", "k", "template", "grader", "source on the hub"]
    rows = [
        [
            f"`{b.name}`",
            b.title,
            str(b.num_problems),
            str(b.samples),
            f"`{TEMPLATE}`",
            f"`{EXTRACTION}`" + (f", numbers within {b.numeric_tolerance:.0%}" if b.numeric_tolerance else ""),
            f"`{b.hub}`, `{b.split}`",
        ]
        for b in BENCHMARKS.values()
    ]
    return _table(rows, head)


# All of them ------------------------------------------------------------------------------------------------------

PARTS = [
    GeneratedPart(PACKAGE / "README.md", "list of rooms", list_of_rooms),
    GeneratedPart(REPOSITORY / "configs" / "keys.md", "reference of configuration keys", configuration_keys),
    GeneratedPart(PACKAGE / "metrics" / "tables.md", "metrics of policy losses", metrics_of_losses),
    GeneratedPart(REPOSITORY / "tools" / "evaluation.md", "table of benchmarks", benchmark_table),
]
"""Every generated part. To add one: a function that makes its text, a line here, and the two comments in its page."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say what is outdated")
    is_check = parser.parse_args().check
    outdated = []
    for part in PARTS:
        before = part.page.read_text()
        after = part.inserted(before)
        if after != before:
            outdated.append(f"the {part.name} in {part.page.relative_to(REPOSITORY)}")
            if not is_check:
                part.page.write_text(after)
    if is_check and outdated:
        sys.exit(f"error: outdated: {', '.join(outdated)}; run python tools/reference.py")


if __name__ == "__main__":
    main()
