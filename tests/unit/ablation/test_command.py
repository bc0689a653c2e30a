"""The arguments of `dapo-mega ablate`, by the plan that it prints."""

import pytest

from dapo_mega.ablation.arms import LADDER, METHODS
from dapo_mega.commands import ablate

from .fake_runs import base_file, plan_of, train


def planned(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["dapo-mega ablate", "--dry-run", *map(str, arguments)])
    ablate.main()
    return capsys.readouterr().out


def test_without_rows_and_methods_everything_is_compared(tmp_path, monkeypatch, capsys):
    common = ("--config", base_file(tmp_path), "--output-dir", tmp_path / "out", "--seeds", "0", "1")
    arms = {
        (): len(LADDER) + len(METHODS),
        ("--rows",): len(LADDER),
        ("--methods",): len(METHODS),
        ("--rows", "clip_higher", "--methods", "grpo", "rloo"): 3,
    }
    for names, number in arms.items():
        text = planned(monkeypatch, capsys, *common, *names)
        assert f"{2 * number} runs (arms: {number}, seeds: 2) of 4 steps in {tmp_path / 'out'}\n" in text, names
    assert not (tmp_path / "out").exists()


def test_overrides_may_stand_anywhere_and_finished_runs_are_counted(tmp_path, monkeypatch, capsys):
    first, second, _ = plan_of(tmp_path, "num_steps=3", rows=("naive_grpo",), seeds=(0, 1, 2)).runs
    train(first)
    train(second, steps=1, state="failed", exit_status=3)
    places = ("--config", tmp_path / "run.yaml", "--output-dir", tmp_path / "out")
    text = planned(monkeypatch, capsys, "--seeds", "0", "1", "2", "num_steps=3", "--rows", "naive_grpo", *places)
    assert "3 runs (arms: 1, seeds: 3) of 3 steps" in text
    assert text.endswith("1 of 3 runs are finished, 1 starved\n")


def test_an_argument_that_is_no_override_is_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as left:
        planned(monkeypatch, capsys, "num_steps")
    assert left.value.code == 2
    assert "unknown argument 'num_steps'; overrides are of the form section.key=value" in capsys.readouterr().err
