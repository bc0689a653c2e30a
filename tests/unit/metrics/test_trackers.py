"""Trackers: what they get, and that they can neither stop, slow nor double anything."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dapo_mega.metrics import Example, Histogram, MetricsWriter
from dapo_mega.metrics.trackers import (
    BackgroundTracker,
    Record,
    TrackedRun,
    background,
    close_all,
    missing_packages,
    run_id_in,
)
from dapo_mega.metrics.trackers.records import end_line
from dapo_mega.metrics.trackers.tracker_process import Service

ROOT = str(Path(__file__).resolve().parents[3])
RECORDER = f"""
import json, sys, time
sys.path.append({ROOT!r})
from dapo_mega.metrics.trackers import tracker_process

class Recorder:
    url = None
    def __init__(self, run):
        self.path = run.folder + "/recorded.jsonl"
        self.note("open " + run.id)
    def note(self, what):
        with open(self.path, "a") as file:
            file.write(json.dumps(what) + "\\n")
    def log(self, record):
        self.note(record.step)
    def finish(self, *, is_finished):
        self.note("finished" if is_finished else "stopped")

tracker_process.open_run = lambda backend, run: Recorder(run)
tracker_process.main("recorder")
"""


def tracked_run(folder, **changes):
    values = {"id": "a1", "name": "mine", "project": "p", "folder": str(folder), "trainer_pid": os.getpid()}
    return TrackedRun(**{**values, "close_limit_s": 60.0, **changes})


def tracker(folder, program, **changes):
    return BackgroundTracker("recorder", tracked_run(folder, **changes), command=[sys.executable, "-c", program])


def recorded(folder):
    return [json.loads(line) for line in (folder / "recorded.jsonl").read_text().splitlines()]


def wait_until(condition, what, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def waiting_tracker(folder, **changes):
    """A tracker that takes nothing, and its process."""
    program = f"import os, time; open({str(folder / 'pid')!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(600)"
    started = tracker(folder, program, **changes)
    pid = folder / "pid"
    wait_until(lambda: pid.exists() and pid.read_text().endswith("."), "the process did not start")
    return started, psutil.Process(int(pid.read_text()[:-1]))


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_tracker_gets_every_record_of_the_writer(tmp_path, caplog):
    with MetricsWriter(tmp_path, 0, None, [tracker(tmp_path, RECORDER)]) as writer:
        for step in range(3):
            writer.write(step, {"policy/loss": 0.5}, {"rollout/reward": Histogram(0, 1, (1, 2))})
    assert recorded(tmp_path) == ["open a1", 0, 1, 2, "finished"]
    assert not warnings_in(caplog)


def test_a_tracker_sends_what_it_has_when_the_trainer_is_killed(tmp_path):
    program = f"""
import os, signal, sys, time
from pathlib import Path
from dapo_mega.metrics.trackers import BackgroundTracker, Record, TrackedRun
folder = Path({str(tmp_path)!r})
run = TrackedRun("a1", "mine", "p", str(folder), os.getpid(), 60.0)
tracker = BackgroundTracker("recorder", run, command=[sys.executable, "-c", {RECORDER!r}])
for step in range(3):
    tracker.log(Record(step, {{}}))
while not (folder / "recorded.jsonl").exists():
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    wait_until(lambda: recorded(tmp_path)[-1] == "stopped", "the tracker's process did not end the run")
    assert recorded(tmp_path) == ["open a1", 0, 1, 2, "stopped"]


def test_a_tracker_that_takes_nothing_neither_blocks_nor_outlives_the_run(tmp_path, caplog):
    stuck, process = waiting_tracker(tmp_path, close_limit_s=0.5)
    big = Record(0, {}, examples=(Example("p" * 5000, "r", "g", False),))
    for _ in range(2 * background.QUEUE_LENGTH):
        stuck.log(big)
    close_all([stuck], is_finished=True)
    assert not process.is_running()
    (warning,) = warnings_in(caplog)
    assert "slower than the run" in warning
    assert "recorder.log" in warning


def test_a_stopped_run_leaves_a_slow_tracker_to_end_by_itself(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(background, "STOP_LIMIT_S", 0.1)
    slow, process = waiting_tracker(tmp_path)
    close_all([slow], is_finished=False)
    assert process.is_running()
    process.kill()
    process.wait()
    assert not warnings_in(caplog)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(3)", "status 3"),
        ("""for _ in range(2): print('{"failure": "ConnectionError: no server"}', flush=True)""", "no server"),
    ],
)
def test_a_failing_tracker_is_named_once_and_training_goes_on(tmp_path, caplog, program, said):
    failing = tracker(tmp_path, program)
    wait_until(lambda: warnings_in(caplog), "no warning")
    with MetricsWriter(tmp_path, 0, None, [failing]) as writer:
        writer.write(0, {"policy/loss": 1.0})
        writer.write(1, {"policy/loss": 1.0})
    (warning,) = warnings_in(caplog)
    assert said in warning
    assert "recorder does not get all of this run" in warning


def test_a_tracker_that_cannot_be_started_is_named_once(tmp_path, caplog):
    absent = BackgroundTracker("recorder", tracked_run(tmp_path), command=[str(tmp_path / "absent")])
    absent.log(Record(0, {}))
    close_all([absent], is_finished=True)
    assert "cannot be started" in warnings_in(caplog)[0]
    assert len(warnings_in(caplog)) == 1


