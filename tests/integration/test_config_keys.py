"""Every key of a configuration is read by a run, or it is listed here with what reads it instead."""

import ast
import re
from pathlib import Path

import pytest
import yaml

import dapo_mega
from dapo_mega.config import Fp8Config, RunConfig, Section, SftConfig, TeacherConfig, load_config
from dapo_mega.config.base import section_in
from dapo_mega.config.choices import kinds_of
from dapo_mega.megatron.trained_model import TrainedModel
from dapo_mega.metrics import read_metrics
from dapo_mega.planning.dry_run import print_dry_run
from dapo_mega.training.run import run_training
from dapo_mega.training.sft import run_sft
from tests.unit.checkpoints.test_store import CHANGES as OPTIMIZER_CHANGES
from tests.unit.checkpoints.test_store import in_effect
from tests.unit.training.test_tracking import CHANGED as TRACKER_CHANGES

from .runs import prepare
from .test_changes_at_resume import CHANGED_DATA, CHANGES
from .test_fine_tuning import CHANGED_DATASET, MODEL_CHANGES
from .test_fine_tuning import CHANGES as FINE_TUNING_CHANGES
from .test_fine_tuning import REFUSED as REFUSED_ROWS
from .test_fleet_changes_at_resume import CHANGES as FLEET_CHANGES
from .test_record_changes_at_resume import CHANGES as RECORD_CHANGES
from .test_record_changes_at_resume import CHANGES_OF_BOTH, CHANGES_OF_FINE_TUNING, REFUSED_IN_FINE_TUNING

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
COLUMNS_OF_FINE_TUNING = ("response", "messages", "tools")  # And `rejected`, with the section dpo.
NOT_READ_BY_A_RUN = {
    **OF_OTHER_LAYOUTS,
    **OF_TRACKERS,
    "critic.": "with algorithm.advantage=gae",
    "algorithm.preset": "while the file is read: it fills in other keys",
    **{
        f"data.{dataset}.columns.{column}": "by supervised fine-tuning"
        for dataset in ("train", "evaluation")
        for column in (*COLUMNS_OF_FINE_TUNING, "rejected")
    },
    "evaluation.engines": "with evaluation.beside_training",
    "evaluation.limit_s": "with evaluation.beside_training",
    "reward.call_": "with reward.function",
    "reward.memory_limit_mib": "with reward.function",
    "reward.retries": "with reward.function",
    "rollout.engine_tolerance": "with engines of a fleet",
    "rollout.fleet.": "with engines of a fleet",
    "controller.host": "with a controller of its own",
    "controller.wait_limit_s": "with a controller of its own",
    "rollout.max_attempts": "with engines of a fleet: the embedded engine does not fail single requests",
    "weight_sync.folder": "with engines of a fleet",
    "weight_sync.full_every": "with engines of a fleet",
    "weight_sync.in_flight": "with engines of a fleet",
    "weight_sync.pause": "with engines of a fleet",
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
    "data.train.columns.rejected": "with the section dpo",
    "data.train.deduplicate": "by a run: a prompt may have several demonstrations",
    "data.train.ground_truth_style": "by a run: demonstrations are imitated, not judged",
    "data.train.several_answers": "by a run: demonstrations are imitated, not judged",
    "tracking.histograms_every": "by a run: they are of responses",
    "tracking.samples_per_evaluation": "by a run: fine-tuning evaluates nothing",
    "tracking.timeline": "by a run: fine-tuning has no engines",
}


HELD = "unit/rollout/test_collector.py::test_held_groups_that_changed_settings_would_not_make_are_left_out"

