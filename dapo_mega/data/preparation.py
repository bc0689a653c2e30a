"""Writes prepared data: folders atomically, and tables with the columns of DAPO-Math-17k."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_mega.atomic_files import read_json_object
from dapo_mega.data.arithmetic import ArithmeticDemonstration, Problem, prompt_text
from dapo_mega.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

RECORD = "preparation.json"
"""Kept in every prepared folder: the parameters it was made from and the files it held."""


def prepare_folder(
    folder: Path, parameters: Mapping[str, Any], write: Callable[[Path], None], force: bool = False
) -> bool:
    """Have `write` fill a new folder that appears at `folder` only when complete; returns whether it was written.

    A folder made earlier from the same `parameters` is left as it is (False). Raises `InputError` for one made from
    others or with files missing, unless `force`, and for a non-empty folder that was not prepared, always.
    """
    if not _must_write(folder, parameters, force):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        content = staging / "new"
        content.mkdir()
        write(content)
        files = sorted(str(file.relative_to(content)) for file in content.rglob("*") if file.is_file())
        record = {"parameters": parameters, "files": files}
        (content / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        _swap_in(content, folder, staging / "old")
    finally:
        shutil.rmtree(staging)
    return True


def problem_table(problems: Sequence[Problem]) -> pa.Table:
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


def demonstration_table(demonstrations: Sequence[ArithmeticDemonstration]) -> pa.Table:
    """Columns prompt, response and quality."""
    import pyarrow as pa

    schema = pa.schema({"prompt": pa.string(), "response": pa.string(), "quality": pa.string()})
    return pa.Table.from_pylist([vars(demonstration) for demonstration in demonstrations], schema=schema)


def _swap_in(content: Path, folder: Path, replaced: Path) -> None:
    if folder.exists():
        os.replace(folder, replaced)
    try:
        os.replace(content, folder)
    except OSError:
        if replaced.exists():
            os.replace(replaced, folder)
        raise


def _must_write(folder: Path, parameters: Mapping[str, Any], force: bool) -> bool:
    if not folder.exists():
        return True
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder to write to")
    record_path = folder / RECORD
    if not record_path.is_file():
        if any(folder.iterdir()):
            raise InputError(f"{folder} holds files that this command did not write; give another folder or empty it")
        return True
    if force:
        return True
    record = read_json_object(record_path, f"use --force to write {folder} again")
    made_from, files = record.get("parameters"), record.get("files")
    if not (isinstance(made_from, dict) and isinstance(files, list)):
        raise InputError(f"{record_path} is damaged; use --force to write {folder} again")
    missing = [file for file in files if not (folder / str(file)).is_file()]
    if missing:
        raise InputError(f"{folder} lacks {', '.join(map(str, missing))}; use --force to write it again")
    if made_from != parameters:
        different = ", ".join(
            f"{key}={made_from.get(key)!r} (now {parameters.get(key)!r})"
            for key in sorted({*made_from, *parameters})
            if made_from.get(key) != parameters.get(key)
        )
        raise InputError(f"{folder} was made with {different}; use --force to replace it, or give another folder")
    return False
