"""Runs in wandb, MLflow and Trackio, with the real packages: written offline, resumed, and read back.

The packages are taken from this environment, or from the folder that DAPO_MEGA_TRACKERS names
(tools/install_trackers.sh makes one); without them the tests are skipped.
"""

import contextlib
import importlib
import json
import os
import sqlite3
import struct
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dapo_mega.config import SftConfig
from dapo_mega.metrics import Example, Histogram
from dapo_mega.metrics.trackers import missing_packages
from dapo_mega.training.run_records import open_writer

pytestmark = pytest.mark.integration

BACKENDS = ("wandb", "mlflow", "trackio")


def tracker_packages():
    """The folder in which the trackers are installed beside this environment; None if it is not given."""
    folder = os.environ.get("DAPO_MEGA_TRACKERS")
    return next(Path(folder).glob("lib/python3*/site-packages"), None) if folder else None


@pytest.fixture(scope="module")
def packages():
    """Lets this process and the trackers' processes import the trackers."""
    with pytest.MonkeyPatch.context() as patch:
        if folder := tracker_packages():
            patch.syspath_prepend(folder)
            patch.setenv("PYTHONPATH", str(folder))
        if missing := missing_packages(BACKENDS):
            pytest.skip(f"{missing}; or run tools/install_trackers.sh and set DAPO_MEGA_TRACKERS to its folder")
        for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def folder(packages, tmp_path_factory):
    """A run that all trackers get: steps 0 to 3, stopped; then continued from step 2 to 5, and finished. What belongs
    to steps 1 and 4 comes late. The continued run has another name."""
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.chdir(folder)  # MLflow keeps files of local runs in the working folder.
        config = SftConfig.model_validate(
            {
                "output_dir": str(folder / "mine"),
                "num_steps": 6,
                "model": {"path": "https://user:secret@host/model"},
                "data": {"train": {"path": "data.parquet"}},
                "tracking": {"backends": BACKENDS, "project": "tests", "offline": True, "close_limit_s": 240},
            }
        )
        stopped = open_writer(config, 0)
        record(stopped, range(4), is_second=False)
        stopped.close(is_finished=False)
        tracking = config.tracking.model_copy(update={"run_name": "renamed"})
        continued = open_writer(config.model_copy(update={"tracking": tracking}), 2)
        continued.write(2, {"policy/loss": 2.5})
        continued.add(1, {"evaluation/late": 0.125})
        record(continued, range(3, 6), is_second=True)
        continued.add(4, {"evaluation/late": 0.25})
        continued.close(is_finished=True)
        logs = {name: (folder / "mine" / "tracking" / f"{name}.log").read_text() for name in BACKENDS}
        assert not [name for name, log in logs.items() if "Traceback" in log or "did not take" in log], logs
        yield folder


def record(writer, steps, *, is_second):
    for step in steps:
        examples = [Example("1+1=", "<b>3", "2", False)] if step == 3 else []
        metrics = {"policy/loss": step + (0.5 if is_second else 0.0), "evaluation/pass@1": float("nan")}
        writer.write(step, metrics, {"rollout/reward": Histogram(0.0, 2.0, (step, 1))}, examples)


EXPECTED = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5)]
"""Every step once; those that were recorded before the stop as they were then."""
LATE = [(1, 0.125), (4, 0.25)]


def test_the_packages_break_nothing_in_the_environment():
    extra = tracker_packages()
    if extra is None:
        pytest.skip("DAPO_MEGA_TRACKERS is not set: the trackers, if any, are in this environment")
    installed = {}
    for found in distributions(path=[str(extra), *sys.path]):
        installed.setdefault(canonicalize_name(found.metadata["Name"]), found)  # The trackers' versions come first.
    brought = {canonicalize_name(found.metadata["Name"]) for found in distributions(path=[str(extra)])}
    refused = []
    for name, found in sorted(installed.items()):
        for wanted in map(Requirement, found.requires or ()):
            needed = canonicalize_name(wanted.name)
            if needed not in brought or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            if not wanted.specifier.contains(installed[needed].version, prereleases=True):
                refused.append(f"{name} needs {wanted}, the trackers bring {installed[needed].version}")
    assert not refused, refused


def wandb_records(path):
    """The records of a .wandb file: pieces in blocks of 32 KiB, each with checksum, length and kind before it."""
    protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, position, joined = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        joined += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # Whole, or last piece.
            yield protocol.Record.FromString(joined)
            joined = b""


def test_wandb_has_one_run_with_each_step_once(folder):
    (identity,) = {json.loads((folder / "mine" / "tracking" / "run.json").read_text())["id"]}
    files = sorted((folder / "mine" / "tracking" / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime)
    runs, rows, exits, texts = [], [], [], ""
    for path in files:
        for found in wandb_records(path):
            texts += str(found.run.config) + str(found.config)
            if found.HasField("run"):
                runs.append((found.run.run_id, found.run.display_name, found.run.project))
            if found.HasField("history"):
                row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in found.history.item}
                rows.append((found.history.step.num, row))
            if found.HasField("exit"):
                exits.append(found.exit.exit_code)
    assert list(dict.fromkeys(runs)) == [(identity, "mine", "tests"), (identity, "renamed", "tests")]
    assert [(step, row["policy/loss"]) for step, row in rows if "policy/loss" in row] == EXPECTED
    late = [(row["evaluation_step"], row["evaluation/late"]) for _, row in rows if "evaluation/late" in row]
    assert late == LATE
    assert rows[-1][1]["rollout/reward/values"] == [5, 1], rows[-1]
    assert [step for step, row in rows if any(name.startswith("samples/") for name in row)] == [3]
    assert exits == [1, 0]
    assert "learning_rate" in texts
    assert "secret" not in texts


def test_mlflow_has_one_run_with_each_step_once(folder):
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:  # Importing mlflow takes seconds.
        runs = database.execute("select name, status from runs").fetchall()
        losses = "select step, value from metrics where key = 'policy/loss' order by step"
        history = database.execute(losses).fetchall()
        late = database.execute(losses.replace("policy/loss", "evaluation/late")).fetchall()
        names = {name for (name,) in database.execute("select key from metrics")}
        params = dict(database.execute("select key, value from params").fetchall())
    assert runs == [("renamed", "FINISHED")]
    assert history == EXPECTED
    assert late == LATE
    assert names == {"policy/loss", "evaluation/pass_at_1", "evaluation/late"}
    assert params["optimizer.learning_rate"] == "1e-05"
    (sample,) = (folder / "mlruns").rglob("evaluation_step_*.md")
    assert "<b>3" in sample.read_text()
    (config,) = (folder / "mlruns").rglob("config.json")
    assert "secret" not in config.read_text()


def test_trackio_has_one_run_with_each_step_once(folder, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    trackio = importlib.import_module("trackio")
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    (run,) = trackio.Api().runs("tests")
    rows = storage.get_logs("tests", run.name)
    assert [(row["step"], row["policy/loss"]) for row in rows if "policy/loss" in row] == EXPECTED
    assert [(row["step"], row["evaluation/late"]) for row in rows if "evaluation/late" in row] == LATE
    assert next(row for row in rows if row["step"] == 5)["rollout/reward"]["values"] == [5, 1]
    assert [row["step"] for row in rows if "samples/evaluation" in row] == [3]
    assert run.config["optimizer"]["learning_rate"] == 1e-5
    assert "secret" not in str(run.config)
