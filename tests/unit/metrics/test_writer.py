import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dapo_mega.metrics import MetricsWriter, read_metrics


def scalars(log_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(log_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def records(log_dir: Path) -> list[tuple[float, float]]:
    return [(record["step"], record["policy/loss"]) for record in read_metrics(log_dir / "metrics.jsonl")]


def test_both_outputs_hold_each_step(tmp_path):
    with MetricsWriter(tmp_path / "new" / "run") as writer:
        writer.write(0, {"policy/loss": 0.5})
        writer.write(1, {"policy/loss": 0.25, "evaluation/avg_at_k": 0.75})
    assert records(tmp_path / "new" / "run") == [(0, 0.5), (1, 0.25)]
    assert scalars(tmp_path / "new" / "run", "policy/loss") == [(0, 0.5), (1, 0.25)]
    assert scalars(tmp_path / "new" / "run", "evaluation/avg_at_k") == [(1, 0.75)]


def test_a_resumed_run_has_each_step_once_in_both_outputs(tmp_path, caplog):
    with MetricsWriter(tmp_path) as writer:
        for step in range(6):
            writer.write(step, {"policy/loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "poli')
    with caplog.at_level(logging.INFO), MetricsWriter(tmp_path, start_step=3) as writer:
        for step in range(3, 5):
            writer.write(step, {"policy/loss": 100.0 + step})
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 103.0), (4, 104.0)]
    assert records(tmp_path) == expected
    assert scalars(tmp_path, "policy/loss") == expected
    (record,) = (record for record in caplog.records if "removed 3 records" in record.message)
    assert record.levelno == logging.INFO  # Every resume does so.


def test_records_are_on_disk_before_the_writer_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"policy/loss": 1.0})
    assert records(tmp_path) == [(0, 1.0)]
    assert scalars(tmp_path, "policy/loss") == [(0, 1.0)]
    writer.close()


def test_a_killed_process_loses_no_written_step_and_can_be_resumed(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from dapo_mega.metrics import MetricsWriter\n"
        "writer = MetricsWriter(Path(sys.argv[1]))\n"
        "for step in range(3): writer.write(step, {'policy/loss': float(step)})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(__file__).parents[3])
    process = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env={**os.environ, "PYTHONPATH": root}, timeout=120
    )
    assert process.returncode == -signal.SIGKILL
    assert records(tmp_path) == [(0, 0.0), (1, 1.0), (2, 2.0)]
    with MetricsWriter(tmp_path, start_step=2) as writer:
        writer.write(2, {"policy/loss": 9.0})
    assert records(tmp_path) == [(0, 0.0), (1, 1.0), (2, 9.0)]
    assert scalars(tmp_path, "policy/loss") == [(0, 0.0), (1, 1.0), (2, 9.0)]


def test_restarts_within_one_second_keep_their_order_in_tensorboard(tmp_path):
    for restart in range(3):
        with MetricsWriter(tmp_path, start_step=restart) as writer:
            writer.write(restart, {"policy/loss": float(restart)})
            writer.write(restart + 1, {"policy/loss": 100.0})
    seconds = [path.name.split(".")[3] for path in (tmp_path / "tensorboard").iterdir()]
    assert len(set(seconds)) == 3
    assert scalars(tmp_path, "policy/loss") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 100.0)]


def test_event_files_ahead_of_the_clock_are_warned_of_not_awaited(tmp_path, caplog):
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / f"events.out.tfevents.{int(time.time()) + 600}.other-host.1.0").touch()
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        MetricsWriter(tmp_path).close()
    assert time.monotonic() - start < 60
    assert "ahead of this machine's clock" in caplog.text


def test_non_finite_values_reach_both_outputs(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"policy/loss": math.nan, "policy/grad_norm": math.inf})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record["policy/loss"])
    assert record["policy/grad_norm"] == math.inf
    assert math.isnan(scalars(tmp_path, "policy/loss")[0][1])
    assert scalars(tmp_path, "policy/grad_norm") == [(0, math.inf)]


@pytest.mark.parametrize("step", [2, 4, 5])
def test_a_step_already_written_or_before_the_start_is_refused(tmp_path, step):
    with MetricsWriter(tmp_path, start_step=3) as writer:
        writer.write(5, {"policy/loss": 1.0})
        with pytest.raises(ValueError, match="next step is 6"):
            writer.write(step, {"policy/loss": 2.0})
    assert records(tmp_path) == [(5, 1.0)]


def test_only_a_step_that_is_written_can_be_added_to(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"policy/loss": 1.0})
        with pytest.raises(ValueError, match="step 1 is not written yet"):
            writer.add(1, {"evaluation/k": 2.0})
        writer.add(0, {"evaluation/k": 2.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "policy/loss": 1.0, "evaluation/k": 2.0}]


def test_a_malformed_name_is_refused_and_nothing_is_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="stage/name"):
            writer.write(0, {"policy/loss": 1.0, "step": 2.0})
        writer.write(0, {"policy/loss": 3.0})
    assert records(tmp_path) == [(0, 3.0)]
    assert scalars(tmp_path, "policy/loss") == [(0, 3.0)]


def test_a_negative_start_is_refused(tmp_path):
    with pytest.raises(ValueError, match="start_step"):
        MetricsWriter(tmp_path, start_step=-1)


def test_closing_twice_is_harmless_and_writing_afterwards_is_refused(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="cannot write step 0"):
        writer.write(0, {"policy/loss": 1.0})
