"""`status.json` says what a run's end leaves behind, whoever writes it."""

import json
import os
import threading

import pytest

from dapo_mega import cli as commands
from dapo_mega.checkpoints.folders import CheckpointFolders
from dapo_mega.config import RunConfig
from dapo_mega.training.process_watch import ProcessWatch
from dapo_mega.training.run import run_training


class Left(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def leaving(monkeypatch):
    def end(status):
        raise Left(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(commands, "_leaving", threading.Lock())
    monkeypatch.setattr(commands, "_before_leaving", [])


@pytest.mark.usefixtures("leaving")
def test_a_process_that_fails_with_a_peer_records_the_last_saved_step(tmp_path, monkeypatch):
    folders = CheckpointFolders(tmp_path / "checkpoints", keep_last=2, keep_every=None)
    folders.begin(7)
    (folders.partial(7) / "loop.json").write_text("{}")
    folders.complete(7)
    monkeypatch.setattr(ProcessWatch, "follow_peers", lambda *_, **__: commands.leave("a peer has failed", 2))
    config = RunConfig.model_validate(
        {"output_dir": str(tmp_path), "num_steps": 9, "model": {"path": "m"}, "data": {"train": {"path": "d"}}}
    )
    with pytest.raises(Left):
        run_training(config)
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 7
