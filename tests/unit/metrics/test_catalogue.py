"""The catalogue describes what is recorded: the names are collected from the places in the code that record them."""

import ast
import importlib
import itertools
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from dapo_mega.algorithms.policy_losses import POLICY_LOSS_METRICS
from dapo_mega.config import RunConfig, SftConfig
from dapo_mega.config.paths import sections_in
from dapo_mega.metrics.catalogue import CATALOGUE, PREFIXES, describe
from dapo_mega.types import STOP_REASONS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "dapo_mega" / "metrics" / "README.md"
NAME = re.compile(r"[a-z_]+/[a-z<][a-z0-9_<>]*")
FAMILIES = {metric.name for metric in CATALOGUE}
KNOWN_PREFIX = re.compile("|".join(f"{prefix}/" for prefix in PREFIXES))


@cache
def modules():
    """Every module of the package, with its syntax tree."""
    paths = sorted((ROOT / "dapo_mega").rglob("*.py"))
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in paths]


def constant_loops(path, tree):
    """The strings over which a loop's variable runs, by its name: a tuple, a module's tuple, or a Literal's values."""
    module = vars(importlib.import_module(".".join(path.with_suffix("").parts)))
    loops = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            match node.iter:
                case ast.Tuple(elts=elements):
                    found = [getattr(element, "value", None) for element in elements]
                case ast.Name(id=name):
                    found = module.get(name)
                case ast.Call(func=ast.Name(id="get_args"), args=[ast.Name(id=name)]):
                    found = get_args(module[name])
                case _:
                    found = None
            if isinstance(found, list | tuple | dict) and all(isinstance(value, str) for value in found):
                loops.setdefault(node.target.id, []).extend(found)
    return loops


def texts(node, loops):
    """The strings that an expression can be. What is known only at run time is <>."""
    match node:
        case ast.Attribute(attr="role"):  # Of a trained model.
            return ["policy", "critic"]
        case ast.Name(id=name):
            return loops.get(name, ["<>"])
        case ast.Constant(value=str(value)):
            return [value]
        case ast.FormattedValue(value=value):
            return texts(value, loops)
        case ast.JoinedStr(values=parts):
            return ["".join(chosen) for chosen in itertools.product(*(texts(part, loops) for part in parts))]
    return ["<>"]


def recording_places(tree):
    """Expressions that may name a metric: keys of mappings, and what is assigned to an item of one."""
    for node in ast.walk(tree):
        match node:
            case ast.Dict(keys=keys):
                yield from (key for key in keys if key)
            case ast.DictComp(key=key):
                yield key
            case ast.Assign(targets=[ast.Subscript(slice=key)], value=value):
                yield from (key, value)


def timed_stages(tree):
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="stage"), args=[ast.Constant(value=stage)]):
                yield f"time/{stage}_s"


def is_metric(node):
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "Metric"


def recorded_names():
    """The names that the package records, each with its file."""
    found = {}
    for path, tree in modules():
        places = list(recording_places(tree))
        if "policy_losses" in path.parts:  # Losses record what they describe.
            places += [node.args[0] for node in ast.walk(tree) if is_metric(node)]
        has_loops = any(isinstance(place, ast.JoinedStr) and NAME.fullmatch(texts(place, {})[0]) for place in places)
        loops = constant_loops(path, tree) if has_loops else {}
        recorded = {name for place in places for name in texts(place, loops)} - {"time/<>_s", "policy/own_<name>"}
        found.update({name: str(path) for name in {*recorded, *timed_stages(tree)} if NAME.fullmatch(name)})
    return found


def without_variables(name):
    return re.sub("<.*>", "<>", name)


def test_every_recorded_metric_is_described():
    described = {without_variables(name) for metric in CATALOGUE for name in metric.names()}
    offenders = [f"{path}: {name}" for name, path in recorded_names().items() if name not in described]
    assert not offenders, "\n".join(offenders)


def test_every_described_metric_is_recorded():
    recorded = recorded_names()
    described = [name for metric in CATALOGUE for name in metric.names()]
    offenders = [name for name in described if without_variables(name) not in recorded]
    assert not offenders, "\n".join(offenders)
    assert sorted(described) == sorted(set(described))


def test_every_metric_that_is_read_is_described():
    """On the console, in plots, by tools."""
    files = [*modules(), *((path, ast.parse(path.read_text())) for path in (ROOT / "tools").glob("*.py"))]
    offenders = []
    for path, tree in files:
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                is_name = NAME.fullmatch(node.value) and KNOWN_PREFIX.match(node.value)
                if is_name and describe(node.value) is None and node.value not in FAMILIES:
                    offenders.append(f"{path}:{node.lineno} {node.value}")
    assert not offenders, "\n".join(offenders)


def test_the_page_says_what_losses_declare():
    assert [m for m in CATALOGUE if m in POLICY_LOSS_METRICS] == list(POLICY_LOSS_METRICS)


def test_members_of_a_family_are_those_that_are_recorded():
    assert describe("rollout/stop_done").members == STOP_REASONS


def test_the_recorded_curve_is_described():
    curve = json.loads((ROOT / "tests" / "integration" / "golden" / "curve.json").read_text())
    assert {name for record in curve.values() for name in record if describe(name) is None} == set()


def test_a_family_describes_its_members_only():
    assert describe("evaluation/pass_at_16").name == "evaluation/pass_at_<k>"
    assert describe("rollout/failed_calls_timeout").name == "rollout/failed_calls_<cause>"
    assert describe("evaluation/pass_at_k").name == "evaluation/pass_at_k"
    assert [describe(name) for name in ("evaluation/pass_at_", "rollout/failed_calls_boredom")] == [None, None]


def keys(section, prefix=""):
    """The names of all keys of a configuration, sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_in(field.annotation):
            yield from keys(inner, f"{prefix}{name}.")


@pytest.mark.parametrize("page", [PAGE, ROOT / "launch" / "troubleshooting.md"], ids=lambda page: page.name)
def test_pages_name_only_keys_and_metrics_that_exist(page):
    page = page.read_text()
    known = {*keys(RunConfig), *keys(SftConfig)}
    sections = "|".join(RunConfig.model_fields)
    named = re.findall(rf"`((?:{sections})\.[a-z_.]+)", page)
    assert named
    assert [key for key in named if key not in known] == []
    metrics = [name for name in re.findall(r"`([a-z_]+/[a-z0-9_<>]+)`", page) if KNOWN_PREFIX.match(name)]
    described = {metric.name for metric in CATALOGUE}
    assert [name for name in metrics if name not in described and describe(name) is None] == []


def test_the_page_has_the_headings_to_which_its_tables_send():
    page = PAGE.read_text()
    assert [title for title in re.findall(r'see "([^"]+)" above', page) if f"\n### {title}\n" not in page] == []


def test_the_catalogue_is_light():
    code = "import dapo_mega.metrics.catalogue, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
