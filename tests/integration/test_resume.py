"""Kill -9 and resume equals no interruption (property 6); the layout may change in between."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file

from dapo_mega.config import RunConfig, load_config
from dapo_mega.evaluation.held_out import evaluate_checkpoint
from dapo_mega.metrics import read_metrics
from dapo_mega.metrics.timeline.file import FILE_NAME, read_timeline
from tests.distributed.launching import REPOSITORY, run_script, start_workers, wait_for
from tests.distributed.tables import marked

from .runs import TRAIN, decisive, finish, kill_when, prepare, read_status, run_that_starts_again, start, steps_done

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

TUNE = REPOSITORY / "launch" / "train_sft.py"
DISTURBED = Path(__file__).with_name("disturbed_trainer.py")
EXPORTS = ("checkpoint.hf_every=3", "checkpoint.keep_last=1", "checkpoint.keep_every=4")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume with spaces")
    return folder, prepare(folder)


@pytest.fixture(scope="module")
def uninterrupted(task):
    folder, config = task
    output = folder / "uninterrupted"
    finish(start(config, 2, output, *EXPORTS), output)
    return output


def test_the_runs_compared_here_use_buffer_and_surplus(uninterrupted):
    records = read_metrics(uninterrupted / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(7))
    assert max(record.get("buffer/size", 0) for record in records) > 0
    assert max(record.get("buffer/staleness_max", 0) for record in records) >= 1
    assert all(record["policy/grad_norm"] > 0 for record in records[1:])
    # One step trains on surplus alone, which brings no response of the current weights to compare.
    for record in records[1:]:
        is_surplus = record["rollout/generation_rounds"] == 0
        assert ("rollout/logprob_abs_diff_max" in record) == (not is_surplus)
        assert is_surplus or record["rollout/logprob_abs_diff_max"] < 1e-4
    assert any(record["rollout/generation_rounds"] == 0 for record in records[1:])
    assert all("evaluation/avg_at_k" in records[step] for step in (0, 3, 6))


def log_of(output):
    """What the first process of the last start has printed."""
    return (output.parent / f"{output.name}_logs" / "rank_0.log").read_text()


def has_checkpoint(output):
    return (output / "checkpoints" / "step_00000002").is_dir()


def test_killed_in_a_checkpoint_and_resumed_equals_uninterrupted(task, uninterrupted, monkeypatch):
    folder, config = task
    output = folder / "killed"
    partial = output / "checkpoints" / ".step_00000004.partial"
    monkeypatch.setenv("DISTURBANCE", "waits after step 4")
    kill_when(start(config, 2, output, *EXPORTS, script=DISTURBED), lambda: any(partial.glob("*.distcp")))
    assert steps_done(output) == 4
    assert partial.is_dir()
    finish(start(config, 2, output, *EXPORTS), output)
    assert_equal_runs(uninterrupted, output)


@pytest.mark.whole_table  # tests/integration/test_fleet.py has torchrun start a killed run again.
def test_a_run_that_torchrun_starts_again_equals_uninterrupted(task, uninterrupted, monkeypatch):
    """Rank 0 is killed between checkpoints; torchrun keeps its store, with the addresses of the first attempt."""
    folder, config = task
    output = folder / "started again"
    monkeypatch.setenv("DISTURBANCE", "is killed after step 3")
    log = run_that_starts_again(DISTURBED, "--config", config, f"output_dir={output}", *EXPORTS)
    assert log.count("exitcode: -9") == 1, log
    assert read_status(output)["state"] == "finished"
    assert_equal_runs(uninterrupted, output)


@pytest.mark.parametrize("moment", ["some time", "after an update", "in the last evaluation"])
def test_a_run_continues_after_sigterm_as_if_nothing_had_happened(task, uninterrupted, monkeypatch, moment):
    """It reaches one process, which tells the others. The run ends with the status that asks to be continued."""
    folder, config = task
    output = folder / f"terminated {moment}"
    monkeypatch.setenv("DISTURBANCE", moment)
    # A run without an export at its end is finished when its last step is.
    overrides = [*EXPORTS, f"checkpoint.save_hf_at_end={str(moment != 'in the last evaluation').lower()}"]
    workers = start(config, 2, output, *overrides, script=DISTURBED)
    while moment == "some time" and steps_done(output) < 2:
        time.sleep(0.002)
        assert all(worker.exitcode is None for worker in workers)
    if moment == "some time":
        os.kill(workers[1].pid, signal.SIGTERM)
    assert wait_for(workers, 240, patience_s=60) == [75, 75]
    log = log_of(output)
    status = read_status(output)
    assert (status["state"], status["exit_status"], status["continue"]) == ("stopped", 75, True)
    assert status["step"] >= STOPPED_AFTER[moment]
    # The step that is saved was not recorded when its evaluation was still to come.
    if moment != "some time":
        assert status["step"] == STOPPED_AFTER[moment] == steps_done(output) + 1
    assert log.splitlines()[-1] == f"stopped: {status['message']}"
    assert (output / "checkpoints" / f"step_{status['step']:08d}").is_dir()
    assert not (output / "run.lock").exists()
    finish(start(config, 2, output, *overrides), output)
    assert_equal_runs(uninterrupted, output, has_final_export=moment != "in the last evaluation")


def test_a_controller_of_its_own_gives_the_same_run(task, uninterrupted):
    """SIGTERM reaches one of the trainer's processes, and its first process commands the rest of the run."""
    folder, config = task
    output = folder / "commanded from elsewhere"
    workers = start(config, 2, output, *EXPORTS, "controller.own_process=true")
    while steps_done(output) < 2:
        time.sleep(0.002)
        assert all(worker.exitcode is None for worker in workers)
    assert json.loads((output / "controller.json").read_text()).keys() == {"host", "port", "key"}
    assert (output / "controller.json").stat().st_mode & 0o077 == 0
    os.kill(workers[1].pid, signal.SIGTERM)
    assert wait_for(workers, 240, patience_s=60) == [75, 75]
    status = read_status(output)
    assert (status["state"], status["exit_status"], status["continue"]) == ("stopped", 75, True)
    finish(start(config, 2, output, *EXPORTS), output)
    assert_equal_runs(uninterrupted, output)


