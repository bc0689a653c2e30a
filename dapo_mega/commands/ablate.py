"""Repeat the paper's Table 1 and compare all methods: `dapo-mega ablate --seeds 0 1 2 --processes 2`.

The same code as `tools/ablate.py`. Started again, it continues: runs that are finished stay as they are.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import SIGINT

from dapo_mega.ablation.arms import LADDER, METHODS
from dapo_mega.ablation.outcomes import Outcome, outcome_of, refuse_other_settings
from dapo_mega.ablation.plan import Request, describe, make_plan
from dapo_mega.ablation.report import write_results
from dapo_mega.ablation.runner import Runner, Stop, make_cold_start
from dapo_mega.ablation.tasks import TASKS
from dapo_mega.cli import EXIT_CONTINUE, EXIT_FAULT, EXIT_INPUT_ERROR, EXIT_INTERRUPTED, leave
from dapo_mega.commands._arguments import at_least_one
from dapo_mega.training.run_lock import RunLock

_OVERRIDE = re.compile(r"[a-z][a-z0-9_.]*=")


def main() -> None:
    options = _parse(sys.argv[1:])
    plan = make_plan(_request(options))
    refuse_other_settings(plan)
    outcomes = {run.name: outcome_of(run) for run in plan.runs}
    if options.dry_run:
        print("\n".join([*describe(plan), _progress_line(outcomes)]))
        return
    print("\n".join(describe(plan)), flush=True)
    with RunLock(plan.output, on_loss=lambda reason: leave(reason, EXIT_INPUT_ERROR)):
        stop = Stop()
        stop.listen()
        runner = Runner(plan, stop, parallel=options.parallel, on_end=lambda: write_results(plan, runner.outcomes))
        if make_cold_start(plan, stop):
            runner.work()
            text = write_results(plan, runner.outcomes)
            print(f"\n{text}\nresults: {plan.output / 'results.md'}, results.json, curves.png", flush=True)
        outcomes = dict(runner.outcomes)
    if stop.number is not None:
        status = EXIT_INTERRUPTED if stop.number == SIGINT else EXIT_CONTINUE
        leave(f"{stop.number.name} came; {_progress_line(outcomes)}; start the same command again to continue", status)
    if failed := [run.name for run in plan.runs if not outcomes[run.name].is_settled]:
        leave(
            f"{len(failed)} of {len(plan.runs)} runs failed ({', '.join(failed)}): see {plan.output / 'results.md'}; "
            f"start the same command again to try these again",
            EXIT_FAULT,
        )


def _progress_line(outcomes: dict[str, Outcome]) -> str:
    states = [outcome.state for outcome in outcomes.values()]
    starved = f", {states.count('starved')} starved" if "starved" in states else ""
    return f"{states.count('finished')} of {len(states)} runs are finished{starved}"


def _request(options: argparse.Namespace) -> Request:
    """Without --rows and --methods everything is compared; with one of them only that."""
    rows, methods = [rung.name for rung in LADDER], METHODS
    everything = options.rows is None and options.methods is None
    return Request(
        output=options.output_dir,
        config=options.config,
        task=options.task,
        rows=(options.rows or rows) if everything or options.rows is not None else (),
        methods=(options.methods or methods) if everything or options.methods is not None else (),
        seeds=options.seeds,
        overrides=options.overrides,
        processes=options.processes,
    )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    # Taken out first: an option with several values would swallow them.
    overrides = [argument for argument in arguments if _OVERRIDE.match(argument)]
    parser = argparse.ArgumentParser(description="Repeat the paper's Table 1 and compare all methods.")
    add = parser.add_argument
    add("overrides", nargs="*", metavar="section.key=value", help="section.key=value overrides for all runs")
    add("--config", type=Path, help="YAML file of a run to start from (default: --task's)")
    add("--task", choices=TASKS, help="task with data and a cold start, made once for all runs (default: quickstart)")
    add("--rows", nargs="*", metavar="ROW", help=f"rows of Table 1: {', '.join(rung.name for rung in LADDER)}")
    add("--methods", nargs="*", metavar="PRESET", help=f"presets: {', '.join(METHODS)}")
    add("--seeds", type=_seed, nargs="+", default=[0, 1, 2], metavar="SEED")
    add("--output-dir", type=Path, default=Path("runs/ablation"), help="default: %(default)s")
    add("--processes", type=at_least_one, default=2, help="processes of each run on this machine (default: 2)")
    add("--parallel", type=at_least_one, default=1, help="runs at a time (default: 1)")
    add("--dry-run", action="store_true", help="print the plan, check every run's settings, and exit")
    options = parser.parse_args([argument for argument in arguments if not _OVERRIDE.match(argument)])
    if options.overrides:
        parser.error(f"unknown argument {options.overrides[0]!r}; overrides are of the form section.key=value")
    options.overrides = overrides
    return options


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)
