"""One trainer at a time in a folder; a lock of a trainer that has died holds nobody up for long."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import psutil
import pytest

from dapo_mega.errors import InputError
from dapo_mega.training import run_lock
from dapo_mega.training.run_lock import LOCK_FILE, LockHolder, RunLock


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    for name, seconds in (("_TOUCH_EVERY_S", 0.05), ("_SILENT_AFTER_S", 1.0), ("_PATIENCE_S", 0.3), ("_POLL_S", 0.02)):
        monkeypatch.setattr(run_lock, name, seconds)


def unexpected(reason):
    raise AssertionError(reason)


def leave_lock(folder, holder):
    folder.mkdir(exist_ok=True)
    (folder / LOCK_FILE).write_text(json.dumps(asdict(holder)))


def of_another_machine(**changes):
    return replace(LockHolder.this_process(), machine="another boot", host="node7", **changes)


def test_the_folder_is_made_and_nothing_stays(tmp_path):
    folder = tmp_path / "runs" / "a"
    with RunLock(folder, unexpected):
        assert json.loads((folder / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert not folder.exists()
    folder.mkdir()
    with RunLock(folder, unexpected):
        pass
    assert folder.is_dir()


def test_a_second_trainer_is_refused_by_name_and_the_first_keeps_the_lock(tmp_path):
    with RunLock(tmp_path, unexpected):
        before = (tmp_path / LOCK_FILE).read_text()
        with pytest.raises(InputError, match=rf"in use by another trainer \(process {os.getpid()} on .*output_dir"):
            RunLock(tmp_path, unexpected).__enter__()
        assert (tmp_path / LOCK_FILE).read_text() == before
    with RunLock(tmp_path, unexpected):
        pass


def test_a_lock_whose_holder_was_killed_is_taken_over_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_SILENT_AFTER_S", 1e9)
    code = (
        "import sys, time; from pathlib import Path; from dapo_mega.training.run_lock import RunLock\n"
        "RunLock(Path(sys.argv[1]), print).__enter__(); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {holder.pid}"):
            RunLock(tmp_path, unexpected).__enter__()
        holder.send_signal(signal.SIGKILL)  # Not waited for: a zombie holds no lock either.
        psutil.wait_procs([psutil.Process(holder.pid)], timeout=0.1)
        with RunLock(tmp_path, unexpected):
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_process_with_the_same_number_is_not_the_holder(tmp_path):
    leave_lock(tmp_path, replace(LockHolder.this_process(), start_ticks=1))
    with RunLock(tmp_path, unexpected):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["start_ticks"] != 1


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"token": 3}', b"\xff\xfe"])
def test_a_lock_that_cannot_be_judged_counts_while_it_is_touched(tmp_path, content):
    file = tmp_path / LOCK_FILE
    leave_lock(tmp_path, of_another_machine())
    if content is not None:
        file.write_bytes(content)
    alive = threading.Event()

    def touch():
        while not alive.wait(0.05):
            os.utime(file)

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        with pytest.raises(InputError, match="in use by another trainer"):
            RunLock(tmp_path, unexpected).__enter__()
    finally:
        alive.set()
        toucher.join()
    with RunLock(tmp_path, unexpected):
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == []


def test_of_many_that_find_a_dead_lock_one_gets_it(tmp_path):
    leave_lock(tmp_path, replace(LockHolder.this_process(), start_ticks=1))
    start, outcomes = threading.Barrier(8), []
    done = threading.Event()

    def try_it():
        start.wait()
        try:
            with RunLock(tmp_path, unexpected):
                outcomes.append("held")
                done.wait(20)
        except InputError:
            outcomes.append("refused")

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(outcomes) < 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    done.set()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held"] + ["refused"] * 7


def test_a_holder_that_was_suspended_notices_that_its_lock_is_gone(tmp_path):
    lost = threading.Event()
    reasons = []
    lock = RunLock(tmp_path, lambda reason: (reasons.append(reason), lost.set()))
    lock.__enter__()
    leave_lock(tmp_path, of_another_machine())
    assert lost.wait(20)
    assert "taken over by another trainer" in reasons[0]
    assert "node7" in reasons[0]
    lock.__exit__(None, None, None)
    assert (tmp_path / LOCK_FILE).exists()


def test_a_lock_that_cannot_be_written_is_not_left_behind(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space"):
        RunLock(tmp_path, unexpected).__enter__()
    assert not list(tmp_path.iterdir())