def test_keys_of_others_do_not_reach_a_tracker(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_KEY", "secret")
    monkeypatch.setenv("WANDB_API_KEY", "own")
    program = "import json, os, sys; print(json.dumps(dict(os.environ)), file=sys.stderr); sys.stdin.read()"
    command = [sys.executable, "-c", program]
    close_all(
        [BackgroundTracker("recorder", tracked_run(tmp_path), hidden=["ENGINE_KEY"], command=command)], is_finished=True
    )
    environment = json.loads((tmp_path / "recorder.log").read_text().splitlines()[0])
    assert "ENGINE_KEY" not in environment
    assert environment["WANDB_API_KEY"] == "own"


class Fake:
    """A tracker that notes what it gets, and fails at the steps named."""

    url = "https://example.test/run"

    def __init__(self, fails_at=()):
        self.got = []
        self.fails_at = set(fails_at)

    def log(self, record):
        if record.step in self.fails_at:
            raise ConnectionError(f"step {record.step}: https://user:secret@host is away")
        self.got.append(record.step)

    def finish(self, *, is_finished):
        self.got.append("finished" if is_finished else "stopped")


def serve_steps(folder, fake, steps, *, run_id="a1", end=True):
    told = []
    lines = [Record(step, {}).to_line() for step in steps] + ([end_line(is_finished=True)] if end else [])
    Service(tracked_run(folder, id=run_id), "fake", fake, lambda **event: told.append(event)).serve(lines)
    return told


def test_a_resumed_run_sends_no_step_twice(tmp_path):
    first, second, other = Fake(), Fake(), Fake()
    serve_steps(tmp_path, lambda run: first, range(6), end=False)
    serve_steps(tmp_path, lambda run: second, range(3, 8))
    serve_steps(tmp_path, lambda run: other, range(2), run_id="b2")
    assert first.got == [0, 1, 2, 3, 4, 5, "stopped"]
    assert second.got == [6, 7, "finished"]
    assert other.got == [0, 1, "finished"]


def test_what_became_known_later_is_sent_once_for_each_step(tmp_path):
    def lines(*records):
        return [Record(step, {}, is_late=is_late).to_line() for step, is_late in records]

    first, second = Fake(), Fake()
    for fake, records in (
        (first, [(0, False), (1, False), (0, True), (2, False)]),
        (second, [(1, False), (0, True), (2, False), (1, True), (3, False), (3, True)]),
    ):
        service = Service(tracked_run(tmp_path), "fake", lambda run, fake=fake: fake, lambda **event: None)
        service.serve(lines(*records))
    assert first.got == [0, 1, 0, 2, "stopped"]
    assert second.got == [1, 3, 3, "stopped"]


def test_a_step_that_a_tracker_did_not_take_is_sent_after_a_resume(tmp_path):
    serve_steps(tmp_path, lambda run: Fake(fails_at=[2, 3]), range(4), end=False)
    second = Fake()
    serve_steps(tmp_path, lambda run: second, range(1, 4))
    assert second.got == [2, 3, "finished"]


def test_failures_are_told_once_and_without_credentials(tmp_path, capsys):
    fake = Fake(fails_at=[1, 2])
    told = serve_steps(tmp_path, lambda run: fake, range(4))
    assert told == [{"url": fake.url}, {"failure": "ConnectionError: step 1: https://***@host is away"}]
    assert fake.got == [0, 3, "finished"]
    assert "did not take: 2" in capsys.readouterr().err


def test_what_else_a_tracker_says_is_passed_over_in_pieces(tmp_path, caplog):
    lines = ["x" * 10**6 + "[" * 10**5, "3", json.dumps({"url": 3}), json.dumps({"failure": "full"})]
    (tmp_path / "said").write_text("\n".join(lines) + "\n")
    said = str(tmp_path / "said")
    told = tracker(tmp_path, f"print(open({said!r}).read(), flush=True); [0 for line in __import__('sys').stdin]")
    close_all([told], is_finished=True)
    assert [record.message.split(": ")[1].split(". ")[0] for record in caplog.records] == ["full"]


def test_a_tracker_that_cannot_be_opened_is_not_asked_again_at_once(tmp_path):
    attempts = []

    def refuse(run):
        attempts.append(run.id)
        raise OSError("no network")

    told = serve_steps(tmp_path, refuse, range(50))
    assert attempts == ["a1"]
    assert told == [{"failure": "OSError: no network"}]


def test_a_record_survives_its_way_to_the_tracker():
    record = Record(
        3, {"a/b": float("inf")}, {"c/d": Histogram(0.0, 2.0, (1, 2))}, (Example("p", "\u2028", "g", True),), True
    )
    assert Record.from_line(record.to_line()) == record
    assert record.to_line().count("\n") == 1


def test_a_new_run_gets_a_new_identity_and_a_resumed_one_keeps_it(tmp_path):
    first = run_id_in(tmp_path, is_new=True)
    assert run_id_in(tmp_path, is_new=False) == first
    assert run_id_in(tmp_path, is_new=True) != first
    assert run_id_in(tmp_path / "earlier_version", is_new=False)


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    (tmp_path / "absent_tracker").mkdir()  # As wandb makes one of its name in the working folder.
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_packages(["json"]) is None
    assert "pip install 'dapo_mega[absent_tracker]'" in missing_packages(["json", "absent_tracker"])
