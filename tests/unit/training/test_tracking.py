"""What trackers are told of a run, and what is refused before it starts."""

import json

import pytest
import yaml

from dapo_mega.config import RunConfig, SftConfig, TrackingConfig, load_config
from dapo_mega.config.files import validated
from dapo_mega.errors import InputError
from dapo_mega.training import lifecycle, run_records
from dapo_mega.training.run import run_training
from dapo_mega.training.run_records import run_description

MODEL = {
    "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48, "vocab_size": 40, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    values = {
        "output_dir": str(tmp_path / "run"),
        "num_steps": 3,
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": {"path": "https://user:hidden@host/train.jsonl"}},
        "tracking": {"backends": "wandb"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return load_config(RunConfig, tmp_path / "run.yaml", ["optimizer.learning_rate=2e-6"])


def test_a_run_with_a_missing_tracker_ends_before_anything_is_written(config, tmp_path, monkeypatch):
    monkeypatch.setattr(lifecycle, "missing_packages", lambda backends: f"{backends[0]} is missing")
    with pytest.raises(InputError, match="wandb is missing"):
        run_training(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run.yaml"]


def test_a_run_is_described_by_what_decides_it_and_without_secrets(config):
    described = run_description(config)
    assert described.name == "run"
    assert described.hyper_parameters["optimizer.learning_rate"] == 2e-6
    assert described.hyper_parameters["algorithm.dynamic_sampling"] is True
    free = {"output_dir", "num_steps", "tracking.project", "checkpoint.every"}
    assert not free & described.hyper_parameters.keys()
    assert described.versions.keys() >= {"python", "torch"}
    assert "learning_rate: 2.0e-06" in described.config_text
    assert "hidden" not in str(described)


CHANGED = {
    "project": "other", "run_name": "renamed", "entity": "team", "offline": True, "mlflow_uri": "sqlite:///other.db",
    "trackio_space": "me/space", "close_limit_s": 5.0,
}  # fmt: skip


@pytest.mark.parametrize("kind", [RunConfig, SftConfig])
def test_a_changed_key_reaches_the_trackers_of_a_run_that_continues(config, monkeypatch, kind):
    started = []
    shared = {"output_dir", "num_steps", "model", "data", "tracking"}
    config = kind.model_validate(config.model_dump(include=shared, exclude_unset=True))
    monkeypatch.setattr(run_records, "BackgroundTracker", lambda name, run, hidden: started.append((name, run)))
    described = run_description(config)
    run_records.open_trackers(config, described, is_new=True)
    ((_, before),) = started
    for key, value in CHANGED.items():
        tracking = config.tracking.model_copy(update={"backends": ("wandb", "mlflow", "trackio"), key: value})
        started.clear()
        run_records.open_trackers(config.model_copy(update={"tracking": tracking}), described, is_new=False)
        assert [name for name, _ in started] == ["wandb", "mlflow", "trackio"]
        field = "name" if key == "run_name" else key
        for _, run in started:
            assert run.id == before.id
            assert getattr(run, field) == value != getattr(before, field), key


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mlflow_uri": "https://me:pw@host"}, "MLFLOW_TRACKING_USERNAME"),
        ({"offline": True, "mlflow_uri": "http://host"}, "tracking.offline=true"),
        ({"offline": True, "trackio_space": "me/space"}, "tracking.offline=true"),
        ({"backends": ["wandb", "wandb"]}, "names a tracker twice"),
        ({"backends": ["comet"]}, "'wandb', 'mlflow' or 'trackio'"),
        ({"project": "a/b"}, "project"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(given, said):
    with pytest.raises(InputError) as refused:
        validated(TrackingConfig, given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "pw" not in str(refused.value)
