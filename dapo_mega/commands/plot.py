"""Draw the training curves of a run, or of several over one another, as one PNG; or what a run did when.

dapo-mega plot runs/dapo-7b
dapo-mega plot runs/dapo-7b runs/grpo-7b --output dapo-and-grpo.png
dapo-mega plot runs/dapo-7b --timeline --steps 10:12
dapo-mega plot runs/dapo-7b --timeline --step 10 --output step_10.json.gz
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from dapo_mega.errors import InputError
from dapo_mega.metrics.plotting import before_and_after, plot_run, save_png
from dapo_mega.metrics.timeline.excerpt import NUM_SHOWN, load_excerpt
from dapo_mega.metrics.timeline.picture import timeline_figure
from dapo_mega.metrics.timeline.trace_events import write_trace

_STEPS = re.compile(r"(?=.*\d)(\d*):(\d*)")


def main(argv: Sequence[str] | None = None) -> None:
    """Plot as the arguments say. Raises InputError if a run has nothing that can be drawn."""
    parser = argparse.ArgumentParser(description="Draw the training curves of a run, or a timeline of its steps.")
    add = parser.add_argument
    add("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="folder of a run, which holds metrics.jsonl")
    add(
        "--output",
        type=Path,
        help="PNG file to write (default: curves.png or timeline.png in the first RUN_DIR); with --timeline "
        "also .json or .json.gz, which ui.perfetto.dev and chrome://tracing open",
    )
    add("--compare", type=Path, nargs="+", default=[], metavar="RUN_DIR", help="the same as naming them without it")
    add("--timeline", action="store_true", help="draw what trainer and engines did when")
    add("--step", type=int, help="the step of --timeline")
    add(
        "--steps",
        metavar="A:B",
        help=f"the steps of --timeline; without A or B from the first or to the last (default: the last {NUM_SHOWN})",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.timeline:
        _plot_timeline(arguments)
        return
    if arguments.step is not None or arguments.steps is not None:
        raise InputError("--step and --steps choose what --timeline draws; add --timeline, or leave them out")
    run_dirs: list[Path] = [*arguments.run_dirs, *arguments.compare]
    output = arguments.output or run_dirs[0] / "curves.png"
    try:
        plot_run(run_dirs, output)
    except ValueError as error:
        raise InputError(str(error)) from error
    for run_dir in run_dirs:
        if len(run_dirs) > 1:
            print(f"{run_dir}:")
        print("\n".join(before_and_after(run_dir)))
    print(f"curves: {output}")


def _plot_timeline(arguments: argparse.Namespace) -> None:
    if len(arguments.run_dirs) > 1 or arguments.compare:
        raise InputError("--timeline draws one run; give one folder")
    first, last = _chosen_steps(arguments.step, arguments.steps)
    run_dir: Path = arguments.run_dirs[0]
    output: Path = arguments.output or run_dir / "timeline.png"
    name = output.name.lower()
    if not name.endswith((".png", ".json", ".json.gz")):
        raise InputError(f"output {output} must end in .png, .json or .json.gz")
    excerpt = load_excerpt(run_dir, first, last)
    if not output.absolute().parent.is_dir():
        raise InputError(f"the folder of the output {output} does not exist")
    if name.endswith(".png"):
        save_png(timeline_figure(excerpt, f"Run {run_dir.absolute().name}"), output)
    else:
        write_trace(excerpt, output)
    print(f"timeline: {output}")


def _chosen_steps(step: int | None, steps: str | None) -> tuple[int | None, int | None]:
    if step is None and steps is None:
        return None, None
    if steps is None:
        return step, step
    if step is not None:
        raise InputError("--step and --steps exclude each other; give one of them")
    match = _STEPS.fullmatch(steps)
    if not match:
        raise InputError(f"--steps {steps} is not of the form A:B, such as 10:12")
    first, last = (int(number) if number else None for number in match.groups())
    return first, last
