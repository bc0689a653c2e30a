"""A run whose trainer lends its memory to engines goes on and ends as one that keeps it."""

import json
from types import SimpleNamespace

import pytest

from dapo_mega.checkpoints.folders import CheckpointFolders
from dapo_mega.config import RunConfig
from dapo_mega.config.files import validated
from dapo_mega.errors import InputError, TrainerLost
from dapo_mega.library import Run
from dapo_mega.metrics.jsonl import encode_line
from dapo_mega.training import loop, recovery, run
from dapo_mega.training.run_status import RunStatus


class Trainer:
    def __init__(self, num_losses):
        self.num_losses = num_losses
        self.held = "nothing"

    def hold(self, held):
        if self.num_losses:
            self.num_losses -= 1
            raise TrainerLost("it died while engines generated")
        self.held = held


def test_a_trainer_that_died_while_it_had_lent_its_memory_is_waited_for(monkeypatch):
    asleep, brought = [], []
    training = SimpleNamespace(
        config=SimpleNamespace(rollout=SimpleNamespace(offload_trainer=True)),
        fleet=SimpleNamespace(sleep=lambda: asleep.append(True)),
        trainer=Trainer(num_losses=1),
        meet=lambda: None,
        step=3,
    )
    monkeypatch.setattr(recovery, "bring_back", brought.append)
    loop.take_turn(training)
    assert (asleep, brought, training.trainer.held) == ([True], [training], "all")
    training.trainer.num_losses = 1
    loop.lend_memory(training)  # At the run's end nobody waits for another.
    assert len(brought) == 1


def test_models_whose_memory_is_lent_are_not_given_to_a_notebook():
    opened = Run(SimpleNamespace())
    opened._run = SimpleNamespace(trainer=SimpleNamespace(is_lent=True))
    with pytest.raises(InputError, match="use them between `collect` and `learn`"):
        _ = opened.trainer
    opened._run.trainer.is_lent = False
    assert opened.trainer is opened._run.trainer


@pytest.mark.parametrize(("last_record", "is_complete"), [(1, False), (2, True)])
def test_a_run_is_finished_whose_last_checkpoint_came_before_its_record(tmp_path, last_record, is_complete, capsys):
    model, output = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    values = {"output_dir": str(output), "num_steps": 2, "model": {"path": str(model)}}
    values |= {"data": {"train": {"path": "train.jsonl"}}, "checkpoint": {"save_hf_at_end": False}}
    config = validated(RunConfig, values)
    store = CheckpointFolders(output / "checkpoints", keep_last=1)
    store.begin(2)
    (store.partial(2) / "loop.json").write_text(json.dumps({"unrecorded": {"policy/entropy": 1.0}}))
    store.complete(2)
    lines = [encode_line(step, {"a/b": 1.0}) for step in range(1, last_record + 1)]
    (output / "metrics.jsonl").write_text("".join(lines))
    assert run.is_finished(config, RunStatus(output), accept_changes=True) is is_complete
