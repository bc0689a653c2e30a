"""Tables of made-up problems and demonstrations, with the columns of DAPO-Math-17k."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dapo_mega.data.arithmetic import ArithmeticDemonstration, Problem, prompt_text

if TYPE_CHECKING:
    import pyarrow as pa


def problem_table(problems: Sequence[Problem]) -> "pa.Table":
    """The columns of DAPO-Math-17k, with their types; the prompt is the bare problem (template as_is)."""
    import pyarrow as pa

    schema = pa.schema(
        {
            "data_source": pa.string(),
            "prompt": pa.list_(pa.field("element", pa.struct({"content": pa.string(), "role": pa.string()}))),
            "ability": pa.string(),
            "reward_model": pa.struct({"ground_truth": pa.string(), "style": pa.string()}),
            "extra_info": pa.struct({"index": pa.int64(), "raw_problem": pa.string(), "split": pa.null()}),
        }
    )
    records = [
        {
            "data_source": "arithmetic",
            "prompt": [{"content": prompt_text(problem), "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(problem.answer), "style": "rule"},
            "extra_info": {"index": index, "raw_problem": prompt_text(problem), "split": None},
        }
        for index, problem in enumerate(problems)
    ]
    return pa.Table.from_pylist(records, schema=schema)


def demonstration_table(demonstrations: Sequence[ArithmeticDemonstration]) -> "pa.Table":
    """Columns prompt, response and quality."""
    import pyarrow as pa

    schema = pa.schema({"prompt": pa.string(), "response": pa.string(), "quality": pa.string()})
    return pa.Table.from_pylist([vars(demonstration) for demonstration in demonstrations], schema=schema)
