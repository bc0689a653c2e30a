"""Rows as an Arrow table that is written to parquet, and what it can be read back to.

Every column has the same type in every file, so that `datasets` joins any of them. README.md describes each.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dapo_mega import trajectory_records
from dapo_mega.errors import InputError
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.rows import FORMAT, Row, SampleFile
from dapo_mega.trajectory_records import columns_of, is_default, plain, restored
from dapo_mega.types import ScoredTrajectory, Trajectory

_METADATA_KEY = b"dapo_mega"

_FLOATS, _INTEGERS = pa.list_(pa.float32()), pa.list_(pa.int32())
_STRUCTS = {
    "versions": (("version", pa.int64()), ("end", pa.int32())),
    "engines": (("engine", pa.string()), ("end", pa.int32())),
    "parts": (("name", pa.string()), ("value", pa.float64())),
    "turns": (("end", pa.int32()), ("finish_reason", pa.string()), ("parts", pa.string())),
}
_TYPES = {
    **{"flag": pa.bool_(), "integer": pa.int64(), "number": pa.float64(), "text": pa.string()},
    **{"integers": _INTEGERS, "int32": _INTEGERS, "float32": _FLOATS, "bool": pa.list_(pa.bool_())},
    **{kind: pa.list_(pa.struct(members)) for kind, members in _STRUCTS.items()},
}
# What is known beside the trajectory itself.
_BESIDE = {
    **{"step": pa.int64(), "kind": pa.string(), "outcome": pa.string(), "kept": pa.bool_(), "group": pa.int64()},
    **{"is_greedy": pa.bool_(), "prompt_index": pa.int64(), "data_source": pa.string(), "prompt": pa.string()},
    **{"ground_truth": pa.string(), "length": pa.int32(), "finish_reason": pa.string(), "weight_version": pa.int64()},
    **{"sample": pa.int32(), "advantage": pa.float64(), "in_loss": pa.bool_(), "prompt_ids": _INTEGERS},
    **{"tokens": pa.list_(pa.string()), "trainer_logprobs": _FLOATS, "update_logprobs": _FLOATS},
    **{"advantages": _FLOATS},
}
_ORDER = (
    *("step", "kind", "outcome", "kept", "group", "request_id", "is_greedy", "prompt_index", "data_source", "prompt"),
    *("ground_truth", "response", "answer", "correct", "reward", "accuracy_reward", "parts", "length", "finish_reason"),
    *("weight_version", "version_spans", "engine_spans", "sample", "advantage", "in_loss", "prompt_ids", "token_ids"),
    *("tokens", "engine_logprobs", "trainer_logprobs", "update_logprobs", "advantages"),
)
"""Of the columns that a file always has; others follow."""


def schema(trajectories: Sequence[Trajectory] = ()) -> pa.Schema:
    """The columns of a file of these trajectories."""
    own = {
        column.in_files: _TYPES[column.kind]
        for column in columns_of(trajectory_records.SCORED)
        if column.is_in_files
        if not column.is_optional or not all(is_default(trajectory, column) for trajectory in trajectories)
    }
    types = {**_BESIDE, **own}
    return pa.schema([(name, types[name]) for name in (*_ORDER, *(name for name in own if name not in _ORDER))])


def to_table(file: SampleFile, pieces: TokenPieces) -> pa.Table:
    """The file's rows; `account` is in the schema's metadata."""
    rows = file.rows
    training = [row.training for row in rows]
    values: dict[str, Any] = {
        "step": [file.step] * len(rows),
        "kind": [file.kind] * len(rows),
        "outcome": [row.outcome for row in rows],
        "kept": [row.is_kept for row in rows],
        "group": [row.group for row in rows],
        "is_greedy": [row.is_greedy for row in rows],
        "prompt_index": [row.prompt.index for row in rows],
        "data_source": [_text(row.prompt.data_source) for row in rows],
        "prompt": [_text(row.prompt.text) for row in rows],
        "ground_truth": [_text(row.prompt.ground_truth) for row in rows],
        "length": [row.trajectory.length for row in rows],
        "finish_reason": [row.trajectory.finish_reason for row in rows],
        "weight_version": [row.trajectory.weight_version for row in rows],
        "sample": [t.sample if t else None for t in training],
        "advantage": [t.advantage if t else None for t in training],
        "in_loss": [t.in_loss if t else None for t in training],
        "prompt_ids": _lists([row.prompt.token_ids for row in rows], np.int32),
        "tokens": _pieces(rows, pieces),
        "trainer_logprobs": _lists([t.trainer_logprobs if t else None for t in training], np.float32),
        "update_logprobs": _lists([t.update_logprobs if t else None for t in training], np.float32),
        "advantages": _lists([t.advantages if t else None for t in training], np.float32),
    }
    for column in filter(lambda column: column.is_in_files, columns_of(trajectory_records.SCORED)):
        of_rows = [getattr(row.trajectory, column.field, None) for row in rows]
        values[column.in_files] = (
            _lists(of_rows, column.dtype)
            if column.dtype
            else [None if value is None else _stored(column.kind, value) for value in of_rows]
        )
    # The texts that were scored; those of unscored responses are decoded here.
    values["response"] = [
        _text(row.scored.text if row.scored else "".join(pieces.of(row.trajectory.token_ids).to_pylist()))
        for row in rows
    ]
    columns = schema([row.trajectory for row in rows])
    arrays = [
        found if isinstance(found := values[field.name], pa.Array) else pa.array(found, field.type) for field in columns
    ]
    account = {"format": FORMAT, "step": file.step, "kind": file.kind, **file.account}
    return pa.Table.from_arrays(arrays, schema=columns.with_metadata(metadata_of(account)))


def _stored(kind: str, value: Any) -> Any:
    """A value of a trajectory's column as Arrow takes it."""
    if kind == "text":
        return _text(value)
    if kind not in _STRUCTS:
        return value
    items = plain(kind, value)
    if kind == "parts":
        items = [(_text(name), number) for name, number in items.items()]
    elif kind == "turns":
        items = [(stop, finish, json.dumps(parts)) for stop, finish, parts in items]
    names = [name for name, _ in _STRUCTS[kind]]
    return [dict(zip(names, item, strict=True)) for item in items]


