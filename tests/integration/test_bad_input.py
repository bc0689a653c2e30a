"""Bad input gets one line that says what, where and what to do; nothing is half-written."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import InputError
from dapo_mega.metrics import read_metrics
from dapo_mega.samples.table import account_of
from dapo_mega.training.run import run_training
from tests.distributed.launching import free_port, run_script, wait_for

from .runs import REPOSITORY, TRAIN, decisive, finish, prepare, read_status, start, steps_done

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad_input")
    return folder, prepare(folder)


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        (None, ["data.train.path=nowhere/train.parquet"], "nowhere/train.parquet"),
        (None, ["model.path=nowhere"], "model.path=.*nowhere does not exist"),
        (None, ["data.train.columns.prompt=question"], "question"),
        ([], [], "no rows"),
        ([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1" * 40 + "=", "answer": "2"}], [], "40|41"),
        ([{"prompt": "1+1=", "answer": "   "}], [], "ground"),
        (None, ["reward={source: verifier, function: nowhere.py:score}"], "nowhere.py:score: the file does not exist"),
        (
            None,
            ["reward={source: verifier, function: os.path:isfile}", "algorithm.dynamic_sampling_on=unequal_scores"],
            "tried on one",
        ),
        (None, ["parallel.tensor=3"], "parallel.tensor=3"),
        (None, ["parallel.tensor=2"], "start 2"),
        (None, ["parallel.world_size=4"], "4"),
        (None, ["rollout.max_response_tokens=600", "batch.tokens_per_microbatch=900"], "max_position_embeddings=512"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(task, tmp_path, monkeypatch, rows, overrides, message):
    _, config = task
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if rows is not None:
        path = write_rows(tmp_path / "rows.jsonl", rows)
        overrides = [f"data.train.path={path}", "data.train.columns.ground_truth=answer", *overrides]
    output = tmp_path / "output"
    with pytest.raises(InputError, match=message) as caught:
        run_training(load_config(RunConfig, config, [f"output_dir={output}", *overrides]))
    assert "\n" not in str(caught.value)
    assert not output.exists()


def test_the_command_prints_one_line_and_exits_with_2(task, tmp_path):
    _, config = task
    status, printed = run_script(TRAIN, ["--config", config, f"output_dir={tmp_path / 'o'}", "algorithm.clip_hi=1"])
    assert status == 2
    assert printed == "error: unknown key 'algorithm.clip_hi'; did you mean 'algorithm.policy_loss.high'?\n"


def test_starvation_ends_the_run_with_the_acceptance_rate(task, tmp_path):
    _, config = task
    # The verifier never accepts what random weights write: every group is all wrong.
    status, output = run_script(
        TRAIN,
        ["--config", config, f"output_dir={tmp_path / 'o'}", "reward.source=verifier",
         "algorithm.max_generation_rounds=2", "evaluation.at_start=false"],
    )  # fmt: skip
    assert status == 3
    lines = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "acceptance rate 0.0%" in lines[0]
    assert "after 2 generation rounds" in lines[0]
    groups = account_of(pq.read_metadata(tmp_path / "o" / "samples" / "step_00000001.parquet").metadata)["groups"]
    assert groups == {"all_wrong": 16}  # What the model said instead can be looked at.


def test_a_full_disk_leaves_the_previous_checkpoint_usable(task):
    folder, config = task
    output, reference = folder / "full_disk", folder / "reference"
    finish(start(config, 1, reference), reference)
    finish(start(config, 1, output, "num_steps=2"), output)
    before = sorted(p.name for p in (output / "checkpoints").iterdir())
    # A file-size limit makes the kernel refuse the checkpoint's files as a full disk would.
    workers = start(config, 1, output)
    resource.prlimit(workers[0].pid, resource.RLIMIT_FSIZE, (100 * 1024, 100 * 1024))
    assert wait_for(workers, 240) == [2]
    said = (folder / "full_disk_logs" / "rank_0.log").read_text()
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "cannot write the checkpoint step_00000004" in errors[0]
    assert sorted(p.name for p in (output / "checkpoints").iterdir()) == before
    finish(start(config, 1, output), output)
    assert steps_done(output) == 6
    for expected, got in zip(
        read_metrics(reference / "metrics.jsonl"), read_metrics(output / "metrics.jsonl"), strict=True
    ):
        got, expected = decisive(got), decisive(expected)
        # The run that stopped at step 2 as planned did not evaluate there; nothing else may differ.
        assert got == expected


def test_a_run_folder_of_another_configuration_is_refused(task):
    folder, config = task
    output = folder / "other_configuration"
    finish(start(config, 1, output, "num_steps=2"), output)
    status, said = run_script(TRAIN, ["--config", config, f"output_dir={output}", "algorithm.clip_high=0.4"])
    assert status == 2
    assert "algorithm.policy_loss.high: 0.28 -> 0.4" in said
    assert "--accept-changes" in said


def test_all_processes_leave_when_the_first_one_is_refused(task):
    """The training prompts changed: rank 0 alone notices, and both processes leave without a traceback of theirs."""
    folder, config = task
    output = folder / "other_data"
    values = yaml.safe_load(config.read_text())
    data = folder / "moving.parquet"
    shutil.copy(values["data"]["train"]["path"], data)
    finish(start(config, 2, output, "num_steps=2", f"data.train.path={data}"), output)
    before = {name: (output / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    shutil.copy(values["data"]["evaluation"]["path"], data)
    assert wait_for(start(config, 2, output, f"data.train.path={data}"), 240, patience_s=60) == [2, 2]
    logs = [(folder / "other_data_logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert not any("Traceback" in log for log in logs), logs
    errors = [line for log in logs for line in log.splitlines() if line.startswith("error:")]
    assert len(set(errors)) == 1
    assert "num_prompts=60, this run has 8" in errors[0] or "other training prompts" in errors[0]
    status = read_status(output)
    assert (status["state"], status["exit_status"], status["continue"], status["step"]) == ("failed", 2, False, 2)
    assert errors[0] == f"error: {status['message']}"
    assert {name: (output / name).read_bytes() for name in before} == before


REFUSED = """
from dapo_mega.cli import run_command
from dapo_mega.errors import InputError

