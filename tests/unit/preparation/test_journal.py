"""Finished work outlives the process, and belongs to one call only."""

import os
import signal
from pathlib import Path

import pytest

from dapo_mega.errors import InputError
from dapo_mega.preparation.journal import journal_of, open_journal

CALL = {"model": "a", "seed": 1}


def entries(path: Path) -> dict[int, object]:
    with open_journal(path, CALL) as journal:
        return dict(journal.entries)


def test_what_was_added_is_there_after_kill_9(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "folder" / "output")
    assert path == tmp_path / "folder" / "output.journal.jsonl"
    if (child := os.fork()) == 0:
        with open_journal(path, CALL) as journal:
            for row in (3, 1, 2):
                journal.add(row, {"text": f"√{row}\ud800"})
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert entries(path) == {row: {"text": f"√{row}\ud800"} for row in (3, 1, 2)}


def test_an_unfinished_line_and_what_follows_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with open_journal(path, CALL) as journal:
        journal.add(0, "a")
        journal.add(1, "b")
    whole = path.read_bytes()
    for damaged, kept in (
        (whole[:-1], {0: "a"}),
        (whole[:-4], {0: "a"}),
        (whole + b"\0\0\0\0", {0: "a", 1: "b"}),
        (whole + b'[2, "c"]\n[\n[3, "d"]\n', {0: "a", 1: "b", 2: "c"}),
        (whole + b'["2", "c"]\n', {0: "a", 1: "b"}),
        (whole[:10], {}),
    ):
        path.write_bytes(damaged)
        assert entries(path) == kept
        with open_journal(path, CALL) as journal:
            journal.add(9, "new")
        assert entries(path) == {**kept, 9: "new"}


def test_a_journal_of_another_call_or_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with open_journal(path, CALL) as journal:
        journal.add(0, "a")
        with pytest.raises(InputError, match="in use by another process"), open_journal(path, CALL):
            pass
    with (
        pytest.raises(InputError, match=r"model='a' \(now 'b'\), k=None \(now 3\); give the same"),
        open_journal(path, {**CALL, "model": "b", "k": 3}),
    ):
        pass
    assert entries(path) == {0: "a"}
    with open_journal(tmp_path / "empty", {"model": "b"}):
        pass
    assert entries(tmp_path / "empty") == {}
    path.write_bytes(b"something else\n")
    with pytest.raises(InputError, match="no journal of this command"):
        entries(path)