def trajectory_of(row: Mapping[str, Any]) -> ScoredTrajectory:
    """The trajectory of a file's row, as `to_pylist` gives it."""
    values = {
        c.field: _read(c.kind, row[c.in_files]) for c in columns_of(trajectory_records.SCORED) if c.in_files in row
    }
    return restored(trajectory_records.SCORED, values, row["finish_reason"], row["weight_version"])


def _read(kind: str, value: Any) -> Any:
    """The inverse of `_stored`."""
    if kind not in _STRUCTS or value is None:
        return value
    items = [tuple(item.values()) for item in value]
    if kind == "turns":
        return [(stop, finish, json.loads(parts)) for stop, finish, parts in items]
    return dict(items) if kind == "parts" else items


@contextlib.contextmanager
def errors_of_reading(path: Path, remedy: str) -> Iterator[None]:
    """Raise InputError, which names the file and ends with `remedy`, for what reading a damaged one raises."""
    try:
        yield
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read ({' '.join(str(error).split())}); {remedy}") from error


def metadata_of(account: Mapping[str, Any]) -> dict[bytes, bytes]:
    """The metadata of a file with this account, which `account_of` reads."""
    return {_METADATA_KEY: json.dumps(account).encode()}


def account_of(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """The account in a file's metadata. Raises ValueError where there is none of this format."""
    found = (metadata or {}).get(_METADATA_KEY)
    account = json.loads(found) if found else None
    if not isinstance(account, dict) or account.get("format") != FORMAT:
        raise ValueError("it is no file of samples of this version")
    return account


def _text(text: str | None) -> str | None:
    """The text without lone surrogates, which JSON data may bring and no file can hold."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _pieces(rows: Sequence[Row], pieces: TokenPieces) -> pa.Array:
    ids = [row.trajectory.token_ids for row in rows]
    offsets = np.cumsum([0, *(len(i) for i in ids)]).astype(np.int32)
    joined = np.concatenate([np.empty(0, np.int32), *ids])
    return pa.ListArray.from_arrays(pa.array(offsets), pieces.of(joined))


def _lists(arrays: Sequence[npt.NDArray[Any] | None], dtype: type) -> pa.Array:
    """A list column of these arrays, null where there is none."""
    offsets = np.cumsum([0, *(0 if a is None else len(a) for a in arrays)]).astype(np.int32)
    joined = np.concatenate([np.empty(0, dtype), *(a for a in arrays if a is not None)])
    is_null = np.array([a is None for a in arrays], dtype=bool)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(joined.astype(dtype)), mask=pa.array(is_null))
