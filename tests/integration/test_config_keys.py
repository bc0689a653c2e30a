"""Every key of a configuration is read by a run, or it is listed here with what reads it instead."""

import ast
from pathlib import Path

import pytest
import yaml

import dapo_mega
from dapo_mega.config import RunConfig, Section, SftConfig, load_config
from dapo_mega.planning.dry_run import print_dry_run
from dapo_mega.training.run import run_training
from dapo_mega.training.sft import run_sft

from .runs import prepare

pytestmark = pytest.mark.integration

# Dotted beginnings of keys -> when they are read, or why never.
OF_OTHER_LAYOUTS = {
    "compute.fp8.amax_history": "with FP8",
    "compute.fp8.bf16_layers_at_ends": "with FP8",
    "compute.fp8.format": "with FP8",
    "compute.moe.": "with a mixture of experts",
    "compute.optimizer_offload": "on a GPU",
    "compute.recompute_layers": "with compute.recompute=full",
    "model.architecture": "by a dry run where the model is not",
}
OF_TRACKERS = dict.fromkeys(
    ("tracking.project", "tracking.run_name", "tracking.entity", "tracking.offline", "tracking.mlflow_uri",
     "tracking.trackio_space", "tracking.close_limit_s"),
    "with tracking.backends",
)  # fmt: skip
NOT_READ_BY_A_RUN = {
    **OF_OTHER_LAYOUTS,
    **OF_TRACKERS,
    "algorithm.gae_": "with algorithm.advantage=gae",
    "critic.": "with algorithm.advantage=gae",
    "algorithm.preset": "while the file is read: it fills in other keys",
    "data.evaluation.columns.response": "by supervised fine-tuning",
    "data.sampling.curriculum_epochs": "with data.sampling.order=curriculum",
    "data.sampling.easiest": "with data.sampling.order=curriculum",
    "data.sampling.floor": "with data.sampling.order=prioritised",
    "data.sampling.stages": "with data.sampling.order=curriculum",
    "data.train.columns.response": "by supervised fine-tuning",
    "evaluation.engines": "with evaluation.beside_training",
    "evaluation.limit_s": "with evaluation.beside_training",
    "reward.call_": "with reward.function",
    "reward.memory_limit_mib": "with reward.function",
    "reward.retries": "with reward.function",
    "rollout.engine_tolerance": "with engines of a fleet",
    "rollout.fleet.": "with engines of a fleet",
    "rollout.max_attempts": "with engines of a fleet: the embedded engine does not fail single requests",
    "weight_sync.folder": "with engines of a fleet",
    "weight_sync.full_every": "with engines of a fleet",
    "weight_sync.in_flight": "with engines of a fleet",
    "weight_sync.pause": "with engines of a fleet",
    "weight_sync.relays": "with engines of a fleet",
    "weight_sync.timeout_s": "with engines of a fleet",
    "weight_sync.transport": "with engines of a fleet",
}
NOT_READ_BY_FINE_TUNING = {
    **OF_OTHER_LAYOUTS,
    **OF_TRACKERS,
    "data.train.columns.data_source": "by a run: demonstrations have no reward",
    "data.train.columns.difficulty": "by a run: demonstrations are shuffled",
    "data.train.columns.extra": "by a run: demonstrations have no reward",
    "data.train.columns.ground_truth": "by a run: demonstrations are imitated, not judged",
    "data.train.deduplicate": "by a run: a prompt may have several demonstrations",
    "data.train.ground_truth_style": "by a run: demonstrations are imitated, not judged",
    "data.train.several_answers": "by a run: demonstrations are imitated, not judged",
    "tracking.histograms_every": "by a run: they are of responses",
    "tracking.samples_per_evaluation": "by a run: fine-tuning evaluates nothing",
    "tracking.timeline": "by a run: fine-tuning has no engines",
}


@pytest.fixture
def reads(monkeypatch):
    """`reads(config)` returns a set that gets the dotted name of every key of it that is read from then on."""
    names, seen = {}, set()
    original = Section.__getattribute__

    def recording(section, key):
        if id(section) in names and key in type(section).model_fields:
            seen.add(names[id(section)] + key)
        return original(section, key)

    def follow(config):
        for key, value in vars(config).items():
            if isinstance(value, Section):
                names[id(value)] = names[id(config)] + key + "."
                follow(value)

    def begin(config):
        names[id(config)] = ""
        follow(config)
        return seen

    monkeypatch.setattr(Section, "__getattribute__", recording)
    return begin


def keys_of(config, prefix=""):
    for key, value in vars(config).items():
        yield from keys_of(value, f"{prefix}{key}.") if isinstance(value, Section) else [prefix + key]


def attributes_in_the_package():
    """Names that code outside of the configuration reads from something."""
    package = Path(dapo_mega.__file__).parent
    for file in package.rglob("*.py"):
        if file.relative_to(package).parts[0] != "config":
            yield from (n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute))


def assert_all_read(config, seen, listed):
    unread = set(keys_of(config)) - seen
    unexpected = sorted(key for key in unread if not key.startswith(tuple(listed)))
    assert not unexpected, f"read by nothing here: {', '.join(unexpected)}"
    superfluous = sorted(name for name in listed if not any(key.startswith(name) for key in unread))
    assert not superfluous, f"listed, and read all the same: {', '.join(superfluous)}"
    attributes = set(attributes_in_the_package())
    dead = sorted(key for key in unread - {"algorithm.preset"} if key.split(".")[-1] not in attributes)
    assert not dead, f"listed, but no code reads an attribute of this name: {', '.join(dead)}"


def distinct(config):
    """Equal, with no section in two places."""
    return type(config).model_validate(config.model_dump())


def test_a_run_reads_every_key(tmp_path, reads):
    overrides = [
        "num_steps=2", "evaluation.every=2", "checkpoint.every=1", "algorithm.kl.coefficient=0.01",
        "algorithm.importance_cap=2", "reward.source=verifier", "reward.length_weight=0.1",
        "algorithm.dynamic_sampling=false",
    ]  # fmt: skip
    config = distinct(load_config(RunConfig, prepare(tmp_path), overrides))
    seen = reads(config)
    print_dry_run(config)
    run_training(config)
    assert_all_read(config, seen, NOT_READ_BY_A_RUN)


def test_fine_tuning_reads_every_key(tmp_path, reads):
    prepare(tmp_path)
    values = {
        "output_dir": str(tmp_path / "tuned"),
        "num_steps": 1,
        "batch_samples": 4,
        "tokens_per_microbatch": 512,
        "model": {"path": str(tmp_path / "model"), "dtype": "fp32"},
        "data": {"train": {"path": str(tmp_path / "data" / "demonstrations.parquet")}, "max_tokens": 512},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(values))
    config = distinct(load_config(SftConfig, tmp_path / "sft.yaml"))
    seen = reads(config)
    run_sft(config)
    assert_all_read(config, seen, NOT_READ_BY_FINE_TUNING)
