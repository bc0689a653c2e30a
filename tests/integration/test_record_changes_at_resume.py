"""Every key that says what a run keeps and shows, when, and for how long, is changed at a resume of a whole run.

All are changed at once; had one of them its old value, something else would be seen under its name.
"""

import contextlib
import json
import os
import re
import signal
import threading

import pyarrow.parquet as pq
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dapo_mega.checkpoints.folders import step_of
from dapo_mega.checkpoints.store import CheckpointStore
from dapo_mega.config import RunConfig, SftConfig, load_config
from dapo_mega.errors import InputError
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.processes import stop_processes
from dapo_mega.metrics import read_metrics
from dapo_mega.metrics.run_text import EXAMPLES_TAG
from dapo_mega.metrics.timeline.file import FILE_NAME, read_timeline
from dapo_mega.samples.files import stored_files
from dapo_mega.training import lifecycle, process_watch
from dapo_mega.training.run import run_training
from dapo_mega.training.sft import run_sft

from .runs import prepare

pytestmark = pytest.mark.integration

# Key -> its values in the first step and in the four after the resume, and what is seen then: steps, if nothing else.
CHANGES_OF_BOTH = {
    "output_dir": ("first", "moved", ["moved"]),
    "num_steps": (1, 5, [1, 2, 3, 4, 5]),
    "silence_limit_s": (60, 70, 70),
    "checkpoint.every": (0, 1, [2, 3, 4, 5]),
    "checkpoint.asynchronous": (True, False, [2, 3, 4, 5]),
    "checkpoint.keep_last": (1, 2, [4, 5]),
    "checkpoint.keep_every": (None, 3, [3]),
    "checkpoint.hf_every": (0, 2, [2, 4]),
    "checkpoint.save_hf_at_end": (False, True, ["hf"]),
    "checkpoint.grace_s": (25, 0, "within 0 s after SIGTERM (checkpoint.grace_s)"),
}
CHANGES_OF_A_RUN = {
    "evaluation.at_start": (False, True, []),
    "evaluation.every": (0, 2, [2, 4]),
    "evaluation.at_end": (False, True, [5]),
    "tracking.histograms_every": (0, 2, [2, 4]),
    "tracking.timeline": (False, True, [2, 3, 4, 5, 5]),
    "tracking.samples_per_evaluation": (8, 3, [3, 3, 3]),
    "samples.groups_per_step": (None, 2, [2]),
    "samples.max_gib": (10, 1e-9, [5, 5]),
}
CHANGES_OF_FINE_TUNING = {"batch_samples": (4, 6, [6] * 4), "tokens_per_microbatch": (512, 64, [True] * 4)}
CHANGES = {**CHANGES_OF_BOTH, **CHANGES_OF_A_RUN, **CHANGES_OF_FINE_TUNING}
# What a checkpoint of other demonstrations does not allow -> another value, and what is said of it.
REFUSED_IN_FINE_TUNING = {
    "data.max_tokens": (9, "over the limit of 9"),
    "data.train.columns.response": ("prompt", "made with other demonstrations"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The configuration files of a run and of fine-tuning."""
    folder = tmp_path_factory.mktemp("records")
    values = {
        "output_dir": "replaced",
        "num_steps": 1,
        "threads_per_process": 1,
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "data": {
            "max_tokens": 64,
            "train": {"path": str(folder / "data" / "demonstrations.parquet"), "template": "as_is"},
        },
    }
    files = {"run": prepare(folder), "fine-tuning": folder / "sft.yaml"}
    files["fine-tuning"].write_text(yaml.safe_dump(values))
    return files


@contextlib.contextmanager
def watched(last_step):
    """What a run does meanwhile. While it writes its last checkpoint, it gets SIGTERM."""
    seen, has_left = {"saved": [], "complete": [], "left": "", "limits": [], "batches": []}, threading.Event()
    watch, save, update = lifecycle.ProcessWatch, CheckpointStore.save, MegatronPolicy.update

    def watching(grace_s, silence_limit_s):
        seen["limits"].append(silence_limit_s)
        return watch(grace_s, silence_limit_s)

    def saving(store, policy, state, step, critic=None):
        save(store, policy, state, step, critic)
        seen["saved"].append(step)
        if step_of(store.latest()) == step:
            seen["complete"].append(step)
        if step == last_step:
            os.kill(os.getpid(), signal.SIGTERM)
            has_left.wait(5)

    def leaving(message, status):
        seen["left"] = message
        has_left.set()

    def updating(policy, batches, *arguments, **options):
        seen["batches"].append([len(batch.micro_batch.trajectories) for batch in batches])
        return update(policy, batches, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "ProcessWatch", watching)
        patch.setattr(CheckpointStore, "save", saving)
        patch.setattr(process_watch, "leave", leaving)
        patch.setattr(MegatronPolicy, "update", updating)
        yield seen


def evidence(output, seen):
    """Key -> what is seen of it in the folder of a run that has ended, and in what it did."""
    events = EventAccumulator(str(output / "tensorboard"), size_guidance={"tensors": 0, "histograms": 0}).Reload()
    shown = [event.tensor_proto.string_val[0].decode() for event in tensors(events, f"{EXAMPLES_TAG}/text_summary")]
    records = read_metrics(output / "metrics.jsonl")
    evaluated = [record["step"] for record in records if "evaluation/k" in record]
    kept = sorted(step_of(path) for path in (output / "checkpoints").glob("step_*"))
    samples = [(file.step, pq.read_table(file.path)) for file in stored_files(output / "samples")]
    timeline = output / FILE_NAME
    return {
        "output_dir": sorted(path.name for path in output.parent.iterdir()),
        "num_steps": [record["step"] for record in records if record["step"]],
        "silence_limit_s": seen["limits"][-1],
        "checkpoint.every": seen["saved"],
        "checkpoint.asynchronous": seen["complete"],
        "checkpoint.keep_last": [step for step in kept if step != 3],
        "checkpoint.keep_every": [step for step in kept if step < 4],
        "checkpoint.hf_every": sorted(int(path.name[-8:]) for path in output.glob("hf_step_*")),
        "checkpoint.save_hf_at_end": [path.name for path in output.glob("hf")],
        "checkpoint.grace_s": "".join(re.findall(r"within .*\(checkpoint.grace_s\)", seen["left"])),
        "evaluation.at_start": [step for step in evaluated if step < 2],
        "evaluation.every": [step for step in evaluated if 2 <= step < 5],
        "evaluation.at_end": [step for step in evaluated if step == 5],
        "tracking.histograms_every": sorted(
            {event.step for tag in events.Tags()["histograms"] for event in events.Histograms(tag)}
        ),
        "tracking.timeline": [record.step for record in read_timeline(timeline)] if timeline.is_file() else [],
        "tracking.samples_per_evaluation": [text.count("### ") for text in shown],
        "samples.groups_per_step": [len(set(table["group"].to_pylist())) for _, table in samples][:1],
        "samples.max_gib": [step for step, _ in samples],
        "batch_samples": [sum(sizes) for sizes in seen["batches"]],
        "tokens_per_microbatch": [len(sizes) > 1 for sizes in seen["batches"]],
    }


def tensors(events, tag):
    return events.Tensors(tag) if tag in events.Tags()["tensors"] else []


@pytest.mark.parametrize("kind", ["run", "fine-tuning"])
def test_each_changed_key_of_what_is_kept_and_shown_takes_effect(files, tmp_path, kind):
    section, train, own = {
        "run": (RunConfig, run_training, CHANGES_OF_A_RUN),
        "fine-tuning": (SftConfig, run_sft, CHANGES_OF_FINE_TUNING),
    }[kind]
    changes = {**CHANGES_OF_BOTH, **own}
    before, after = [], []
    for key, values in changes.items():
        for overrides, value in zip((before, after), values, strict=False):
            overrides.append(f"{key}={tmp_path / value if key == 'output_dir' else json.dumps(value)}")
    train(load_config(section, files[kind], before))
    (tmp_path / "first").rename(tmp_path / "moved")
    with watched(last_step=5) as seen:
        train(load_config(section, files[kind], after), accept_changes=True)
    found = evidence(tmp_path / "moved", seen)
    assert {key: found[key] for key in changes} == {key: expected for key, (*_, expected) in changes.items()}
    for key, (value, message) in REFUSED_IN_FINE_TUNING.items() if kind == "fine-tuning" else ():
        with pytest.raises(InputError, match=message):
            train(load_config(section, files[kind], [*after, "num_steps=6", f"{key}={value}"]), accept_changes=True)
        stop_processes()  # Which a process that ends with the error does not.
