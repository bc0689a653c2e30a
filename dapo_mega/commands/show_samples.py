"""Show what a run's model said: one HTML page that needs no server and no network.

dapo-mega show-samples runs/dapo-7b
dapo-mega show-samples runs/dapo-7b --steps 100:120 --output step-100.html
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from dapo_mega.commands._arguments import at_least_one
from dapo_mega.config import AlgorithmConfig
from dapo_mega.config.choices import settled
from dapo_mega.errors import InputError
from dapo_mega.samples.files import StoredFile, samples_folder, stored_files
from dapo_mega.samples.page import ClipBounds, size_of, write_page

_MAX_TOKENS = 20_000_000
"""Some 100 MiB of page."""
_CLIPPED = ("clip", "clip_cov")


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page. Raises InputError if the run has no samples that can be read."""
    parser = argparse.ArgumentParser(description="Write one HTML page that shows a run's samples.")
    parser.add_argument("run_dir", type=Path, help="folder of the run, which holds samples/")
    parser.add_argument("--output", type=Path, help="HTML file to write (default: RUN_DIR/samples.html)")
    parser.add_argument("--steps", metavar="FIRST:LAST", help="only these steps and the evaluations among them")
    parser.add_argument(
        "--responses",
        type=at_least_one,
        default=30_000,
        metavar="N",
        help="leave out the oldest steps beyond so many responses, or 20 million tokens (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    folder = samples_folder(arguments.run_dir)
    files = stored_files(folder)
    if not files:
        raise InputError(
            f"{folder} holds no samples; give the output_dir of a run with samples.enabled=true that has done a step "
            f"or an evaluation"
        )
    files = _of_steps(files, arguments.steps)
    chosen = _newest(files, arguments.responses)
    notes = [f"{len(files) - len(chosen)} older ones left out"] if len(chosen) < len(files) else []
    output = arguments.output or arguments.run_dir / "samples.html"
    page = write_page(
        output, chosen, name=arguments.run_dir.resolve().name, clip=_clip_bounds(arguments.run_dir), notes=notes
    )
    for line in page.unreadable:
        print(f"warning: {line}; the page leaves it out", file=sys.stderr)
    left_out = f" ({notes[0]}: --steps or --responses)" if notes else ""
    size = output.stat().st_size / 2**20
    shown = len(chosen) - len(page.unreadable)
    print(f"{page.responses} responses of {shown} steps and evaluations{left_out}: {output} ({size:.1f} MiB)")


def _of_steps(files: list[StoredFile], text: str | None) -> list[StoredFile]:
    if text is None:
        return files
    first, colon, last = text.partition(":")
    if not first.isdecimal() or (colon and not last.isdecimal()):
        raise InputError(f"--steps {text!r} is not FIRST:LAST or one step, such as 100:120 or 100")
    bounds = int(first), int(last) if colon else int(first)
    found = [file for file in files if bounds[0] <= file.step <= bounds[1]]
    if not found:
        raise InputError(f"--steps {text}: there are samples of steps {files[0].step} to {files[-1].step} only")
    return found


def _newest(files: list[StoredFile], limit: int) -> list[StoredFile]:
    """The newest files with so many responses in all and as many tokens as a browser takes, at least one."""
    chosen: list[StoredFile] = []
    responses = tokens = 0
    for file in reversed(files):
        more_responses, more_tokens = size_of(file)
        responses, tokens = responses + more_responses, tokens + more_tokens
        if chosen and (responses > limit or tokens > _MAX_TOKENS):
            break
        chosen.append(file)
    return chosen[::-1]


def _clip_bounds(run_dir: Path) -> ClipBounds | None:
    """The bounds of the run's loss, if it clips the ratio of single tokens."""
    try:
        algorithm = yaml.safe_load((run_dir / "config.yaml").read_text())["algorithm"]
        loss = settled(AlgorithmConfig, algorithm, {}, is_record=True)["policy_loss"]
        if loss["kind"] not in _CLIPPED:
            return None
        return ClipBounds(loss["low"], loss["high"], algorithm["old_policy"] == "engine")
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None  # The page is of use without them.