def main():
    raise InputError("the prompts are others")

run_command(main)
"""


def test_under_torchrun_the_line_comes_last_and_the_status_is_kept(tmp_path):
    """torchrun's own report has the only traceback."""
    (script := tmp_path / "refused.py").write_text(REFUSED)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    result = subprocess.run(
        [sys.executable, *torchrun, str(script)], capture_output=True, text=True, timeout=240,
        env={**environment, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 1
    assert f'File "{script}"' not in result.stderr
    assert result.stderr.count("Traceback") <= 1, result.stderr
    assert "exitcode  : 2 " in result.stderr
    assert result.stderr.count("error: the prompts are others") == 2
    assert result.stderr.splitlines()[-1] == "error: the prompts are others"


@pytest.mark.parametrize(
    ("failure", "message", "exit_status"),
    [
        ("saving", "cannot write the checkpoint step_00000002.*No space left on device.*earlier checkpoints", 2),
        ("forward pass", "ArithmeticError: the first line; see the traceback", 1),
    ],
)
def test_no_process_waits_for_one_that_failed(task, monkeypatch, failure, message, exit_status):
    """torchrun is not there to end the others, as it is not for those of other machines."""
    folder, config = task
    output = folder / f"failure_in_{failure.replace(' ', '_')}"
    monkeypatch.setenv("DISTURBANCE", failure)
    script = Path(__file__).with_name("disturbed_trainer.py")
    statuses = wait_for(start(config, 2, output, script=script), 240, patience_s=60)
    logs = [log.read_text() for log in sorted((folder / f"{output.name}_logs").glob("*.log"))]
    assert statuses == [exit_status, exit_status], logs
    (error,) = (line for line in logs[0].splitlines() if line.startswith("error:"))
    assert re.search(message, error)
    assert logs[0].count("Traceback") == 0
    assert read_status(output)["exit_status"] == exit_status
    assert not (output / "run.lock").exists()


def test_a_run_killed_while_it_exports_is_exported_by_the_next_start(task):
    folder, config = task
    output = folder / "export"
    finish(start(config, 1, output, "num_steps=2"), output)
    expected = (output / "hf" / "model.safetensors").read_bytes()
    (output / "hf").rename(output / ".hf.partial")
    (output / ".hf.partial" / "part-7.safetensors").write_text("left by the killed process")
    finish(start(config, 1, output, "num_steps=2"), output)
    assert (output / "hf" / "model.safetensors").read_bytes() == expected
    assert not (output / "hf" / "part-7.safetensors").exists()


def test_a_trained_model_without_its_checkpoints_is_not_overwritten(task):
    folder, config = task
    output = folder / "no_checkpoints"
    finish(start(config, 1, output, "num_steps=2"), output)
    shutil.rmtree(output / "checkpoints")
    before = (output / "metrics.jsonl").read_bytes()
    status, said = run_script(TRAIN, ["--config", config, f"output_dir={output}"])
    assert status == 2
    assert "no checkpoint to continue from" in said
    assert (output / "metrics.jsonl").read_bytes() == before
