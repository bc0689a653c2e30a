"""Kill -9 and resume equals no interruption (property 6); the layout may change in between."""

import pytest
from safetensors.torch import load_file

from dapo_mega.metrics import read_metrics

from .runs import decisive, finish, kill_when, prepare, start, steps_done

pytestmark = [pytest.mark.integration, pytest.mark.distributed]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume with spaces")
    return folder, prepare(folder)


@pytest.fixture(scope="module")
def uninterrupted(task):
    folder, config = task
    output = folder / "uninterrupted"
    finish(start(config, 2, output), output)
    return output


def test_the_runs_compared_here_use_buffer_and_surplus(uninterrupted):
    records = read_metrics(uninterrupted / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(7))
    assert max(record.get("buffer/size", 0) for record in records) > 0
    assert max(record.get("buffer/staleness_max", 0) for record in records) >= 1
    assert all(record["policy/grad_norm"] > 0 for record in records[1:])
    # One step trains on surplus alone; it is measured by a probe.
    assert any(record["rollout/generation_rounds"] == 0 for record in records[1:])
    assert all(record["rollout/logprob_abs_diff_max"] < 1e-4 for record in records[1:])
    assert all("evaluation/avg_at_k" in records[step] for step in (0, 3, 6))


@pytest.mark.parametrize("moment", ["between checkpoints", "while a checkpoint is written"])
def test_killed_and_resumed_equals_uninterrupted(task, uninterrupted, moment):
    folder, config = task
    output = folder / moment.replace(" ", "_")
    moments = {
        "between checkpoints": lambda: steps_done(output) >= 3,
        "while a checkpoint is written": lambda: (output / "checkpoints" / ".step_00000004.partial").is_dir(),
    }
    kill_when(start(config, 2, output), moments[moment])
    assert 3 <= steps_done(output) < 6
    finish(start(config, 2, output), output)
    expected = read_metrics(uninterrupted / "metrics.jsonl")
    got = read_metrics(output / "metrics.jsonl")
    assert [record["step"] for record in got] == list(range(7))
    for before, after in zip(expected, got, strict=True):
        assert decisive(after) == decisive(before), f"step {before['step']}"
    final, reference = (load_file(run / "hf" / "model.safetensors") for run in (output, uninterrupted))
    assert all((final[name] == tensor).all() for name, tensor in reference.items())
    assert not list((output / "checkpoints").glob(".*partial"))


def test_a_finished_run_is_left_as_it_is(task, uninterrupted):
    _, config = task
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()}
    finish(start(config, 2, uninterrupted), uninterrupted)
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("dimension", ["tensor", "pipeline", "context"])
def test_resuming_in_another_layout_continues_with_the_same_data_and_loss(task, uninterrupted, dimension):
    folder, config = task
    output = folder / f"from_{dimension}"
    kill_when(start(config, 2, output, f"parallel.{dimension}=2"), lambda: steps_done(output) >= 3)
    finish(start(config, 2, output), output)
    expected = read_metrics(uninterrupted / "metrics.jsonl")
    got = read_metrics(output / "metrics.jsonl")
    for before, after in zip(expected, got, strict=True):
        for name in ("rollout/tokens", "rollout/accuracy_mean", "groups/kept_share", "buffer/size"):
            assert after.get(name) == before.get(name), (name, before["step"])
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert after.get(name, 0) == pytest.approx(before.get(name, 0), rel=1e-4, abs=1e-6), (name, before["step"])
        if after["step"] > 0:
            assert after["rollout/logprob_abs_diff_max"] < 1e-4
