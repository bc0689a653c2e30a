"""What an evaluation came to: measures with intervals from the saved responses, as `results.json` and as a table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dapo_mega.atomic_files import read_json_object, replace_file
from dapo_mega.errors import InputError
from dapo_mega.evaluation.benchmarks import BENCHMARKS
from dapo_mega.evaluation.measures import ProblemResponses, measure, powers_of_two
from dapo_mega.evaluation.statistics import estimate_means
from dapo_mega.samples.table import account_of, errors_of_reading

RESULTS_FILE = "results.json"
FORMAT = 1
_COLUMNS = ["prompt_index", "correct", "answer", "length", "finish_reason"]


def result_of(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The results on one benchmark, whose responses are in `file`: counts, and measures with 95 % intervals. Raises
    InputError."""
    with errors_of_reading(file, "evaluate again"):
        table = pq.read_table(file, columns=_COLUMNS, page_checksum_verification=True)
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for row in table.to_pylist():
        rows.setdefault(row["prompt_index"], []).append(row)
    problems = [found for index in sorted(rows) if (found := ProblemResponses.of_rows(rows[index]))]
    metrics = {}
    if problems:
        values = measure(problems, powers_of_two(min(problem.num_samples for problem in problems)))
        estimates = estimate_means(list(values.values()))
        metrics = {name: vars(estimate) for name, estimate in zip(values, estimates, strict=True)}
    return {
        "settings": dict(settings),
        "engines": account_of(table.schema.metadata)["engines"],
        "num_problems": len(problems),
        "num_responses": len(table),
        "num_failed": settings["num_problems"] * settings["k"] - len(table),
        "num_unscored": len(table) - sum(problem.num_samples for problem in problems),
        "metrics": metrics,
    }


def refuse_other_model(folder: Path, model_sha256: str) -> None:
    """Raises InputError where the folder has results of another model."""
    for name, result in _earlier(folder).items():
        if result["settings"]["model_sha256"] != model_sha256:
            raise InputError(
                f"{folder} holds results of another model on {name} (model_sha256 was "
                f"{result['settings']['model_sha256'][:12]} and is {model_sha256[:12]}); give another --output"
            )


def _earlier(folder: Path) -> dict[str, Any]:
    file = folder / RESULTS_FILE
    if not file.exists():
        return {}
    found = read_json_object(file, "remove it").get("benchmarks")
    if not isinstance(found, dict):
        raise InputError(f"{file} holds no results; remove it, or give another --output")
    return found


def write_results(folder: Path, model: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Write `results.json` with these results by benchmark, and those of other benchmarks that it holds already.
    Returns its content."""
    merged = {**_earlier(folder), **results}
    content = {
        "format": FORMAT,
        "model": model,
        "benchmarks": {name: merged[name] for name in BENCHMARKS if name in merged},
    }
    replace_file(folder / RESULTS_FILE, json.dumps(content, indent=1) + "\n")
    return content


def results_table(content: Mapping[str, Any]) -> str:
    """The results as lines of text: shares in percent, each with its 95 % interval."""
    head = ["benchmark", "problems", "k", "avg@k", "maj@k", "pass@k", "length", "cut off", "no answer", "failed"]
    rows = [head]
    for name, result in content["benchmarks"].items():
        metrics = result["metrics"]
        cells = [name, str(result["num_problems"]), str(result["settings"]["k"])]
        for prefix in ("avg@", "maj@", "pass@"):
            # Of several k the largest.
            found = [estimate for key, estimate in metrics.items() if key.startswith(prefix)]
            cells.append("{value:.1%} [{low:.1%}, {high:.1%}]".format(**found[-1]) if found else "-")
        cells.append(f"{metrics['length']['value']:.0f}" if metrics else "-")
        for key in ("truncated", "no_answer"):
            cells.append(f"{metrics[key]['value']:.1%}" if metrics else "-")
        rows.append([*cells, str(result["num_failed"] + result["num_unscored"])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, result in content["benchmarks"].items():
        settings, failed, unscored = result["settings"], result["num_failed"], result["num_unscored"]
        if not (failed or unscored):
            continue
        without = settings["num_problems"] - result["num_problems"]
        lines.append(
            f"note: {name}: {failed + unscored} of {settings['num_problems'] * settings['k']} responses are in no "
            f"measure ({failed} without a response, which the same command asks again; {unscored} that could not be "
            f"scored), which leaves {without} of {settings['num_problems']} problems out"
        )
    return "\n".join(lines)
