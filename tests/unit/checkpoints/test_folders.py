"""Only complete checkpoints count, and rotation keeps what it should."""

import json
import os
import shutil
from pathlib import Path

import pytest

from dapo_mega.checkpoints.folders import CheckpointFolders, find_changed_bytes, read_manifest, write_manifest


def begin(folders, step):
    folders.begin(step)
    partial = folders.partial(step)
    (partial / "loop.json").write_text(f'{{"step": {step}}}')
    (partial / "__0_0.distcp").write_bytes(b"x" * 100)


def write(folders, *steps):
    for step in steps:
        begin(folders, step)
        folders.complete(step)


def names(folders):
    return sorted(path.name for path in folders.root.iterdir())


def test_the_last_and_every_so_many_are_kept(tmp_path):
    folders = CheckpointFolders(tmp_path, keep_last=2, keep_every=4)
    write(folders, *range(1, 12))
    assert names(folders) == ["latest", "step_00000004", "step_00000008", "step_00000010", "step_00000011"]
    assert (tmp_path / "latest").read_text() == "step_00000011"


def test_an_unfinished_checkpoint_is_never_the_newest_and_goes_later(tmp_path):
    folders = CheckpointFolders(tmp_path, keep_last=2, keep_every=None)
    write(folders, 1)
    folders.begin(2)
    assert folders.latest().name == "step_00000001"
    assert not folders.skipped()
    write(folders, 3)
    assert names(folders) == ["latest", "step_00000001", "step_00000003"]


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES = {
    "__0_0.distcp has 99 of 100 bytes": lambda folder: cut(folder / "__0_0.distcp"),
    "loop.json has": lambda folder: cut(folder / "loop.json"),
    "loop.json is missing": lambda folder: (folder / "loop.json").unlink(),
    "manifest.json is cut off": lambda folder: cut(folder / "manifest.json"),
    "manifest.json is missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json lists no files": lambda folder: (folder / "manifest.json").write_text("[1]"),
    "manifest.json lists no files ": lambda folder: (folder / "manifest.json").write_text("null"),
    "manifest.json lists no files  ": lambda folder: (folder / "manifest.json").write_text("{}"),
    "neither size nor checksum of loop.json": lambda folder: (folder / "manifest.json").write_text(
        '{"loop.json": [3]}'
    ),
    "manifest.json": lambda folder: (folder / "manifest.json").write_bytes(b"\xff" * 9),
    "manifest.json maximum recursion": lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
}


