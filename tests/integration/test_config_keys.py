"""Every key of a configuration is read by a run, or it is listed here with what reads it instead."""

import ast
import json
from pathlib import Path

import pytest
import yaml

import dapo_mega
from dapo_mega.config import RunConfig, Section, SftConfig, load_config
from dapo_mega.config.base import differences
from dapo_mega.megatron.trained_model import TrainedModel
from dapo_mega.metrics import read_metrics
from dapo_mega.planning.dry_run import print_dry_run
from dapo_mega.training.run import run_training
from dapo_mega.training.sft import run_sft
from tests.unit.checkpoints.test_store import in_effect

from .runs import prepare
from .test_changes_at_resume import CHANGED_DATA, CHANGES
from .test_fleet_changes_at_resume import CHANGES as FLEET_CHANGES

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


HELD = "unit/rollout/test_collector.py::test_held_groups_that_changed_settings_would_not_make_are_left_out"

# Another value of every key that a resume may change, by itself (FREE) or with accept_changes, and that this run reads.
CHANGED = {
    "num_steps": 3, "silence_limit_s": 70, "model.layer_implementation": "local",
    "compute.fused_output_layer": False, "compute.recompute": "full", "compute.recompute_layers": 2,
    "compute.overlap_grad_reduce": True, "compute.overlap_param_gather": True, "optimizer.learning_rate": 2e-3,
    "optimizer.warmup_steps": 2, "optimizer.weight_decay": 0.2, "optimizer.beta1": 0.8, "optimizer.beta2": 0.99,
    "optimizer.epsilon": 1e-7, "optimizer.clip_grad": 0.5, "optimizer.schedule": "linear",
    "optimizer.max_skipped_updates": 2, "checkpoint.every": 3, "checkpoint.keep_last": 1, "checkpoint.keep_every": 3,
    "checkpoint.asynchronous": False, "checkpoint.hf_every": 2, "checkpoint.grace_s": 20,
    "checkpoint.save_hf_at_end": False,
    "tracking.histograms_every": 2, "tracking.timeline": False, "tracking.samples_per_evaluation": 1,
    "data.sampling.order": "prioritised", "data.sampling.floor": 0.2, "data.sampling.retire_after": 5,
    "data.evaluation.max_rows": 4, "data.max_prompt_tokens": 17, "data.long_prompts": "drop",
    "rollout.temperature": 0.9, "rollout.top_p": 0.99, "rollout.top_k": 50, "rollout.max_response_tokens": 11,
    "rollout.max_batch_rows": 8, "rollout.mismatch_warning": 0.3, "rollout.mismatch_stop": 5.0,
    "reward.correct": 0.9, "reward.incorrect": -0.9, "reward.overlong_cache_tokens": 3,
    "reward.overlong_filtering": True, "reward.length_weight": 0.2, "reward.length_phase_in": [0, 2],
    "reward.max_failed_share": 0.2, "algorithm.advantage": "group_mean", "algorithm.normalize_advantages": True,
    "algorithm.aggregation": "sequence_mean_token_mean", "algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3,
    "algorithm.dual_clip": 5.0, "algorithm.max_generation_rounds": 9, "algorithm.max_staleness": 1,
    "algorithm.entropy_coefficient": 0.001, "algorithm.entropy_target": 9.0, "algorithm.entropy_step": 0.001,
    "algorithm.entropy_max": 0.004, "algorithm.importance_cap": 3.0, "algorithm.importance_level": "sequence",
    "algorithm.token_mask": [0.1, 5.0], "algorithm.sequence_mask": [0.1, 5.0], "algorithm.kl.coefficient": 0.02,
    "algorithm.kl.estimator": "k2", "batch.groups_per_step": 4, "batch.group_size": 6, "batch.generation_groups": 5,
    "batch.mini_batch_groups": 2, "batch.epochs": 2, "batch.tokens_per_microbatch": 96, "evaluation.every": 2,
    "evaluation.at_end": True, "evaluation.samples_per_prompt": 3, "evaluation.temperature": 0.8,
    "evaluation.top_p": 0.9, "evaluation.top_k": 40, "weight_sync.bucket_mib": 1.0, "samples.groups_per_step": 2,
    "samples.max_gib": 1.0,
}  # fmt: skip
# Beginnings of keys -> the test that changes them at a resume and sees the effect, beside test_changes_at_resume.py.
ELSEWHERE = {
    "algorithm.dynamic_sampling_on": HELD,
    "algorithm.score_threshold": HELD,
    "compute.fp8.": "te_cpu/emulated/test_checkpoints.py::test_changed_fp8_and_layers_take_effect_at_a_resume",
    "compute.optimizer_offload": "te_cpu/emulated/test_devices.py::"
    "test_a_changed_share_of_offloading_takes_effect_at_a_resume",
    "model.layer_implementation": "te_cpu/emulated/test_checkpoints.py::"
    "test_changed_fp8_and_layers_take_effect_at_a_resume",
    "optimizer.": "unit/checkpoints/test_store.py::test_a_changed_setting_of_the_optimizer_takes_effect_at_a_resume",
    "parallel.": "integration/test_resume.py::test_resuming_in_another_layout_continues_with_the_same_data_and_loss",
    "reward.components": HELD,
    "reward.numeric_tolerance": HELD,
    "reward.time_limit_s": HELD,
    "seed": "unit/test_config.py::test_a_resume_with_another_seed_is_not_told_to_accept_what_cannot_be_accepted",
    "weight_sync.full_every": "integration/test_fleet.py::"
    "test_engines_that_got_only_changes_hold_the_whole_new_weights",
    "weight_sync.relays": "integration/test_fleet.py::"
    "test_a_killed_trainer_finds_its_engines_and_has_each_group_and_evaluation_once",
    "tracking.": "unit/training/test_tracking.py::test_a_changed_key_reaches_the_trackers_of_a_run_that_continues",
}
# Beginnings of keys that no test changes at a resume -> why.
NOT_CHANGED = {
    "algorithm.preset": "while the file is read: it fills in other keys",
    "data.evaluation": "unset or set: its keys are changed",
    "data.mixture": "the keys of each dataset are those of data.train; names are in the checkpoint: refused",
    "data.train.columns.response": "by supervised fine-tuning",
    "evaluation.at_start": "before the first step alone",
    "model.architecture": "by a dry run where the model is not",
    "output_dir": "says where the checkpoint is",
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


def test_a_resume_reads_every_changed_key(tmp_path, reads):
    """Configurations are immutable: what is read after the start is the new value. What a checkpoint could put in its
    place is held by optimizer, schedule, entropy bonus, sampler and buffer, whose unit tests change it."""
    file = prepare(tmp_path)
    before = distinct(load_config(RunConfig, file, ["num_steps=1", "algorithm.kl.coefficient=0.01"]))
    changed = {*CHANGED, *CHANGED_DATA, *FLEET_CHANGES, *(key for changes in CHANGES.values() for key in changes)}
    listed = (*ELSEWHERE, *NOT_CHANGED)
    unknown = [key for key in keys_of(before) if key not in changed and not key.startswith(listed)]
    assert not unknown, f"say here what changes at a resume, and to what: {', '.join(unknown)}"
    for key, place in ELSEWHERE.items():
        file_name, _, test = place.partition("::")
        text = (Path(__file__).parents[1] / file_name).read_text()
        assert f"def {test}(" in text, place
        assert key.rstrip(".").split(".")[-1] in text, f"{file_name} does not name {key}"
    run_training(before)
    overrides = [f"{key}={json.dumps(value)}" for key, value in CHANGED.items()]
    config = distinct(load_config(RunConfig, file, overrides))
    same = sorted(set(CHANGED) - set(differences(before, config)))
    assert not same, f"as before: {', '.join(same)}"
    seen = reads(config)
    run_training(config, accept_changes=True)
    unread = sorted(set(CHANGED) - seen)
    assert not unread, f"a resume does not read {', '.join(unread)}"
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    # Step 2 has updates 5 to 8 of a warm-up of 8, step 3 what falls: 4/5, 3/5, 2/5 and 1/5.
    rates = [record["policy/learning_rate"] for record in records if record["step"]]
    assert rates[1:] == pytest.approx([2e-3 * 13 / 16, 2e-3 / 2])
    assert "evaluation/k" in records[2]
    assert records[2]["evaluation/k"] == 3
    assert records[2]["buffer/staleness_max"] == 0, "groups of another size are not held"


def test_fine_tuning_reads_every_key(tmp_path, reads, monkeypatch):
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
    assert_changes_of_the_optimizer_take_effect(tmp_path, monkeypatch)


def assert_changes_of_the_optimizer_take_effect(tmp_path, monkeypatch):
    """Where fine-tuning resumes; what each setting does is shown in unit/checkpoints/test_store.py."""
    models, load = [], TrainedModel.load_optimizer
    monkeypatch.setattr(TrainedModel, "load_optimizer", lambda self, *given: (models.append(self), load(self, *given)))
    changes = {key: value for key, value in CHANGED.items() if key.startswith("optimizer.")}
    overrides = ["num_steps=2", *(f"{key}={value}" for key, value in changes.items())]
    run_sft(load_config(SftConfig, tmp_path / "sft.yaml", overrides), accept_changes=True)
    (model,) = models
    wanted = {key.partition(".")[2]: value for key, value in changes.items() if "skipped" not in key}
    assert in_effect(model) == wanted
    overrides = ["num_steps=3", f"output_dir={tmp_path / 'overflown'}", "optimizer.learning_rate=1e30"]
    overrides += ["optimizer.warmup_steps=0", "optimizer.max_skipped_updates=2"]
    run_sft(load_config(SftConfig, tmp_path / "sft.yaml", overrides))
    records = read_metrics(tmp_path / "overflown" / "metrics.jsonl")
    assert [record["policy/skipped_update_share"] for record in records] == [0, 1, 1]
