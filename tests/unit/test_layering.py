"""Rooms of the package from the ground up: imports go strictly downwards, and only some rooms know what is heavy."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "dapo_mega"
FLOORS = (
    {"types", "errors"},
    {"atomic_files", "declared", "trajectory_records"},
    {"algorithms"},
    {"cli", "config", "metrics", "distributed"},
    {"rewards"},
    {"data", "models"},
    {"batching"},
    {"megatron", "engines"},
    {"environments"},
    {"planning", "checkpoints", "rollout", "weight_sync"},
    {"conversion", "sglang_plugin", "samples", "simulation"},
    {"evaluation"},
    {"preparation"},
    {"training"},
    {"ablation", "rehearsal"},
    {"commands"},
    {"__main__", "library"},
)
MEGATRON_SURFACE = PACKAGE / "megatron" / "core"
FLOOR_OF = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
MAY_IMPORT = {
    "sglang": {"sglang_plugin"},
    "aiohttp": {"engines", "environments", "rewards"},
    "http": {"engines", "rewards"},
    "urllib.request": {"engines"},
    "requests": set(),
    "mlflow": {"metrics"},
    "trackio": {"metrics"},
    "wandb": {"metrics"},
    "socket": {"distributed", "engines", "weight_sync", "training"},
}


@cache
def imports(path):
    """The names of all modules that the file imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return [*named, *(node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module)]


def modules():
    """Every module but the package's own, with its room."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if parts != ("__init__.py",):
            yield path, parts[0].removesuffix(".py")


def test_imports_go_down_and_never_sideways_between_rooms():
    offences = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path, room in modules()
        for name in imports(path)
        if name.startswith("dapo_mega.") and (other := name.split(".")[1]) != room and FLOOR_OF[other] >= FLOOR_OF[room]
    ]
    assert offences == []


def test_one_module_knows_which_device_this_process_computes_on():
    # What Megatron-Core asks torch.cuda is answered in its repairs.
    allowed = {PACKAGE / "distributed" / "accelerator.py", MEGATRON_SURFACE / "repairs" / "cpu_accelerator.py"}
    offences = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, _ in modules()
        if path not in allowed
        if "torch.cuda" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
    ]
    assert offences == []


def test_only_their_rooms_know_sglang_and_the_network():
    offences = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path, room in modules()
        for name in imports(path)
        if room not in MAY_IMPORT.get(name, MAY_IMPORT.get(name.split(".")[0], {room}))
    ]
    assert offences == []


def test_one_folder_knows_megatron_and_nothing_above_it():
    offences = []
    folders = (PACKAGE.parent / name for name in ("dapo_mega", "launch", "tools"))
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        is_inside = path.is_relative_to(MEGATRON_SURFACE)
        for name in imports(path):
            is_megatron = name.split(".")[0] == "megatron"
            is_above = name.startswith("dapo_mega.megatron.") and not name.startswith("dapo_mega.megatron.core.")
            if (is_inside and is_above) or (is_megatron and not is_inside):
                offences.append(f"{path.relative_to(PACKAGE.parent)} imports {name}")
    assert offences == []
    assert [path.name for path in MEGATRON_SURFACE.rglob("*.py") if "GPTModel" in path.read_text()] == ["decoder.py"]


def test_every_room_says_what_lives_there():
    silent = [
        str(path.parent.relative_to(PACKAGE))
        for path, _ in modules()
        if path.name == "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def heavy_modules(code, *heavy):
    """Which of `heavy` a process has loaded after `code`."""
    code += f"\nimport sys; print(sorted({{m.split('.')[0] for m in sys.modules}} & {set(heavy)!r}))"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_a_dry_run_loads_neither_megatron_nor_transformers():
    code = (
        "import sys; sys.argv = ['x', '--config', 'configs/qwen2.5-32b-dapo-128gpu.yaml', '--dry-run']\n"
        "import runpy; runpy.run_path('launch/train_dapo.py', run_name='__main__')"
    )
    assert heavy_modules(code, "megatron", "transformers") == "[]"


def test_the_plugin_is_light():
    code = "import dapo_mega.sglang_plugin"
    assert heavy_modules(code, "megatron", "pydantic", "transformers", "datasets", "aiohttp") == "[]"


def test_a_process_that_leaves_all_tests_to_others_loads_no_torch():
    code = "import tests.conftest, tests.integration.conftest, tests.numerics.conftest, tests.unit.conftest"
    assert heavy_modules(code, "torch", "megatron", "transformers", "dapo_mega") == "[]"