@pytest.mark.parametrize("problem", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_by_name_and_reason(tmp_path, problem):
    folders = CheckpointFolders(tmp_path, keep_last=3, keep_every=None)
    write(folders, 2, 4, 6)
    DAMAGES[problem](tmp_path / "step_00000006")
    assert folders.latest().name == "step_00000004"
    (sentence,) = folders.skipped()
    assert "step_00000006" in sentence
    assert problem.strip() in sentence


def test_changed_bytes_are_found_by_checksum(tmp_path):
    folders = CheckpointFolders(tmp_path, keep_last=3, keep_every=None)
    write(folders, 2)
    file = tmp_path / "step_00000002" / "__0_0.distcp"
    file.write_bytes(b"x" * 50 + b"y" + b"x" * 49)
    assert folders.latest().name == "step_00000002"
    names = list(read_manifest(file.parent))
    assert "__0_0.distcp has a wrong checksum" in find_changed_bytes(file.parent, names)
    assert find_changed_bytes(file.parent, ["loop.json"]) is None
    file.write_bytes(b"x" * 100)
    assert find_changed_bytes(file.parent, names) is None


def test_a_checkpoint_without_checksums_counts_as_it_did(tmp_path):
    folders = CheckpointFolders(tmp_path, keep_last=3, keep_every=None)
    write(folders, 2)
    folder = tmp_path / "step_00000002"
    sizes = {name: record.size for name, record in read_manifest(folder).items()}
    (folder / "manifest.json").write_text(json.dumps(sizes, indent=1))
    assert folders.latest() == folder
    assert find_changed_bytes(folder, list(sizes)) is None


@pytest.mark.parametrize(("keep_last", "before", "passed_over"), [(1, [2, 4], [4]), (2, [10, 12, 14], [12, 14])])
def test_a_new_checkpoint_never_goes_for_newer_ones_that_were_passed_over(tmp_path, keep_last, before, passed_over):
    """Their sizes are right, so that they count as complete; the run went on from the one before them."""
    folders = CheckpointFolders(tmp_path, keep_last, keep_every=None)
    for step in before:
        begin(folders, step)
        folders.partial(step).rename(tmp_path / f"step_{step:08d}")
        write_manifest(tmp_path / f"step_{step:08d}")
    for step in passed_over:
        (tmp_path / f"step_{step:08d}" / "__0_0.distcp").write_bytes(b"y" * 100)
    step = min(passed_over) - 1
    write(folders, step)
    intact = [s for s in [*before, step] if s not in passed_over and (tmp_path / f"step_{s:08d}").is_dir()]
    assert sorted(intact)[-keep_last:] == sorted({*before, step} - set(passed_over))[-keep_last:]


@pytest.mark.parametrize("name", ["latest", "step_00000004"])
def test_what_stands_in_the_way_is_replaced(tmp_path, name):
    folders = CheckpointFolders(tmp_path, keep_last=3, keep_every=None)
    write(folders, 2)
    if name == "latest":
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("a file")
    assert folders.latest().name == "step_00000002"
    write(folders, 4)
    assert folders.latest().name == "step_00000004"
    assert (tmp_path / "latest").read_text() == "step_00000004"


def test_rotation_counts_complete_checkpoints_only(tmp_path):
    folders = CheckpointFolders(tmp_path, keep_last=2, keep_every=None)
    write(folders, 2, 4)
    DAMAGES["loop.json is missing"](tmp_path / "step_00000004")
    write(folders, 6)
    assert names(folders) == ["latest", "step_00000002", "step_00000004", "step_00000006"]
    write(folders, 8)
    assert names(folders) == ["latest", "step_00000006", "step_00000008"]


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
    folders = CheckpointFolders(tmp_path, keep_last=2, keep_every=None)
    write(folders, 2, 4)
    DAMAGES["loop.json is missing"](tmp_path / "step_00000004")
    write(folders, 4)
    assert folders.latest().name == "step_00000004"
    assert not folders.skipped()


def test_the_newest_is_taken_where_latest_names_a_missing_folder(tmp_path):
    folders = CheckpointFolders(tmp_path, keep_last=2, keep_every=None)
    write(folders, 2, 4)
    (tmp_path / "step_00000004").rename(tmp_path / "elsewhere")
    assert folders.latest().name == "step_00000002"
    (sentence,) = folders.skipped()
    assert "latest names step_00000004, which does not exist" in sentence


@pytest.mark.parametrize(
    ("crash_before", "newest"),
    [
        ("manifest", "step_00000001"),
        ("rename", "step_00000001"),
        ("latest", "step_00000002"),
        ("removal", "step_00000002"),
    ],
)
def test_a_crash_at_any_moment_leaves_a_complete_checkpoint(tmp_path, monkeypatch, crash_before, newest):
    folders = CheckpointFolders(tmp_path, keep_last=1, keep_every=None)
    write(folders, 1)
    begin(folders, 2)
    operations = iter(["manifest", "rename", "latest", "removal"])

    def crashing(function):
        def call(*arguments):
            if next(operations) == crash_before:
                raise InterruptedError
            return function(*arguments)

        return call

    with monkeypatch.context() as machine:
        machine.setattr(os, "replace", crashing(os.replace))
        machine.setattr(Path, "rename", crashing(Path.rename))
        machine.setattr(shutil, "rmtree", crashing(shutil.rmtree))
        with pytest.raises(InterruptedError):
            folders.complete(2)
    assert folders.latest().name == newest
    write(folders, 3)
    assert names(folders) == ["latest", "step_00000003"]


def test_without_any_checkpoint_there_is_no_newest(tmp_path):
    folders = CheckpointFolders(tmp_path / "none", keep_last=2, keep_every=None)
    assert folders.latest() is None
    assert not folders.skipped()