def test_a_controller_ends_when_the_trainer_with_its_engines_does(task):
    folder, config = task
    output = folder / "killed under a controller"
    workers = start(config, 2, output, "controller.own_process=true", "num_steps=100")
    kill_when(workers, lambda: steps_done(output) >= 1)
    assert read_status(output)["continue"]
    finish(start(config, 2, output, "controller.own_process=true", "num_steps=3", "--accept-changes"), output)


STOPPED_AFTER = {"some time": 2, "after an update": 3, "in the last evaluation": 6}


def assert_equal_runs(reference, output, has_final_export=True):
    expected, got = (read_metrics(run / "metrics.jsonl") for run in (reference, output))
    assert [record["step"] for record in got] == list(range(7))
    for before, after in zip(expected, got, strict=True):
        assert decisive(after) == decisive(before), f"step {before['step']}"
    assert_equal_samples(reference / "samples", output / "samples")
    recorded = [timeline.step for timeline in read_timeline(output / FILE_NAME)]
    assert recorded == [0, 1, 2, 3, 4, 5, 6, 6], "the checkpoint after the last step comes by itself"
    for export in ("hf_step_00000003", "hf_step_00000006", *(["hf"] if has_final_export else [])):
        final, wanted = (load_file(run / export / "model.safetensors") for run in (output, reference))
        assert all((final[name] == tensor).all() for name, tensor in wanted.items())
    kept = ["latest", "step_00000004", "step_00000006"]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == kept


def assert_equal_samples(reference, output):
    """Every step and evaluation is there once, and says the same of every response."""
    names = [f"evaluation_{step:08d}.parquet" for step in (0, 3, 6)]
    names += [f"step_{step:08d}.parquet" for step in range(1, 7)]
    assert sorted(path.name for path in output.iterdir()) == names
    for name in names:
        got, expected = pq.read_table(output / name), pq.read_table(reference / name)
        assert got.equals(expected, check_metadata=True), name


def replayed(run, step, world_size, folder):
    """All differences between a recorded step and its replay in so many processes, by section."""
    output = folder / f"replay of {step} in {world_size}"
    script = REPOSITORY / "tools" / "replay_step.py"
    arguments = [str(run), str(step), "--output", f"{output}.json"]
    finish(start_workers(script, world_size, arguments, folder / f"{output.name}_logs"), output)
    return json.loads(Path(f"{output}.json").read_text())


def test_a_recorded_step_is_replayed_to_the_same_bits(task, uninterrupted):
    """Step 6 from the checkpoint of step 4, so through step 5."""
    found = replayed(uninterrupted, 6, 2, task[0])
    assert [d for differences in found.values() for d in differences if d["num_different"]] == []
    assert {d["name"] for d in found["metrics"]} > {"policy/loss", "policy/grad_norm", "mismatch/kl"}
    assert {d["name"] for d in found["earlier"]} > {"policy/loss of step 5"}
    assert {d["name"] for d in found["updates"]} > {"policy/grad_norm of update 1", "policy/grad_norm of update 2"}
    assert {d["name"]: d["num_values"] > 20 for d in found["tokens"]} == dict.fromkeys(
        ["log-probs at the step's start", "log-probs in the last update", "ratios in the last update", "advantages"],
        True,
    )


