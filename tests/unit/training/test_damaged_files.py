"""Files of a run that say what happened cannot stop its next start, whatever has become of them."""

import contextlib
import os
import random
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dapo_mega.config import RunConfig, load_config
from dapo_mega.config.files import validated
from dapo_mega.errors import InputError
from dapo_mega.metrics import read_metrics, tensorboard
from dapo_mega.metrics.jsonl import drop_from_step, encode_line
from dapo_mega.metrics.tensorboard import TensorBoardLog
from dapo_mega.metrics.timeline.file import TimelineWriter, read_timeline
from dapo_mega.metrics.timeline.records import Span, StepTimeline
from dapo_mega.metrics.trackers import LastStep, run_id_in
from dapo_mega.samples.files import discard_after, file_of, stored_files, write_table
from dapo_mega.training import run_lock, run_records
from dapo_mega.training.evaluation_beside import is_recorded
from dapo_mega.training.resume import refuse_changes
from dapo_mega.training.run_lock import RunLock, is_locked
from dapo_mega.training.run_records import write_run_record
from dapo_mega.training.run_status import RunStatus

STEPS = range(4)


def metrics(folder, config, steps):
    drop_from_step(folder / "metrics.jsonl", steps[0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(encode_line(step, {"a/b": 1.0}) for step in steps)
    found = [record["step"] for record in read_metrics(folder / "metrics.jsonl")]
    assert found[-len(steps) :] == list(steps)
    assert is_recorded(str(folder), 1) is False


def timeline(folder, config, steps):
    writer = TimelineWriter(Path(config.output_dir), steps[0])
    for step in steps:
        writer.write(StepTimeline(step, 10.0 * step, 10.0 * step + 5, {"trainer": [Span("update", 1, 2)]}, [], {}))
    assert [record.step for record in read_timeline(folder / "timeline.jsonl")][-len(steps) :] == list(steps)


def events(folder, config, steps):
    log = TensorBoardLog(folder / "tensorboard", steps[0])
    for step in steps:
        log.write(step, {"a/b": 1.0}, {}, {})
    log.close()
    accumulator = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in accumulator.Scalars("a/b")][-len(steps) :] == list(steps)


def trackers(folder, config, steps):
    run_id = run_id_in(folder / "tracking", is_new=not steps[0])
    last = LastStep(folder / "tracking" / "wandb.json", run_id)
    last.set(steps[-1], is_late=False)
    assert run_id_in(folder / "tracking", is_new=False) == run_id
    assert LastStep(folder / "tracking" / "wandb.json", run_id).has(steps[-1], is_late=False)


def status(folder, config, steps):
    RunStatus(folder).is_finished()
    RunStatus(folder).finished()
    assert RunStatus(folder).is_finished()


def record(folder, config, steps):
    with contextlib.suppress(InputError):  # A value that reads as another one is a change.
        refuse_changes(config, folder)
    write_run_record(config, {})
    assert load_config(RunConfig, folder / "config.yaml") == config


def samples(folder, config, steps):
    discard_after(folder / "samples", steps[0] - 1)
    for step in steps:
        write_table(file_of(folder / "samples", "training", step), pa.table({"step": [step]}))
    assert [file.step for file in stored_files(folder / "samples")][-len(steps) :] == list(steps)


FILES = {
    "metrics.jsonl": metrics,
    "timeline.jsonl": timeline,
    "tensorboard": events,
    "tensorboard/events.out.tfevents.*": events,
    "tracking": trackers,
    "tracking/run.json": trackers,
    "tracking/wandb.json": trackers,
    "status.json": status,
    "config.yaml": record,
    "samples": samples,
    "samples/step_00000001.parquet": samples,
    "samples/step_00000003.parquet": samples,
}
"""What is damaged, and the part of a start that reads or writes it."""
UNREAD = {"status.json", *(name for name in FILES if name.endswith(".parquet"))}
"""Of these a start does not keep what they hold."""


def flipped(content, seed):
    changed = bytearray(content)
    places = random.Random(seed)
    for _ in range(3):
        changed[places.randrange(len(changed))] ^= places.randrange(1, 256)
    return bytes(changed)


DAMAGES = {
    "one wrong byte": lambda content: content[: len(content) // 2] + b"\xff" + content[len(content) // 2 + 1 :],
    "cut off": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "of another kind": lambda content: b"[1, 2]\n" * 5,
    "deeply nested": lambda content: b"[" * 100_000 + b"\n" + content,
    "too large a number": lambda content: (
        b'{"id": 1, "last_step": "x", "step": 0, "a/b": 1' + b"0" * 400 + b"}\n" + content
    ),
    **{f"flipped {seed}": lambda content, seed=seed: flipped(content, seed) for seed in range(4)},
}
CERTAIN = ("one wrong byte", "zeros", "deeply nested")
"""Nothing can be read where these hit."""
OTHERS = ["a folder", "a link to nothing", "a FIFO", "not writable"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard.time, "sleep", lambda seconds: None)  # The next event file's name comes later.
    monkeypatch.setattr(run_records, "package_versions", dict)
    values = {"output_dir": str(tmp_path / "run"), "num_steps": 9, "model": {"path": "/model"}}
    return validated(RunConfig, values | {"data": {"train": {"path": "/train.jsonl"}}})


def kinds_of_damage(path):
    if path.is_dir():
        return ["a file", "a link to nothing"]
    return [*CERTAIN, *OTHERS] if path.suffix == ".yaml" else [*DAMAGES, *OTHERS]  # YAML is slow.


def damage(path, kind):
    content = path.read_bytes() if path.is_file() else b"samples"
    if kind == "not writable":
        return content
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    match kind:
        case "a folder":
            (path / "inside").mkdir(parents=True)
        case "a link to nothing":
            path.symlink_to("nothing")
        case "a FIFO":
            os.mkfifo(path)
        case "a file":
            path.write_bytes(content)
        case _:
            path.write_bytes(DAMAGES[kind](content))
    return path.read_bytes() if path.is_file() else b""


def test_no_damaged_file_of_a_run_stops_its_next_start(config, tmp_path, caplog, monkeypatch):
    folder, whole = Path(config.output_dir), tmp_path / "whole"
    folder.mkdir()
    for part in dict.fromkeys(FILES.values()):
        part(folder, config, STEPS)
    folder.rename(whole)
    for file in whole.glob("tensorboard/events.*"):  # Of the same second, number 10 would be read before number 9.
        file.rename(file.with_name(re.sub(r"tfevents\.\d+", "tfevents.1700000000", file.name)))
    wrong = []
    for pattern, part in FILES.items():
        name = str(next(whole.glob(pattern)).relative_to(whole))
        path = folder / name
        for kind in kinds_of_damage(whole / name):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            left = damage(path, kind)

            locked = path.stat().st_ino if kind == "not writable" else None  # Root can write everything.
            monkeypatch.setattr(os, "access", lambda at, mode, locked=locked: os.stat(at).st_ino != locked)
            caplog.clear()
            try:
                part(folder, config, range(3, 6))
            except Exception as error:  # Whatever stops a start is a fault.
                wrong.append((name, kind, repr(error)))
                continue
            kept = [*folder.rglob("*.damaged-*")]
            said = [message for message in caplog.messages if str(path) in message and "kept as" in message]
            if len(said) != len(kept) or len(kept) > 1:
                wrong.append((name, kind, kept, caplog.messages))
            if kept and kept[0].is_file() and kept[0].read_bytes() != left:
                wrong.append((name, kind, "another file is kept"))
            if not kept and (kind in OTHERS or (name not in UNREAD and kind in CERTAIN)):
                wrong.append((name, kind, "nothing is kept"))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_lock_that_is_none_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_SILENT_AFTER_S", 0.0)
    for kind in ("empty", "of another kind", "deeply nested", "a folder"):
        lock = tmp_path / "run.lock"
        lock.write_bytes(b"{}")
        damage(lock, kind)
        with RunLock(tmp_path, on_loss=lambda reason: None):
            assert is_locked(tmp_path), kind
        assert not lock.exists()
