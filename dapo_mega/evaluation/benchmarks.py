"""The benchmarks that evaluations know by name: where their problems are, how they are asked and graded."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from dapo_mega.config import DatasetConfig
from dapo_mega.config.paths import DATASET_SUFFIXES
from dapo_mega.data.readers import read_rows
from dapo_mega.errors import InputError

TEMPLATE = "dapo"
EXTRACTION = "auto"
"""The template that benchmarks are asked with, and the grader that reads the answers, unless others are given."""

_SUFFIX_ORDER = (".jsonl", ".json", ".parquet", ".arrow", ".csv")


@dataclass(frozen=True)
class Columns:
    """One form in which a benchmark's problems are in use; names as `DatasetConfig` has them."""

    prompt: str
    ground_truth: str
    style: Literal["verbatim", "boxed", "gsm8k"] = "verbatim"


_MESSAGES = Columns("prompt", "final_answer")
_DAPO = Columns("extra_info.raw_problem", "reward_model.ground_truth")


@dataclass(frozen=True)
class Benchmark:
    """A set of problems. `hub` is its name on the Hugging Face hub, with `split`. `stems` are usual names of its file,
    in lower case and without other characters than letters and digits; `columns` are its forms, the first that fits
    is used. `samples` is the k of avg@k, and `numeric_tolerance` the grader's."""

    name: str
    title: str
    num_problems: int
    hub: str
    split: str
    stems: tuple[str, ...]
    columns: tuple[Columns, ...]
    samples: int
    numeric_tolerance: float = 0.0


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            *("aime24", "AIME-2024", 30, "HuggingFaceH4/aime_2024", "train", ("aime24", "aime2024")),
            (Columns("problem", "answer"), _MESSAGES, _DAPO), samples=32,
        ),
        Benchmark(
            *("aime25", "AIME-2025", 30, "math-ai/aime25", "test", ("aime25", "aime2025")),
            (Columns("problem", "answer"), _MESSAGES, _DAPO), samples=32,
        ),
        Benchmark(
            *("amc23", "AMC23", 40, "math-ai/amc23", "test", ("amc23", "amc2023")),
            (Columns("problem", "answer"), Columns("question", "answer"), _MESSAGES), samples=32,
        ),
        Benchmark(
            *("math500", "MATH-500", 500, "HuggingFaceH4/MATH-500", "test", ("math500", "math500test")),
            (Columns("problem", "answer"), _MESSAGES), samples=4,
        ),
        Benchmark(
            *("minerva", "Minerva", 272, "math-ai/minervamath", "test", ("minervamath", "minerva", "minervamathtest")),
            (Columns("question", "answer"), Columns("problem", "answer"), Columns("problem", "solution", "boxed")),
            samples=4, numeric_tolerance=0.01,
        ),
        Benchmark(
            *("olympiadbench", "OlympiadBench", 674, "math-ai/olympiadbench", "test", ("olympiadbench", "olympiad")),
            (Columns("question", "final_answer"), Columns("problem", "answer"), _MESSAGES), samples=4,
        ),
        Benchmark(
            *("gsm8k", "GSM8K", 1319, "openai/gsm8k:main", "test", ("gsm8ktest", "gsm8k")),
            (Columns("question", "answer", "gsm8k"),), samples=1,
        ),
    )
}  # fmt: skip
"""By name, in the order in which results are shown."""


@dataclass(frozen=True)
class Source:
    """A benchmark, and the file or hub name that its problems are read from."""

    benchmark: Benchmark
    path: str


def sources(chosen: Sequence[str], folder: Path | None = None) -> list[Source]:
    """The sources of benchmarks that are given as `name` or `name=FILE`, in the order of `BENCHMARKS`. Those without a
    file are looked for in `folder`, and without a folder on the hub. Raises InputError."""
    if not chosen:
        raise InputError(f"no benchmark is given; choose of {', '.join(BENCHMARKS)}")
    found: dict[str, Source] = {}
    for text in chosen:
        name, _, given = text.partition("=")
        file = str(Path(given).expanduser()) if given else ""
        if name not in BENCHMARKS:
            near = difflib.get_close_matches(name, BENCHMARKS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"there is no benchmark {name!r}, only {', '.join(BENCHMARKS)}{hint}")
        benchmark = BENCHMARKS[name]
        if name in found:
            raise InputError(f"benchmark {name} is given twice; name each once")
        if file and not Path(file).exists():
            raise InputError(f"{text}: {file} does not exist; give a file with the problems of {benchmark.title}")
        found[name] = Source(benchmark, file or (str(_file_in(folder, benchmark)) if folder else benchmark.hub))
    return [found[name] for name in BENCHMARKS if name in found]


def dataset_of(
    source: Source, template: str, chat_template: bool, template_arguments: Mapping[str, Any] = MappingProxyType({})
) -> DatasetConfig:
    """How the benchmark's problems are read and asked. Raises InputError, naming the forms that are known, for a
    source whose first row has none of them."""
    bare = DatasetConfig(path=source.path, split=source.benchmark.split)
    first = next(read_rows(bare), None)
    if first is None:
        raise InputError(f"{source.path} has no rows; give a file with the problems of {source.benchmark.title}")
    # A null in the first row is told by whoever reads the rows.
    for has in (lambda name: first.optional(name) is not None, first.has):
        for columns in source.benchmark.columns:
            if not (has(columns.prompt) and has(columns.ground_truth)):
                continue
            return DatasetConfig.model_validate(
                {
                    **bare.model_dump(),
                    "columns": {"prompt": columns.prompt, "ground_truth": columns.ground_truth, "extra": ()},
                    "ground_truth_style": columns.style,
                    "template": template,
                    "chat_template": chat_template,
                    "template_arguments": dict(template_arguments),
                }
            )
    known = " or ".join(f"{columns.prompt} and {columns.ground_truth}" for columns in source.benchmark.columns)
    raise InputError(
        f"{first.where}: {source.benchmark.name} needs the columns {known}, and the row has {', '.join(first.values)}; "
        f"rename them, or give another file as {source.benchmark.name}=FILE"
    )


def _file_in(folder: Path, benchmark: Benchmark) -> Path:
    """The benchmark's file in the folder: of several the one whose name comes first in `stems`."""
    if not folder.is_dir():
        raise InputError(f"--data {folder} is no folder; give one that holds the benchmarks' files")
    files = [path for path in sorted(folder.iterdir()) if path.suffix in DATASET_SUFFIXES]
    for stem in benchmark.stems:
        fitting = [path for path in files if re.sub(r"[^a-z0-9]", "", path.stem.lower()) == stem]
        if fitting:
            return min(fitting, key=lambda path: (_SUFFIX_ORDER.index(path.suffix), path.name))
    looked = ", ".join(f"{stem}{suffix}" for stem in benchmark.stems for suffix in _SUFFIX_ORDER)
    raise InputError(
        f"{folder} holds no file of {benchmark.title} (looked for {looked}); give {benchmark.name}=FILE, or leave "
        f"--data out to load {benchmark.hub} from the hub"
    )