def test_a_step_is_replayed_in_another_layout_within_rounding(task, uninterrupted):
    found = replayed(uninterrupted, 1, 1, task[0])
    everything = [d for differences in found.values() for d in differences]
    assert len(everything) > 40
    assert max(d["excess"] for d in everything) <= 1, everything


def test_an_evaluation_outside_of_the_run_writes_the_same_responses(task, uninterrupted):
    """Of the model that the run began with."""
    folder, config = task
    evaluate_checkpoint(load_config(RunConfig, config), folder / "judged")
    got, expected = (
        pq.read_table(run / "samples" / "evaluation_00000000.parquet") for run in (folder / "judged", uninterrupted)
    )
    for column in ("response", "correct", "reward", "prompt", "token_ids", "request_id"):
        assert got[column].equals(expected[column]), column


def test_exports_during_training_hold_the_weights_of_their_step(uninterrupted):
    half, whole, final = (
        load_file(uninterrupted / name / "model.safetensors") for name in ("hf_step_00000003", "hf_step_00000006", "hf")
    )
    assert all((whole[name] == tensor).all() for name, tensor in final.items())
    assert any((half[name] != tensor).any() for name, tensor in final.items())


@pytest.mark.parametrize("name", ["__0_1.distcp", "loop.npz", ".metadata"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(task, uninterrupted, name):
    """One byte has changed, and no file its size."""
    folder, config = task
    output = folder / "damaged"
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(uninterrupted, output)
    shutil.rmtree(output / "hf")
    file = output / "checkpoints" / "step_00000006" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)
    finish(start(config, 2, output, *EXPORTS), output)
    (warning,) = (line for line in log_of(output).splitlines() if "damaged checkpoint" in line)
    assert f"step_00000006 ({name} has a wrong checksum" in warning
    assert "continuing after step 4" in warning
    assert_equal_runs(uninterrupted, output)


@pytest.mark.parametrize("loss", ["gone", "damaged"])
def test_a_run_that_has_lost_its_checkpoints_keeps_its_records(task, uninterrupted, loss):
    folder, config = task
    output = folder / f"lost_{loss}"
    shutil.copytree(uninterrupted, output)
    shutil.rmtree(output / "hf")
    if loss == "gone":
        shutil.rmtree(output / "checkpoints")
    else:
        for manifest in output.glob("checkpoints/*/manifest.json"):
            (manifest.parent / "loop.npz").write_bytes(b"")
    records = {path: path.read_bytes() for path in output.rglob("*") if path.suffix in (".jsonl", ".parquet")}
    status, printed = run_script(TRAIN, ["--config", config, f"output_dir={output}"])
    assert status == 2, printed[-3000:]
    (error,) = (line for line in printed.splitlines() if line.startswith("error:"))
    assert "step_00000006" in error
    assert str(output / "last_checkpoint") in error
    assert {path: path.read_bytes() for path in records} == records


def test_a_finished_run_is_left_as_it_is(task, uninterrupted):
    _, config = task
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()}
    finish(start(config, 2, uninterrupted), uninterrupted)
    assert "already holds a finished run of 6 steps" in log_of(uninterrupted)
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()} == before


# That each layout continues from each other's checkpoints is shown by distributed/.
@pytest.mark.parametrize("dimension", marked(["tensor", "pipeline", "context"], ["pipeline", "context"]))
def test_resuming_in_another_layout_continues_with_the_same_data_and_loss(task, uninterrupted, monkeypatch, dimension):
    folder, config = task
    output = folder / f"from_{dimension}"
    monkeypatch.setenv("DISTURBANCE", "waits after step 3")
    workers = start(config, 2, output, f"parallel.{dimension}=2", script=DISTURBED)
    kill_when(workers, lambda: has_checkpoint(output) and steps_done(output) == 3)
    finish(start(config, 2, output), output)
    expected = read_metrics(uninterrupted / "metrics.jsonl")
    got = read_metrics(output / "metrics.jsonl")
    for before, after in zip(expected, got, strict=True):
        for name in ("rollout/tokens", "rollout/accuracy_mean", "groups/kept_share", "buffer/size"):
            assert after.get(name) == before.get(name), (name, before["step"])
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert after.get(name, 0) == pytest.approx(before.get(name, 0), rel=1e-4, abs=1e-6), (name, before["step"])
        if after["step"] > 0:
            assert after.get("rollout/logprob_abs_diff_max", 0) < 1e-4


