"""The troubleshooting page quotes messages and exit statuses as the program has them."""

import ast
import re
from pathlib import Path

from dapo_mega import cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "launch" / "troubleshooting.md"
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
