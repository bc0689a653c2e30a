"""Imports go strictly downwards; the lower layers never touch Megatron, SGLang or HTTP."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dapo_mega"
LAYERS = [
    {"types", "config", "errors", "files", "metrics", "commands", "run_lock", "run_status"},
    {
        "data",
        "rewards",
        "algorithms",
        "buffer",
        "packing",
        "balancing",
        "models",
        "group_state",
        "handover",
        "mismatch",
        "batching",
        "plan",
        "planning",
        "dry_run",
        "process_watch",
    },
    {"rollout", "policy", "weight_sync", "sglang_plugin"},
    {"evaluation", "rollouts", "pipeline", "trainer", "run", "sft", "standalone_evaluation"},
]
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = {"megatron", "sglang", "aiohttp", "requests", "urllib", "http", "socket"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def modules():
    return [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "__init__.py"]


def part(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_layer_and_below(path):
    level = LAYER_OF[part(path)]
    for name in imports(path):
        pieces = name.split(".")
        if pieces[0] == "dapo_mega" and len(pieces) > 1 and pieces[1] != part(path):
            assert LAYER_OF[pieces[1]] <= level, f"{path.name} imports {name}"
        if level < 2:
            assert pieces[0] not in HEAVY, f"{path.name} imports {name}"
        if pieces[0] == "megatron":
            assert part(path) == "policy", f"{path.name} imports {name}: only policy/ may"


def test_a_dry_run_loads_neither_megatron_nor_transformers():
    code = (
        "import sys; sys.argv = ['x', '--config', 'configs/qwen2.5-32b-dapo.yaml', '--dry-run']\n"
        "import runpy; runpy.run_path('launch/train_dapo.py', run_name='__main__')\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('megatron', 'transformers')]\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
