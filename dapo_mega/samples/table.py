"""Rows as an Arrow table that is written to parquet, and what it can be read back to.

Every column has the same type in every file, so that `datasets` joins any of them. README.md describes each.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dapo_mega.errors import InputError
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.rows import FORMAT, Row, SampleFile

METADATA_KEY = b"dapo_mega"

_FLOATS, _INTEGERS = pa.list_(pa.float32()), pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("kind", pa.string()),
        ("outcome", pa.string()),
        ("kept", pa.bool_()),
        ("group", pa.int64()),
        ("request_id", pa.int64()),
        ("is_greedy", pa.bool_()),
        ("prompt_index", pa.int64()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),
        ("response", pa.string()),
        ("answer", pa.string()),
        ("correct", pa.bool_()),
        ("reward", pa.float64()),
        ("accuracy_reward", pa.float64()),
        ("parts", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))),
        ("length", pa.int32()),
        ("finish_reason", pa.string()),
        ("weight_version", pa.int64()),
        ("version_spans", pa.list_(pa.struct([("version", pa.int64()), ("end", pa.int32())]))),
        ("engine_spans", pa.list_(pa.struct([("engine", pa.string()), ("end", pa.int32())]))),
        ("sample", pa.int32()),
        ("advantage", pa.float64()),
        ("in_loss", pa.bool_()),
        ("prompt_ids", _INTEGERS),
        ("token_ids", _INTEGERS),
        ("tokens", pa.list_(pa.string())),
        ("engine_logprobs", _FLOATS),
        ("trainer_logprobs", _FLOATS),
        ("update_logprobs", _FLOATS),
        ("advantages", _FLOATS),
    ]
)


def to_table(file: SampleFile, pieces: TokenPieces) -> pa.Table:
    """The file's rows; `account` is in the schema's metadata."""
    rows = file.rows
    scored = [row.scored for row in rows]
    training = [row.training for row in rows]
    versions = [row.response.version_spans or ((row.response.weight_version, _length(row)),) for row in rows]
    columns = {
        "step": [file.step] * len(rows),
        "kind": [file.kind] * len(rows),
        "outcome": [row.outcome for row in rows],
        "kept": [row.is_kept for row in rows],
        "group": [row.group for row in rows],
        "request_id": [row.response.request_id for row in rows],
        "is_greedy": [row.is_greedy for row in rows],
        "prompt_index": [row.prompt.index for row in rows],
        "data_source": [_text(row.prompt.data_source) for row in rows],
        "prompt": [_text(row.prompt.text) for row in rows],
        "ground_truth": [_text(row.prompt.ground_truth) for row in rows],
        "response": _responses(rows, pieces),
        "answer": [_text(s.answer) if s else None for s in scored],
        "correct": [s.correct if s else None for s in scored],
        "reward": [s.reward if s else None for s in scored],
        "accuracy_reward": [s.accuracy_reward if s else None for s in scored],
        "parts": [[{"name": _text(n), "value": v} for n, v in s.parts.items()] if s else None for s in scored],
        "length": [_length(row) for row in rows],
        "finish_reason": [row.response.finish_reason for row in rows],
        "weight_version": [row.response.weight_version for row in rows],
        "version_spans": [[{"version": v, "end": end} for v, end in spans] for spans in versions],
        "engine_spans": [[{"engine": url, "end": end} for url, end in row.response.engine_spans] for row in rows],
        "sample": [t.sample if t else None for t in training],
        "advantage": [t.advantage if t else None for t in training],
        "in_loss": [t.in_loss if t else None for t in training],
        "prompt_ids": _lists([row.prompt.token_ids for row in rows], np.int32),
        "token_ids": _lists([row.response.token_ids for row in rows], np.int32),
        "tokens": _pieces(rows, pieces),
        "engine_logprobs": _lists([row.response.logprobs for row in rows], np.float32),
        "trainer_logprobs": _lists([t.trainer_logprobs if t else None for t in training], np.float32),
        "update_logprobs": _lists([t.update_logprobs if t else None for t in training], np.float32),
        "advantages": _lists([t.advantages if t else None for t in training], np.float32),
    }
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values, SCHEMA.field(name).type)
        for name, values in columns.items()
    ]
    account = {"format": FORMAT, "step": file.step, "kind": file.kind, **file.account}
    return pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata({METADATA_KEY: json.dumps(account).encode()}))


@contextlib.contextmanager
def errors_of_reading(path: Path, remedy: str) -> Iterator[None]:
    """Raise InputError, which names the file and ends with `remedy`, for what reading a damaged one raises."""
    try:
        yield
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read ({' '.join(str(error).split())}); {remedy}") from error


def account_of(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """The account in a file's metadata. Raises ValueError where there is none of this format."""
    found = (metadata or {}).get(METADATA_KEY)
    account = json.loads(found) if found else None
    if not isinstance(account, dict) or account.get("format") != FORMAT:
        raise ValueError("it is no file of samples of this version")
    return account


def _length(row: Row) -> int:
    return len(row.response.token_ids)


def _text(text: str | None) -> str | None:
    """The text without lone surrogates, which JSON data may bring and no file can hold."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _responses(rows: Sequence[Row], pieces: TokenPieces) -> list[str | None]:
    """The texts that were scored; those of unscored responses are decoded here."""
    return [
        _text(row.scored.text if row.scored else "".join(pieces.of(row.response.token_ids).to_pylist())) for row in rows
    ]


def _pieces(rows: Sequence[Row], pieces: TokenPieces) -> pa.Array:
    ids = [row.response.token_ids for row in rows]
    offsets = np.cumsum([0, *(len(i) for i in ids)]).astype(np.int32)
    joined = np.concatenate([np.empty(0, np.int32), *ids])
    return pa.ListArray.from_arrays(pa.array(offsets), pieces.of(joined))


def _lists(arrays: Sequence[npt.NDArray[Any] | None], dtype: type) -> pa.Array:
    """A list column of these arrays, null where there is none."""
    offsets = np.cumsum([0, *(0 if a is None else len(a) for a in arrays)]).astype(np.int32)
    joined = np.concatenate([np.empty(0, dtype), *(a for a in arrays if a is not None)])
    is_null = np.array([a is None for a in arrays], dtype=bool)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(joined.astype(dtype)), mask=pa.array(is_null))
