"""Score saved responses again, by another extraction style or reward, without asking any model.

dapo-mega regrade runs/evaluations/base --extraction boxed
dapo-mega regrade runs/mine reward.function=my_reward.py:score
dapo-mega regrade runs/mine/samples/evaluation_00000100.parquet --config my_run.yaml

The responses of an evaluation, of a run, or of dapo-mega rejection-sample are written beside the old ones, in the same
format, for compare and show-samples. The old files stay as they are.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from dapo_mega.cli import print_once, quiet_libraries
from dapo_mega.config import RunConfig, load_config
from dapo_mega.config.components.built_in import Extraction
from dapo_mega.errors import InputError

if TYPE_CHECKING:
    from dapo_mega.evaluation.regrading import Regraded

_SHOWN_CHARACTERS = 200


def main(argv: Sequence[str] | None = None) -> None:
    """Regrade as the arguments say. Raises InputError, with nothing written, for what cannot be scored."""
    parser = argparse.ArgumentParser(description="Score saved responses again, without asking any model.")
    add = parser.add_argument
    add("source", type=Path, help="folder of a run, of results of evaluate, or of responses; or one parquet file")
    add("overrides", nargs="*", metavar="section.key=value", help="such as reward.function=my_reward.py:score")
    add("--extraction", choices=get_args(Extraction), help="where answers are: reward.extraction=STYLE")
    add("--config", type=Path, help="YAML file of a run whose reward scores (default: the one that scored before)")
    add("--output", type=Path, help="new folder (default: that of the source, with -regraded behind its name)")
    add("--examples", type=int, default=3, metavar="N", help="changed responses to print (default: %(default)s)")
    options = parser.parse_intermixed_args(argv)
    quiet_libraries()
    if options.examples < 0:
        raise InputError(f"--examples={options.examples} must be 0 or more")
    overrides = list(options.overrides)
    if options.extraction:
        overrides.append(f"reward.extraction={options.extraction}")
    source = options.source.resolve()
    output = options.output or source.with_name(f"{source.stem if source.is_file() else source.name}-regraded")
    _regrade(source, output, options.config, overrides, options.examples)


def _regrade(source: Path, output: Path, run_file: Path | None, overrides: Sequence[str], num_shown: int) -> None:
    from dapo_mega.evaluation.regrading import Regraded, regrade, saved_reward
    from dapo_mega.evaluation.results import result_of, write_results
    from dapo_mega.evaluation.saved import sample_files
    from dapo_mega.preparation.folders import complete_folder

    files = [source] if source.is_file() else [file.path for file in sample_files(source)]
    if not files:
        raise InputError(f"{source} holds no saved responses; give a run, or results of dapo-mega evaluate")
    if output.exists():
        raise InputError(f"{output} exists, and nothing is written over; give another --output")
    run_file = run_file or (source / "config.yaml" if (source / "config.yaml").is_file() else None)
    of_run = load_config(RunConfig, run_file, list(overrides)) if run_file else None
    found: dict[str, Regraded] = {}
    results: dict[str, Mapping[str, Any]] = {}
    model = ""
    with complete_folder(output) as (content, _):
        for path in files:
            config = of_run or saved_reward(path, overrides)
            inner = path.relative_to(source) if source.is_dir() else Path(path.name)
            is_step = path.name.startswith("step_")
            label = "training steps" if is_step else str(inner.with_suffix(""))
            so_far = found.setdefault(label, Regraded())
            settings = regrade(config, path, content / inner, num_shown, so_far)
            if name := settings.get("benchmark"):
                results[name] = result_of(content / inner, settings)
                model = settings["model"]
        if results:
            write_results(content, model, results)
    print_once("\n".join(line for label, regraded in found.items() for line in _lines(label, regraded)))
    print_once(f"written: {output}")


def _lines(label: str, regraded: "Regraded") -> list[str]:
    old, new = ("-" if (share := regraded.accuracy(side)) is None else f"{share:.1%}" for side in (0, 1))
    right, wrong, lost = (regraded.num_changed(verdict) for verdict in (True, False, None))
    lines = [
        f"{label}: {regraded.verdicts.total()} responses, {old} right before and {new} now; {right} became right, "
        f"{wrong} wrong, {lost} without a verdict"
    ]
    if regraded.failure:
        lines.append(f"  the first that could not be scored: {regraded.failure}")
    words = {True: "right", False: "wrong", None: "without a verdict"}
    for changed in regraded.changed:
        before, now = (
            f"{words[verdict]} (answer {answer!r})"
            for verdict, answer in zip(changed.verdicts, changed.answers, strict=True)
        )
        end = changed.response[-_SHOWN_CHARACTERS:]
        lines.append(f"  problem {changed.problem}, truth {changed.ground_truth!r}: {before}, now {now}: ...{end!r}")
    return lines
