"""Saved evaluations: the responses of one model to the problems of one or several benchmarks, from files of samples."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from dapo_mega.cli import print_once
from dapo_mega.errors import InputError
from dapo_mega.evaluation.measures import ProblemResponses
from dapo_mega.samples.files import StoredFile, samples_folder, stored_files
from dapo_mega.samples.table import account_of, errors_of_reading

_COLUMNS: Final = (
    *("prompt_index", "data_source", "prompt", "ground_truth"),
    *("answer", "correct", "length", "finish_reason"),
)
_WHAT_TO_GIVE: Final = (
    "give the folder of a run (RUN@STEP for one of its evaluations), the folder of results of dapo-mega evaluate, or "
    "one of their files evaluation_*.parquet"
)


@dataclass(frozen=True, order=True)
class Problem:
    """One problem: its number in the dataset, the prompt as the model got it, and the dataset's answer."""

    index: int
    prompt: str
    ground_truth: str


@dataclass(frozen=True, eq=False)
class SavedBenchmark:
    """The scored responses to each problem of one benchmark, and the settings under which they were sampled and judged
    (empty where the file does not say). `has_answers`: the grader reads answers. `num_asked`: the problems that were
    asked, as far as the file shows, also those without a scored response. `num_missing`: the responses that could not
    be had or scored."""

    settings: Mapping[str, Any]
    responses: Mapping[Problem, ProblemResponses]
    has_answers: bool
    num_asked: int
    num_missing: int


@dataclass(frozen=True, eq=False)
class SavedEvaluation:
    """One model's evaluation. `label` names it in tables and pictures."""

    label: str
    benchmarks: Mapping[str, SavedBenchmark]


def load_evaluations(sources: Sequence[str]) -> list[SavedEvaluation]:
    """The evaluations that the arguments of a command name: PATH or PATH@STEP. Raises InputError in one line."""
    found = [_find(source) for source in sources]
    labels = [label for label, _ in found]
    if len(set(labels)) < len(labels):
        labels = list(sources)
    if len(set(labels)) < len(labels):
        raise InputError(f"{sources[0]} is compared with itself; {_WHAT_TO_GIVE}")
    evaluations = []
    for label, (_, files) in zip(labels, found, strict=True):
        benchmarks: dict[str, SavedBenchmark] = {}
        for file in files:
            in_file = _read_file(file)
            if again := in_file.keys() & benchmarks.keys():
                raise InputError(f"{file} holds the benchmark {min(again)!r} again; give one of the folders alone")
            benchmarks |= in_file
        evaluations.append(SavedEvaluation(label, benchmarks))
    return evaluations


def _find(source: str) -> tuple[str, list[Path]]:
    """A label, and the files of one evaluation."""
    path, step = Path(source), None
    head, at, tail = source.rpartition("@")
    if at and not path.exists():
        if not tail.isdecimal():
            raise InputError(f"{source}: after @ stands the step of an evaluation, such as {head}@100")
        path, step = Path(head), int(tail)
    if path.is_file():
        return path.stem, [path]
    found = [file for file in sample_files(path) if file.is_evaluation]
    if not found:
        raise InputError(f"{path} holds no saved evaluation; {_WHAT_TO_GIVE}")
    steps = sorted({file.step for file in found})
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise InputError(f"{path} holds no evaluation after step {chosen}; there are {', '.join(map(str, steps))}")
    name = path.resolve().name
    return (name if len(steps) == 1 else f"{name}@{chosen}"), [file.path for file in found if file.step == chosen]


def sample_files(path: Path) -> list[StoredFile]:
    """The files of samples of a run, of results of `dapo-mega evaluate`, or in the folder itself. Raises InputError."""
    if not path.is_dir():
        raise InputError(f"{path} does not exist; {_WHAT_TO_GIVE}")
    folders = [samples_folder(path), path, *sorted(path.glob("*/samples"))]
    return [file for folder in folders for file in stored_files(folder)]


def _read_file(path: Path) -> dict[str, SavedBenchmark]:
    """The benchmarks of one file by the name that it has for them, or their `data_source`."""
    with errors_of_reading(path, _WHAT_TO_GIVE):
        metadata = pq.read_metadata(path)
        account = account_of(metadata.metadata)
        kind, table = account["kind"], pq.read_table(path, columns=list(_COLUMNS), page_checksum_verification=True)
        rows = table.to_pylist()
    if kind != "evaluation":
        raise InputError(f"{path} holds the groups of a training step, not an evaluation; {_WHAT_TO_GIVE}")
    settings = account.get("settings", {})
    by_name: dict[str, dict[Problem, list[dict[str, Any]]]] = {}
    for row in rows:
        name = settings.get("benchmark") or row["data_source"] or "evaluation"
        problem = Problem(row["prompt_index"], row["prompt"] or "", row["ground_truth"] or "")
        by_name.setdefault(name, {}).setdefault(problem, []).append(row)
    if not by_name:
        raise InputError(f"{path} holds no response; evaluate again")
    if not _has_checksums(path, metadata):
        print_once(f"note: {path} has no checksums, so a damaged byte in it would not be seen")
    return {name: _benchmark(path, settings, problems, len(by_name) > 1) for name, problems in by_name.items()}


def _has_checksums(path: Path, metadata: pq.FileMetaData) -> bool:
    """Whether the file's first page has one, which pyarrow does not say."""
    chunk = metadata.row_group(0).column(0)
    with path.open("rb") as file:
        file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        header = file.read(64)
    # Thrift's compact form: type and both sizes are fields 1 to 3, i32s; the checksum is field 4, if there is one.
    return bool(re.match(rb"(\x15[\x80-\xff]*[\x00-\x7f]){4}", header))


def _benchmark(
    path: Path,
    settings: Mapping[str, Any],
    problems: Mapping[Problem, Sequence[Mapping[str, Any]]],
    is_one_of_several: bool,
) -> SavedBenchmark:
    responses = {
        problem: found for problem in sorted(problems) if (found := ProblemResponses.of_rows(problems[problem]))
    }
    if not responses:
        raise InputError(f"{path}: no response was judged right or wrong; the reward must decide correctness")
    reads = (settings.get("grader") or {}).get("kind") == "answer"
    given = any(answer is not None for found in responses.values() for answer in found.answers)
    # Problems are numbered from 0 in a file of one benchmark; one that nobody answered has no row.
    num_rows = len(problems) if is_one_of_several else max(problem.index for problem in problems) + 1
    num_asked = settings.get("num_problems", num_rows)
    num_wanted = num_asked * settings.get("k", max(map(len, problems.values())))
    num_scored = sum(found.num_samples for found in responses.values())
    return SavedBenchmark(settings, responses, reads or given, num_asked, num_wanted - num_scored)