PARITY = "distributed/test_parallel_parity.py::test_a_{}_learns_the_same_under_every_layout"
LAYOUTS = "integration/test_resume.py::test_resuming_in_another_layout_continues_with_the_same_data_and_loss"
PROGRAMS = {
    "test_a_failure_is_no_number": ("program_limit_s", "memory_limit_mib", "retries"),
    "test_too_many_failures_end_the_run": ("max_failed_share",),
    "test_many_play_at_once_within_their_places": ("max_programs",),
    "test_a_command_that_is_not_there_and_a_port_that_is_taken_are_told": ("host", "port"),
    "test_its_folder_is_that_of_the_runs_file": ("command", "folder"),
}
# Keys -> the test that changes them at a resume and sees the effect, beside the modules imported here.
ELSEWHERE = {
    **dict.fromkeys(("algorithm.dynamic_sampling_on.kind", "algorithm.dynamic_sampling_on.threshold"), HELD),
    **dict.fromkeys(("reward.numeric_tolerance", "reward.time_limit_s"), HELD),
    **dict.fromkeys(
        ("model.layer_implementation", *(f"compute.fp8.{key}" for key in Fp8Config.model_fields)),
        "te_cpu/emulated/test_checkpoints.py::test_changed_fp8_and_layers_take_effect_at_a_resume",
    ),
    "model.train_mtp": "distributed/test_mtp.py::"
    "test_a_run_goes_on_to_the_bit_and_not_without_its_layer_of_multi_token_prediction",
    "compute.optimizer_offload": "te_cpu/emulated/test_devices.py::"
    "test_a_changed_share_of_offloading_takes_effect_at_a_resume",
    **dict.fromkeys(
        ("lora.rank", "lora.alpha", "lora.targets", "lora.dropout"),
        "numerics/test_lora.py::test_changed_adapters_take_effect_at_a_resume",
    ),
    "lora.send": "integration/test_lora_engines.py::test_an_engine_with_adapters_computes_what_the_trainer_does",
    "optimizer.max_skipped_updates": "integration/test_config_keys.py::assert_changes_of_the_optimizer_take_effect",
    **dict.fromkeys(("parallel.tensor", "parallel.pipeline", "parallel.context"), LAYOUTS),
    **dict.fromkeys(
        ("parallel.sequence", "parallel.virtual_pipeline", "parallel.pipeline_layout"), PARITY.format("dense_model")
    ),
    "parallel.expert": PARITY.format("mixture_of_experts"),
    "parallel.expert_tensor": "distributed/test_parallel_parity.py::"
    "test_latent_attention_with_routing_biases_learns_the_same",
    **{
        f"environment.{key}": f"unit/environments/test_programs.py::{test}"
        for test, keys in PROGRAMS.items()
        for key in keys
    },
    "rollout.offload_trainer": "integration/test_fleet.py::"
    "test_a_trainer_lends_its_memory_to_colocated_engines_that_generate",
    "rollout.routing_replay": "integration/test_expert_run.py::"
    "test_a_run_replays_the_routes_of_an_engine_that_routes_otherwise",
    **dict.fromkeys(
        (
            *("distillation.coefficient", "distillation.reward_weight", "distillation.top_k"),
            *(f"distillation.teachers.{key}" for key in TeacherConfig.model_fields),
        ),
        "integration/test_distillation.py::test_changed_teachers_take_effect_at_a_resume",
    ),
    "controller.own_process": "integration/test_resume.py::test_a_controller_of_its_own_gives_the_same_run",
    **dict.fromkeys(
        ("controller.host", "controller.wait_limit_s"),
        "unit/training/test_controller.py::test_they_wait_for_each_other_for_a_limited_time",
    ),
    **dict.fromkeys(
        ("environment.num_workers", "environment.memory_limit_mib", "environment.time_limit_s"),
        "unit/environments/test_pool.py::test_a_process_has_the_memory_and_the_time_that_are_set_and_there_are_as_many",
    ),
    **dict.fromkeys(
        ("environment.retries", "environment.max_failed_share"),
        "unit/environments/test_turns.py::test_what_fails_too_often_is_no_number_and_too_much_of_it_ends_the_run",
    ),
    "environment.history": "unit/environments/test_turns.py::"
    "test_where_the_template_strips_thoughts_a_turn_begins_a_piece",
    "environment.built_in": "unit/environments/test_tools.py::test_what_cannot_be_tools_is_said_at_once",
    "environment.max_unreadable": "unit/environments/test_tools.py::test_unreadable_turns_in_a_row_end_the_trajectory",
    "environment.max_result_characters": "unit/environments/test_tools.py::test_a_long_result_is_cut_in_its_middle",
    "seed": "unit/test_config.py::test_a_resume_with_another_seed_is_not_told_to_accept_what_cannot_be_accepted",
    "tracking.backends": "unit/training/test_tracking.py::"
    "test_a_changed_key_reaches_the_trackers_of_a_run_that_continues",
    "weight_sync.full_every": "integration/test_fleet.py::"
    "test_engines_that_got_only_changes_hold_the_whole_new_weights",
}
FINE_TUNING = "integration/test_fine_tuning.py::{}"
ELSEWHERE |= dict.fromkeys(
    (
        *("epochs", "evaluation.keep_best", "data.loss_on", "data.long_rows"),
        *(f"data.{dataset}.columns.{key}" for dataset in ("evaluation", "mixture") for key in COLUMNS_OF_FINE_TUNING),
        *(f"data.train.columns.{key}" for key in ("messages", "tools")),
    ),
    FINE_TUNING.format("test_each_changed_key_takes_effect_at_a_resume_or_is_refused"),
)
ELSEWHERE["evaluation.stop_after"] = FINE_TUNING.format("test_evaluations_end_a_run_and_the_best_checkpoint_stays")
ELSEWHERE |= dict.fromkeys(
    (
        *(f"data.{dataset}.columns.rejected" for dataset in ("train", "mixture", "evaluation")),
        *("dpo.beta", "dpo.label_smoothing"),
    ),
    "integration/test_preferences.py::test_each_changed_key_takes_effect_at_a_resume_or_is_refused",
)
CHANGED = {
    *ELSEWHERE,
    *(key for changes in CHANGES.values() for key in changes),
    *CHANGED_DATA,
    *FLEET_CHANGES,
    *RECORD_CHANGES,
    *(f"optimizer.{key}" for key in OPTIMIZER_CHANGES),
    *(f"tracking.{key}" for key in TRACKER_CHANGES),
    *REFUSED_IN_FINE_TUNING,
}
# Keys that have no effect on a run that resumes -> what reads them.
NOT_CHANGED = {
    "lora.path": "a run that begins: later its adapters are in its checkpoints",
    "model.architecture": "a dry run where the model is not",
    "algorithm.policy_loss.depends_on_split": "the trial of the loss before a run begins",
}
# Keys of fine-tuning that one of its own tests changes; those of `ELSEWHERE` and of the optimizer act in the model.
CHANGED_IN_FINE_TUNING = {
    *CHANGES_OF_BOTH,
    *CHANGES_OF_FINE_TUNING,
    *(key.replace(".mixture.a.", ".mixture.").replace(".mixture.b.", ".mixture.") for key in REFUSED_ROWS),
    *REFUSED_IN_FINE_TUNING,
    *FINE_TUNING_CHANGES,
    *(key for changes in MODEL_CHANGES.values() for key in changes),
    *(f"data.{name}.{key}" for name in ("train", "mixture", "evaluation") for key in CHANGED_DATASET),
    *(f"optimizer.{key}" for key in OPTIMIZER_CHANGES),
    *(f"tracking.{key}" for key in TRACKER_CHANGES),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a model, data, and the configuration file of a run."""
    folder = tmp_path_factory.mktemp("keys")
    prepare(folder)
    return folder


@pytest.fixture
def reads(monkeypatch):
    """`reads(config)` returns a set that gets the dotted name of every key of it that is read from then on."""
    names, seen = {}, set()
    original, copy, copies = Section.__getattribute__, Section.model_copy, []

    def recording(section, key):
        if id(section) in names and key in type(section).model_fields:
            seen.add(names[id(section)] + key)
        return original(section, key)

    def follow(config):
        for key, value in vars(config).items():
            if isinstance(value, Section):
                names[id(value)] = names[id(config)] + key + "."
                follow(value)

    def following_copy(section, **given):
        copies.append(copy(section, **given))
        if id(section) in names:
            names[id(copies[-1])] = names[id(section)]
        return copies[-1]

    def begin(config):
        names[id(config)] = ""
        follow(config)
        return seen

    monkeypatch.setattr(Section, "__getattribute__", recording)
    monkeypatch.setattr(Section, "model_copy", following_copy)
    return begin


def keys_of(config, prefix=""):
    for key, value in vars(config).items():
        yield from keys_of(value, f"{prefix}{key}.") if isinstance(value, Section) else [prefix + key]


def keys_in(section, prefix=""):
    """All keys that a configuration can have, those of a mapping's sections without their names."""
    for key, field in section.model_fields.items():
        kinds = kinds_of(field.annotation) if section_in(field.annotation) else {}
        inner = [*kinds.values()] or [each for each in (section_in(field.annotation),) if each]
        yield from (name for each in inner for name in keys_in(each, f"{prefix}{key}."))
        if not inner:
            yield prefix + key


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


def test_a_run_reads_every_key(folder, reads):
    overrides = [
        "num_steps=2", "evaluation.every=2", "checkpoint.every=1", "algorithm.kl.coefficient=0.01",
        "algorithm.importance_cap=2", "reward.source=verifier", "reward.length_weight=0.1",
        "algorithm.dynamic_sampling=false",
    ]  # fmt: skip
    config = distinct(load_config(RunConfig, folder / "config.yaml", overrides))
    seen = reads(config)
    print_dry_run(config)
    run_training(config)
    assert_all_read(config, seen, NOT_READ_BY_A_RUN)


def test_every_key_is_changed_at_a_resume_and_its_effect_seen():
    """Each in one of the tests that are listed here, which fail where the changed key has the effect of the old one."""
    for key, place in ELSEWHERE.items():
        file_name, _, test = place.partition("::")
        text = (Path(__file__).parents[1] / file_name).read_text()
        assert f"def {test}(" in text, place
        assert re.search(rf"\b{key.split('.')[-1]}\b", text), f"{file_name} does not name {key}"
    keys = {*keys_in(RunConfig), *keys_in(SftConfig)}
    for problem, found in {
        "not changed at a resume": keys - CHANGED - NOT_CHANGED.keys(),
        "listed, and no keys": (CHANGED | NOT_CHANGED.keys()) - keys,
        "listed as not changed, and changed all the same": CHANGED & NOT_CHANGED.keys(),
    }.items():
        assert not found, f"{problem}: {', '.join(sorted(found))}"


def test_every_key_of_fine_tuning_is_changed_at_a_resume_of_it():
    keys = set(keys_in(SftConfig))
    unread = {key for key in keys if re.sub(r"^data\.\w+\.", "data.train.", key) in NOT_READ_BY_FINE_TUNING}
    unread = (unread - OF_OTHER_LAYOUTS.keys()) | NOT_CHANGED.keys() | {"evaluation.at_start"}  # Of a run that begins.
    missing = keys - CHANGED_IN_FINE_TUNING - ELSEWHERE.keys() - unread
    assert not missing, f"not changed at a resume of fine-tuning: {', '.join(sorted(missing))}"


def test_fine_tuning_reads_every_key(folder, reads, monkeypatch):
    values = {
        "output_dir": str(folder / "tuned"),
        "num_steps": 1,
        "batch_samples": 4,
        "tokens_per_microbatch": 512,
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "data": {
            "train": {"path": str(folder / "data" / "demonstrations.parquet"), "template": "bare"},
            "max_tokens": 512,
        },
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(values))
    config = distinct(load_config(SftConfig, folder / "sft.yaml"))
    seen = reads(config)
    run_sft(config)
    assert_all_read(config, seen, NOT_READ_BY_FINE_TUNING)
    assert_changes_of_the_optimizer_take_effect(folder, monkeypatch)


def assert_changes_of_the_optimizer_take_effect(folder, monkeypatch):
    """Where fine-tuning resumes; what each setting does is shown in unit/checkpoints/test_store.py."""
    models, load = [], TrainedModel.load_optimizer
    monkeypatch.setattr(TrainedModel, "load_optimizer", lambda self, *given: (models.append(self), load(self, *given)))
    changes = {key: value for key, (value, _) in OPTIMIZER_CHANGES.items()}
    overrides = ["num_steps=2", *(f"optimizer.{key}={value}" for key, value in changes.items())]
    run_sft(load_config(SftConfig, folder / "sft.yaml", overrides), accept_changes=True)
    (model,) = models
    assert in_effect(model) == changes
    overrides = [f"output_dir={folder / 'overflown'}", "optimizer.learning_rate=1e30", "optimizer.warmup_steps=0"]
    run_sft(load_config(SftConfig, folder / "sft.yaml", overrides))
    overrides += ["num_steps=3", "optimizer.max_skipped_updates=2"]
    run_sft(load_config(SftConfig, folder / "sft.yaml", overrides), accept_changes=True)
    records = read_metrics(folder / "overflown" / "metrics.jsonl")
    assert [record.get("policy/skipped_update_share") for record in records] == [None, 1, 1]
