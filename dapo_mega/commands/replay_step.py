"""Replay a recorded step offline and say where it differs from what was logged: to find out why a run collapsed.

dapo-mega replay-step runs/dapo-7b 120
dapo-mega replay-step --processes 2 runs/dapo-7b 120 parallel.tensor=2

Trains on the groups that the run recorded, from the checkpoint before the step, in one process unless told otherwise.
Needs no engine and no data, and writes nothing into the run's folder.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_mega.cli import leave_at_sigterm, print_once
from dapo_mega.commands._arguments import at_least_one, prepare_megatron

if TYPE_CHECKING:
    from dapo_mega.training.differences import Difference
    from dapo_mega.training.replay import Replay


def main() -> None:
    """Replay as the arguments say. Raises InputError if the step cannot be replayed."""
    parser = argparse.ArgumentParser(description="Replay a recorded step and say where it differs from the log.")
    add = parser.add_argument
    add("run_dir", type=Path, help="folder of the run")
    add("step", type=at_least_one, help="the step, counted from 1")
    add("overrides", nargs="*", metavar="section.key=value", help="overrides of the run's config.yaml")
    add("--tolerance", type=float, default=1e-5, help="relative difference that still counts as none (%(default)s)")
    add("--output", type=Path, help="also write all differences to this JSON file")
    arguments = parser.parse_intermixed_args()
    leave_at_sigterm("the replay was stopped by SIGTERM")
    prepare_megatron()
    from dapo_mega.training.replay import replay

    found = replay(arguments.run_dir, arguments.step, arguments.overrides, arguments.tolerance)
    if found:
        for line in report(found, arguments.step, arguments.tolerance):
            print_once(line)
        if arguments.output:
            values = {name: [asdict(d) for d in getattr(found, name)] for name in _SECTIONS}
            arguments.output.write_text(json.dumps(values, indent=1) + "\n")


_SECTIONS = {
    "earlier": "metrics of the steps before it",
    "metrics": "metrics of the step, as in metrics.jsonl",
    "updates": "metrics of single updates",
    "tokens": "tokens and responses",
}


def report(found: "Replay", step: int, tolerance: float) -> list[str]:
    """The lines of the report: a table of what differs, and a verdict."""
    plan = found.plan
    since = f"the checkpoint {plan.start.name}" if plan.start else "the model that the run began with"
    first = f"steps {plan.steps[0]} to {step}" if len(plan.steps) > 1 else f"step {step}"
    lines = [
        f"replayed {first} from {since} in {_processes(found.world_size)} (recorded in "
        f"{_processes(plan.recorded_world_size)})"
    ]
    for name, title in _SECTIONS.items():
        differences: tuple[Difference, ...] = getattr(found, name)
        if differences:
            unequal, number = sum(not d.is_equal for d in differences), len(differences)
            summary = f"{unequal} of {number} differ" if unequal else f"all {number} are equal, bit for bit"
            lines += ["", f"{title}: {summary}"]
            lines += [_line(d) for d in differences if not d.is_equal or name == "tokens" or d.name in _ALWAYS]
    return [*lines, "", _verdict(found, step, tolerance)]


_ALWAYS = ("policy/loss", "policy/grad_norm")


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _line(d: "Difference") -> str:
    count = f"{d.num_different} of {d.num_values} values" if d.num_values > 1 else ""
    if d.is_equal:
        return f"  {d.name:44s} equal" + (f"   {d.num_values} values" if d.num_values > 1 else f"   {d.recorded:.8g}")
    values = f"logged {d.recorded:.8g}  replayed {d.replayed:.8g}  difference {d.largest:.2g}"
    return f"  {d.name:44s} {values}" + (f"  ({count}; the largest at {d.where})" if count else "")


def _verdict(found: "Replay", step: int, tolerance: float) -> str:
    if all(d.is_equal for d in found.all):
        return f"step {step}: nothing differs"
    worst = max(found.all, key=lambda d: d.excess)
    if worst.excess <= 1:
        return f"step {step}: everything is within {tolerance:g}"
    return f"step {step}: {worst.name} differs by more than {tolerance:g}"
