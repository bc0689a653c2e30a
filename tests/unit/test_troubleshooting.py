"""The troubleshooting page quotes messages as the program writes them, and its links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

from dapo_mega import cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "launch" / "troubleshooting.md"
PAGES = (PAGE, ROOT / "dapo_mega" / "metrics" / "README.md")
OF_OTHER_PROGRAMS = {"OutOfMemoryError", "EADDRINUSE", "status.json", "serve_rollouts.py"}


def messages():
    """Every constant text of the package and the launchers, parts of f-strings included."""
    files = [*(ROOT / "dapo_mega").rglob("*.py"), *(ROOT / "launch").glob("*.py")]
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_quoted_messages_are_those_of_the_program():
    symptoms = PAGE.read_text().partition("## Symptoms")[2]
    cells = re.findall(r"^\| (`[^|]*) \|", symptoms, re.MULTILINE)
    quoted = {text for cell in cells for text in re.findall("`([^`]*)`", cell)} - OF_OTHER_PROGRAMS
    metrics = {text for text in quoted if "/" in text}
    assert len(quoted) > 10
    known = "\n".join(messages())
    assert [text for text in quoted - metrics if text not in known] == []


def test_the_exit_statuses_are_those_of_the_program():
    named = set(re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE))
    ours = (cli.EXIT_FAULT, cli.EXIT_INPUT_ERROR, cli.EXIT_STARVED, cli.EXIT_FLEET, cli.EXIT_CONTINUE)
    assert {str(status) for status in ours} <= named


def anchor(heading):
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=["troubleshooting", "metrics"])
def test_links_lead_to_files_and_headings(page):
    broken = []
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        file, _, heading = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE) if path.is_file() else []
        if not path.exists() or (heading and heading not in map(anchor, headings)):
            broken.append(target)
    assert broken == []
