"""`dapo-mega rehearse` of every shipped file for GPUs, with as many layers as the pipeline has chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dapo_mega.commands import rehearse
from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import InputError
from dapo_mega.rehearsal import report
from dapo_mega.rehearsal.run import rehearse_run

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(file for file in CONFIGS.glob("*.yaml") if "architecture:" in file.read_text())


def shallow(file: Path, folder: Path, **changes: object) -> RunConfig:
    """The run with a model of as few layers as its pipeline takes, which needs no more than a config.json."""
    config = load_config(RunConfig, file, ["model.path=elsewhere"])
    sizes = json.loads(Path(str(config.model.architecture)).read_text())
    depth = max(2, config.parallel.num_chunks)
    (folder / "sizes.json").write_text(
        json.dumps({**sizes, "num_hidden_layers": depth, "max_window_layers": depth, **changes})
    )
    return load_config(RunConfig, file, ["model.path=elsewhere", f"model.architecture={folder / 'sizes.json'}"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_run_meets_and_is_what_was_planned(file, tmp_path):
    config = shallow(file, tmp_path)
    world_size = config.parallel.world_size or 1
    rehearsal = rehearse_run(config, world_size, 75 * 2**30)
    assert rehearsal.disagreements() == []
    for rank, played in rehearsal.played.items():
        stage = rehearsal.roles.place(rank)[3]
        assert played.always == pytest.approx(report.planned_always(rehearsal, stage), rel=0.001)
        # On the last stage context ranks have unequal parts of the prompts, not scored; the plan is their mean.
        is_even = stage < config.parallel.pipeline - 1 or config.parallel.context == 1
        for phase, flops in report.planned_flops(rehearsal, stage).items() if is_even else ():
            assert played.flops[phase] == pytest.approx(flops, rel=0.0001)
    for name, (found, planned) in report.traffic(rehearsal).items():
        assert found == pytest.approx(planned, rel=0.01), name


def test_what_does_not_divide_or_fit_is_said_in_one_line(tmp_path, capsys):
    file = CONFIGS / "gsm8k-qwen2.5-0.5b-1gpu.yaml"
    config = shallow(file, tmp_path)
    given = [str(file), "model.path=elsewhere", f"model.architecture={config.model.architecture}"]
    with pytest.raises(InputError, match="num_attention_heads=14"):
        rehearse.main([*given, "parallel.tensor=4", "parallel.world_size=4"])
    capsys.readouterr()
    rehearse.main([*given, "--gpu-memory-gib", "5.5"])
    assert "DOES NOT FIT" in capsys.readouterr().out
