"""The package's file tree in `dapo_mega/README.md`, made of the first sentence of every module.

python tools/file_tree.py           # writes it
python tools/file_tree.py --check   # says whether it is what the modules say, by its exit status
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "dapo_mega"
PAGE = PACKAGE / "README.md"
BEGIN, END = "<!-- file tree: tools/file_tree.py -->", "<!-- end of the file tree -->"
_ROOMS = (
    "types", "errors", "atomic_files", "rewards", "cli", "config", "metrics", "distributed", "algorithms", "data",
    "models", "batching", "planning", "megatron", "engines", "checkpoints", "rollout", "weight_sync", "conversion",
    "sglang_plugin", "training", "commands", "__main__",
)  # fmt: skip


def tree() -> str:
    """Every module in the order of the rooms, with its first sentence. Raises ValueError for a room that has no place
    in the order, and for a module without a docstring."""
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    if unknown := rooms - {*_ROOMS, "__init__"}:
        raise ValueError(f"{sorted(unknown)} have no place in the order of rooms of {__file__}")
    return "\n".join(line for room in _ROOMS for line in _lines(PACKAGE / room))


def _lines(path: Path) -> Iterator[str]:
    depth = len(path.relative_to(PACKAGE).parts)
    if not path.is_dir():
        yield _line(path.with_suffix(".py"), f"{path.name}.py", depth)
        return
    yield _line(path / "__init__.py", f"{path.name}/", depth)
    files = sorted(file for file in path.glob("*.py") if file.name != "__init__.py")
    for file in files:
        yield _line(file, file.name, depth + 1)
    for folder in sorted(part.parent for part in path.glob("*/__init__.py")):
        yield from _lines(folder)


def _line(module: Path, name: str, depth: int) -> str:
    text = ast.get_docstring(ast.parse(module.read_text()))
    if not text:
        raise ValueError(f"{module} has no docstring")
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = paragraph.split(". ")[0].removesuffix(".")
    indent = "    " + "  " * (depth - 1)
    return f"{indent}{name:{34 - 2 * depth}} {sentence}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    before = PAGE.read_text()
    head, _, rest = before.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        sys.exit(f"error: {PAGE} has no lines '{BEGIN}' and '{END}'")
    after = f"{head}{BEGIN}\n\n{tree()}\n\n{END}{tail}"
    if arguments.check:
        sys.exit(0 if after == before else f"error: the file tree in {PAGE} is outdated; run python tools/file_tree.py")
    PAGE.write_text(after)


if __name__ == "__main__":
    main()
