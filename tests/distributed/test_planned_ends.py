"""A run that ends on purpose loses no step that is whole, whatever it ends for."""

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
from megatron.core import parallel_state

from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import FleetError, InputError
from dapo_mega.evaluation.evaluator import Evaluator
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.metrics import read_metrics
from dapo_mega.rollout.collector import Collector
from dapo_mega.rollout.scoring import ResponseScorer
from dapo_mega.training import loop, run, trainer
from tests.integration.runs import decisive, prepare

from .launching import run_distributed

pytestmark = pytest.mark.distributed

NAN = {"mismatch/logprob_abs_diff_mean": float("nan")}
# What is replaced, the calls of a process after which it raises, what, and the step that is saved.
ENDS = {
    "scoring": (ResponseScorer, "compare", 22, InputError, 2),
    "engines gone": (Collector, "_fill_buffer", 2, FleetError, 2),
    "engines with other weights": (loop, "mismatch_warning", 2, FleetError, 2),
    "a sample that does not fit": (trainer, "plan_samples", 2, InputError, 2),
    "evaluation": (Evaluator, "run", 0, InputError, 3),
    "weights not sent": (loop, "send_weights", 3, FleetError, 3),
    "weights that are not numbers": (trainer, "measure_mismatch", 2, NAN, None),
    "gradients that are not numbers": (MegatronPolicy, "update", 5, InputError, None),
}


CONTINUED = ("scoring", "engines with other weights", "evaluation")


def raises_after(function, num_calls, outcome):
    calls = []

    def call(*arguments, **settings):
        calls.append(None)
        found = None if len(calls) > num_calls and outcome is not NAN else function(*arguments, **settings)
        if len(calls) <= num_calls:
            return found
        if outcome is NAN:
            return found | NAN
        raise outcome("as it should")

    return call


def end_and_continue(file, folder):
    """What became of a run of four steps for each of ENDS: its error, and its checkpoints; and of what continued it."""
    found = {}
    run.stop_processes = parallel_state.destroy_model_parallel  # The processes' group is for all runs.
    for kind in ("nothing", *ENDS):
        config = load_config(RunConfig, Path(file), [f"output_dir={folder}/{kind}"])
        error = None
        with ExitStack() as stack:
            if kind in ENDS:
                place, name, num_calls, outcome, _ = ENDS[kind]
                stack.enter_context(patch.object(place, name, raises_after(getattr(place, name), num_calls, outcome)))
            try:
                run.run_training(config)
            except (InputError, FleetError) as raised:
                error = type(raised)
                found[f"{kind} says"] = str(raised)
        parallel_state.destroy_model_parallel()
        found[kind] = error, sorted(path.name for path in Path(folder, kind, "checkpoints").glob("step_*"))
        if kind in CONTINUED:
            run.run_training(config)
    return found


def test_a_run_that_ends_on_purpose_saves_its_last_step_if_that_is_whole(tmp_path):
    file = prepare(tmp_path)
    changes = {"num_steps: 6": "num_steps: 4", "at_start: true": "at_start: false", "every: 2": "every: 100"}
    text = file.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text.replace("rollout:", "rollout:\n  mismatch_stop: 5.0"))
    with_groups = run_distributed(end_and_continue, 2, str(file), str(tmp_path), timeout_s=120)
    assert with_groups[0] == with_groups[1]
    wrong = []
    expected = read_metrics(tmp_path / "nothing" / "metrics.jsonl")
    for kind, (_, _, _, outcome, step) in ENDS.items():
        error = FleetError if outcome is NAN else outcome
        saved = [] if step is None else [f"step_{step:08d}"]
        said = with_groups[0][f"{kind} says"]
        says = f". step {step} of 4 is saved in {tmp_path / kind / 'checkpoints' / f'step_{step or 0:08d}'}; the same"
        if with_groups[0][kind] != (error, saved) or (says in said) != (step is not None):
            wrong.append((kind, with_groups[0][kind], said))
        elif kind in CONTINUED:
            got = read_metrics(tmp_path / kind / "metrics.jsonl")
            wrong += [(kind, a["step"]) for a, b in zip(got, expected, strict=True) if decisive(a) != decisive(b)]
    assert not wrong, "\n".join(map(str, wrong))
