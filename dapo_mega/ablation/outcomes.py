"""How far a run is, by what its trainer left in its folder: metrics, `status.json`, `config.yaml`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dapo_mega.ablation.plan import Plan, Run
from dapo_mega.cli import EXIT_STARVED
from dapo_mega.errors import InputError
from dapo_mega.metrics import read_metrics
from dapo_mega.training.resume import changes_since, is_free
from dapo_mega.training.run_status import read_status

State = Literal["absent", "begun", "finished", "starved", "failed"]
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Outcome:
    """`absent`: nothing there. `begun`: the same command continues it. `starved`: dynamic sampling ran out of groups,
    which is a result. `failed`: anything else, which may go better the next time. `step` is the last one recorded or
    saved."""

    state: State
    step: int
    message: str = ""

    @property
    def is_settled(self) -> bool:
        """Whether starting the run again would change nothing."""
        return self.state in ("finished", "starved")


def outcome_of(run: Run) -> Outcome:
    """Raises InputError for a run that has trained further than the plan wants, and so holds another result."""
    status, records = read_status(run.folder), records_of(run.folder)
    # A run that was stopped in an evaluation has saved a step that it has not recorded yet.
    step = max(int(records[-1]["step"]) if records else 0, int(status.get("step", 0)))
    if step > run.config.num_steps:
        raise InputError(
            f"{run.name}: {run.folder} holds {step} steps, more than num_steps={run.config.num_steps}; raise "
            f"num_steps, or give another --output-dir"
        )
    message = str(status.get("message", ""))
    match status.get("state"):
        case "finished":
            return Outcome("finished" if step == run.config.num_steps else "begun", step)
        case "failed" if status.get("exit_status") == EXIT_STARVED:
            return Outcome("starved", step, message)
        case "failed":
            return Outcome("failed", step, message)
        case "running" | "stopped":
            return Outcome("begun", step, message)
        case _:
            return Outcome("absent", step)


def refuse_other_settings(plan: Plan) -> None:
    """Raise InputError, naming the run and its keys, if the plan's settings of a run are not those it began with.

    What decides neither what is learnt nor how it is measured may differ: layout, memory, checkpoints. More steps too.
    """
    for run in plan.runs:

        def may_change(name: str, run: Run = run) -> bool:
            return is_free(name, run.config) and not name.startswith(("data.", "evaluation.", "model.path"))

        if changes := changes_since(run.config, run.folder, may_change):
            raise InputError(
                f"{run.name} in {run.folder} was begun with other settings ({changes}); undo the change, remove that "
                f"folder, or give another --output-dir"
            )


def records_of(folder: Path) -> list[dict[str, float]]:
    """The metrics that a run has recorded, in the order of its steps."""
    file = folder / METRICS_FILE
    return read_metrics(file) if file.is_file() else []
