"""Fixtures of the unit tests."""

from pathlib import Path

import pytest

_PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder in which commands find the project's files and leave theirs."""
    for folder in ("configs", "launch", "tools", "dapo_mega", "tests"):
        (tmp_path / folder).symlink_to(_PROJECT / folder)
    monkeypatch.chdir(tmp_path)
    for name in ("DAPO_MEGA_API_KEY", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path