def test_a_trainer_killed_within_trajectories_of_programs_equals_uninterrupted(task):
    folder, config = task
    values = yaml.safe_load(config.read_text())
    game = Path(__file__).with_name("soaked_game.py")
    values |= {
        "num_steps": 3,
        "environment": {"kind": "program", "command": f"{sys.executable} -S {game}", "max_turn_tokens": 4},
        "reward": {"components": [{"kind": "environment"}]},
        "checkpoint": {"every": 1, "save_hf_at_end": False},
        "evaluation": {},
    }
    values["algorithm"]["dynamic_sampling_on"] = "unequal_scores"
    values["rollout"]["max_response_tokens"] = 64
    (playing := folder / "playing").mkdir()
    (config := playing / "config.yaml").write_text(yaml.safe_dump(values))
    whole, parts = playing / "whole", playing / "parts"
    finish(start(config, 1, whole), whole)
    workers = start(config, 1, parts, "num_steps=4")
    while steps_done(parts) < 1:
        time.sleep(0.002)
        assert workers[0].exitcode is None
    (hold := playing / "hold").touch()
    kill_when(workers, (playing / "held").exists)
    hold.unlink()
    assert steps_done(parts) < 3
    finish(start(config, 1, parts), parts)
    got, expected = ([decisive(record) for record in read_metrics(run / "metrics.jsonl")] for run in (parts, whole))
    assert got == expected
    assert [record["step"] for record in got] == [1, 2, 3]
    for step in (1, 2, 3):
        file = Path("samples") / f"step_{step:08d}.parquet"
        rows, again = (pq.read_table(run / file).to_pylist() for run in (whole, parts))
        assert repr(again) == repr(rows)  # NaN is not equal to itself.
        assert {len(row["turns"]) for row in rows} == {4}


def test_fine_tuning_killed_and_stopped_equals_uninterrupted(task, monkeypatch):
    """kill -9 after step 3, SIGTERM after step 7, then to the end: the same data, metrics and bits."""
    folder, _ = task
    config = folder / "sft.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "output_dir": "replaced",
                "seed": 3,
                "num_steps": 12,
                "batch_samples": 24,  # Of 64 and 20 demonstrations: epochs end within batches.
                "tokens_per_microbatch": 128,
                "threads_per_process": 1,
                "model": {"path": str(folder / "model"), "dtype": "fp32"},
                "data": {
                    "max_tokens": 64,
                    "mixture": {
                        name: {"path": str(folder / "data" / "demonstrations.parquet"), "template": "as_is", **other}
                        for name, other in {"whole": {"weight": 2}, "begin": {"max_rows": 20}}.items()
                    },
                    "evaluation": {
                        "path": str(folder / "data" / "demonstrations.parquet"),
                        "template": "as_is",
                        "max_rows": 9,
                    },
                },
                "evaluation": {"every": 3, "keep_best": True},
                "optimizer": {"learning_rate": 1e-3, "warmup_steps": 3, "schedule": "cosine"},
                "checkpoint": {"every": 2},
            }
        )
    )
    reference, output = folder / "tuned", folder / "tuned_in_three_parts"
    finish(start(config, 2, reference, script=TUNE), reference)
    monkeypatch.setenv("FINE_TUNING", "")
    monkeypatch.setenv("DISTURBANCE", "waits after step 3")
    workers = start(config, 2, output, script=DISTURBED)
    kill_when(workers, lambda: has_checkpoint(output) and steps_done(output) == 3)
    monkeypatch.setenv("DISTURBANCE", "stops after step 7")
    assert wait_for(start(config, 2, output, script=DISTURBED), 240, patience_s=60) == [75, 75]
    stopped = read_status(output)
    assert (stopped["continue"], stopped["step"]) == (True, 7)
    finish(start(config, 2, output, script=TUNE), output)
    expected, got = (read_metrics(run / "metrics.jsonl") for run in (reference, output))
    assert [decisive(record) for record in got] == [decisive(record) for record in expected]
    assert [record["step"] for record in got] == list(range(1, 13))
    files = [(run / "hf" / "model.safetensors").read_bytes() for run in (output, reference)]
    assert files[0] == files[1]
    # Begun once more it is left as it is.
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    finish(start(config, 2, output, script=TUNE), output)
    assert "already holds a model fine-tuned for 12 steps" in log_of(output)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()} == before
    # Without its checkpoints it is not begun anew.
    for lost in ("checkpoints", "hf"):
        shutil.rmtree(output / lost)
    records = (output / "metrics.jsonl").read_bytes()
    assert wait_for(start(config, 2, output, script=TUNE), 240, patience_s=60) == [2, 2]
    (error,) = (line for line in log_of(output).splitlines() if "error:" in line)
    assert "step_00000012" in error
    assert str(output / "last_checkpoint") in error
    assert (output / "metrics.jsonl").read_bytes() == records
