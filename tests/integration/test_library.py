"""The public face: a run step by step is a run, the page's examples run, and the names stay."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dapo_mega
from dapo_mega.errors import InputError
from dapo_mega.training.run import run_training

from .runs import REPOSITORY, prepare

pytestmark = pytest.mark.integration

PAGE = REPOSITORY / "dapo_mega" / "library.md"
CLOCKED = ("time/", "weight_sync/", "timeline/")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("library"))


def values(run):
    """All metrics of a run but those of clocks."""
    table = dapo_mega.read_metrics(run)
    names = [n for n in table.column_names if not n.startswith(CLOCKED) and "_per_s" not in n]
    return table.select(names).to_pylist()


def test_the_names_are_these_and_importing_them_loads_no_torch():
    assert dapo_mega.__all__ == ["Run", "grade", "load", "read_metrics", "read_samples"]
    assert [type(getattr(dapo_mega, name)).__name__ for name in dapo_mega.__all__] == ["type", *["function"] * 4]
    code = "import sys, dapo_mega; dapo_mega.load; dapo_mega.Run; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert found.stdout == "False\n", found.stderr
    with pytest.raises(AttributeError, match="it has Run, grade"):
        _ = dapo_mega.train


def test_a_run_step_by_step_and_in_two_parts_is_the_run_to_the_bit(file, tmp_path):
    run_training(dapo_mega.load(file, f"output_dir={tmp_path / 'whole'}", "num_steps=4"))
    config = dapo_mega.load(str(file), f"output_dir={tmp_path / 'parts'}", "num_steps=4", "checkpoint.every=0")
    with dapo_mega.Run(config) as run:
        assert run.collect() is run.collect()
        run.learn(run.collect())
        run.learn()
        run.trainer.export(tmp_path / "exported")
        assert (tmp_path / "exported" / "model.safetensors").is_file()
        assert (run.trainer.logprobs(np.arange(5, dtype=np.int32)) < 0).tolist() == [True] * 4
        run.collect()  # And left alone: the run that continues collects them.
    with pytest.raises(InputError, match="this Run is not open"):
        run.collect()

    async def cell():
        """As in a notebook, whose kernel runs an event loop in the same thread."""
        with dapo_mega.Run(config) as run:
            assert run.step == 2
            run.train()
            with pytest.raises(InputError, match="all 4 steps are done"):
                run.collect()

    asyncio.run(cell())
    assert (tmp_path / "parts" / "hf" / "config.json").is_file()
    assert values(tmp_path / "parts") == values(tmp_path / "whole")


def test_an_interrupt_saves_the_last_whole_step(file, tmp_path):
    config = dapo_mega.load(file, f"output_dir={tmp_path / 'run'}", "num_steps=4", "checkpoint.every=0")
    try:
        with dapo_mega.Run(config) as run:
            run.learn()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    with dapo_mega.Run(config) as run:
        assert run.step == 1


def test_what_one_process_cannot_do_is_refused(file, tmp_path):
    with pytest.raises(InputError, match=r"parallel\.world_size=2 needs as many processes"):
        dapo_mega.Run(dapo_mega.load(file, f"output_dir={tmp_path / 'run'}", "parallel.world_size=2")).__enter__()
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="does not exist; give the folder of a run"):
        dapo_mega.read_metrics(tmp_path)


def test_the_examples_of_the_page_run(file, monkeypatch, capsys):
    monkeypatch.chdir(file.parent)
    names = {"dapo_mega": dapo_mega}
    examples = re.findall(r"tests/integration/test_library.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        exec(example, names)
    assert names["run"].step == 3 if names["run"]._run else True
    assert names["metrics"]["step"].to_pylist()[-1] == 3
    assert len(names["samples"]) >= 24
    assert len(dapo_mega.read_samples("whole")) > len(names["samples"])
    assert len(max(examples, key=len).splitlines()) <= 30
    assert "policy/loss" in capsys.readouterr().out
    assert Path("whole", "hf").is_dir()
