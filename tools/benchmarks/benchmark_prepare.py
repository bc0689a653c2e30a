"""Prepares a dataset of made-up problems in a child process: wall clock, CPU seconds and peak memory.

python tools/benchmark.py prepare --rows 2000000 --distinct 17000     # repeated as in the public DAPO-Math-17k
python tools/benchmark.py prepare --rows 2000000 --distinct 2000000   # all different

The columns are those of DAPO-Math-17k. One problem in a hundred is an earlier one with a word changed, and one
evaluation set of 500 problems is kept out. Peak memory is the largest resident set of the child.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_INSTRUCTION = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)
_TOOL = Path(__file__).resolve().parents[1] / "prepare_data.py"
_NUM_WORDS = 4000
_BATCH = 10_000
_EVALUATION_PROBLEMS = 500


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--distinct", type=int, default=1_000)
    parser.add_argument("--words", type=int, default=45, help="words of a problem")
    parser.add_argument("--seed", type=int, default=0)
    print("\n".join(run(parser.parse_args(argv))))


def run(options: argparse.Namespace) -> list[str]:
    """The report's lines, a Markdown table."""
    with tempfile.TemporaryDirectory() as folder:
        source, evaluation, output = Path(folder, "rows.parquet"), Path(folder, "test.jsonl"), Path(folder, "out")
        _write_rows(source, options)
        evaluated = _problems(random.Random(options.seed + 1), _EVALUATION_PROBLEMS, options.words)
        evaluation.write_text("".join(json.dumps({"problem": problem}) + "\n" for problem in evaluated))
        command = [sys.executable, str(_TOOL), "dataset", str(source), "--output", str(output)]
        begin = time.perf_counter()
        subprocess.run([*command, "--decontaminate", str(evaluation)], check=True)
        wall = time.perf_counter() - begin
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        num_rows = json.loads((output / "card.json").read_text())["num_rows"]
        size = source.stat().st_size
    return [
        "| rows | distinct | file, MB | rows kept | wall, s | CPU, s | peak memory, MB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| {options.rows} | {options.distinct} | {size / 1e6:.0f} | {num_rows} | {wall:.0f} "
        f"| {used.ru_utime + used.ru_stime:.0f} | {used.ru_maxrss / 1e3:.0f} |",
    ]


def _write_rows(path: Path, options: argparse.Namespace) -> None:
    schema = pa.schema(
        {
            "data_source": pa.string(),
            "prompt": pa.list_(pa.struct({"content": pa.string(), "role": pa.string()})),
            "ability": pa.string(),
            "reward_model": pa.struct({"ground_truth": pa.string(), "style": pa.string()}),
            "extra_info": pa.struct({"index": pa.int64()}),
        }
    )
    with pq.ParquetWriter(path, schema) as writer:
        batch = []
        for number in range(options.rows):
            if number % options.distinct == 0:  # The same problems again, made anew rather than kept.
                problems = _problems(random.Random(options.seed), options.distinct, options.words)
            batch.append(_row(number, next(problems)))
            if len(batch) == _BATCH or number == options.rows - 1:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                batch = []


def _row(number: int, problem: str) -> dict[str, object]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": _INSTRUCTION.format(problem), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(problem.count(" ")), "style": "rule"},
        "extra_info": {"index": number},
    }


def _problems(draw: random.Random, number: int, num_words: int) -> Iterator[str]:
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(_NUM_WORDS)]
    # A few words are frequent, as in any language.
    weights = [1 / (place + 1) for place in range(_NUM_WORDS)]
    problem: list[str] = []
    for index in range(number):
        if index % 100 == 99:
            changed = list(problem)
            changed[0] = draw.choice(words)
            yield " ".join(changed)
            continue
        problem = draw.choices(words, weights, k=num_words - 6)
        problem += [f"${draw.randint(2, 999)}$", "and", f"$\\frac{{{draw.randint(1, 99)}}}{{7}}$", "find", "$x^2$", "?"]
        yield " ".join(problem)


if __name__ == "__main__":
    main()
