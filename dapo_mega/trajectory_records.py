"""Trajectories as records of checkpoints and rows of files, from the columns that the fields of `Trajectory` declare.

A new column is its declaration and what fills it: every reader and writer asks `columns_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dapo_mega.types import ScoredTrajectory, Trajectory, Turn, no_logprobs, no_routes, no_tokens

Record = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]
T = TypeVar("T", bound=Trajectory)

SCORED: type[ScoredTrajectory] = ScoredTrajectory
"""The class whose columns files of samples have."""
_OF_TOKENS = {"int32": np.int32, "float32": np.float32, "bool": np.bool_}


@dataclass(frozen=True)
class Column:
    """A field: `key` is its name in checkpoints, `in_files` in files of samples; `dtype` is set where it is an array
    along the tokens."""

    field: str
    kind: str
    key: str
    in_files: str
    is_optional: bool
    dtype: type[np.generic] | None

    @property
    def is_plain(self) -> bool:
        """Whether a value is one number, text or flag."""
        return self.kind in ("flag", "integer", "number", "text")

    @property
    def is_in_files(self) -> bool:
        """Whether files of samples have it. Routes are a hundred times as large as all else of a trajectory."""
        return self.kind != "routes"


def columns_of(kind: type[Trajectory]) -> list[Column]:
    """The columns of a class, in order."""
    return [
        Column(
            field=f.name,
            kind=f.metadata["kind"],
            key="request_id" if f.name == "id" else f.name,
            in_files=f.metadata["in_files"] or f.name,
            is_optional=f.metadata["optional"],
            dtype=_OF_TOKENS.get(f.metadata["kind"]),
        )
        for f in fields(kind)
    ]


def _absent(num_rows: int, finish_reason: Any, weight_version: Any) -> dict[str, Any]:
    """What optional columns are where they are absent: one turn, by one version of the weights."""
    return {
        "sampled": np.ones(num_rows, np.bool_),
        "turns": (Turn(num_rows, finish_reason),),
        "version_spans": ((weight_version, num_rows),),
        "engine_spans": (),
        "segments": (num_rows,),
        "stop": "",
        "routes": no_routes(),
        "teacher_logprobs": no_logprobs(),
        "teacher_top_ids": no_tokens(),
        "teacher_top_logprobs": no_logprobs(),
    }


def is_default(trajectory: Trajectory, column: Column) -> bool:
    """Whether an optional column need not be written for this trajectory."""
    if not column.is_optional:
        return False
    default: Any = _absent(trajectory.num_rows, trajectory.finish_reason, 0).get(column.field)
    value = getattr(trajectory, column.field)
    if column.kind == "routes":
        return not value.size
    return bool(np.array_equal(value, default)) if column.dtype else bool(value == default)


def plain(kind: str, value: Any) -> Any:
    """A value of a column that is no array along tokens as JSON has it: of routes the shape."""
    if kind == "routes":
        return list(value.shape)
    if kind == "parts":
        return None if value is None else dict(value)
    if kind == "turns":
        return [[turn.stop, turn.finish_reason, dict(turn.parts)] for turn in value]
    return [list(item) for item in value] if kind in ("versions", "engines") else value


def restored(kind: type[T], values: Mapping[str, Any], finish_reason: Any, weight_version: Any) -> T:
    """A trajectory from `plain` values and arrays by field; `finish_reason` and `weight_version` are for what lacks
    turns or versions."""
    found: dict[str, Any] = _absent(len(values["token_ids"]), finish_reason, weight_version)
    for column in columns_of(kind):
        value: Any = values.get(column.field)
        if column.field not in values or (column.field in found and (value is None or not len(value))):
            continue  # Earlier versions lack some.
        if column.kind == "turns":
            value = tuple(Turn(stop, finish, MappingProxyType(dict(parts))) for stop, finish, parts in value)
        elif column.kind in ("versions", "engines"):
            value = tuple((name, end) for name, end in value)
        elif column.kind == "integers":
            value = tuple(value)
        elif column.kind == "parts":
            value = MappingProxyType(dict(value or {}))
        found[column.field] = value if column.dtype is None else np.asarray(value, column.dtype)
    return kind(**found)


def pack_trajectories(trajectories: Sequence[Trajectory], name: str) -> tuple[list[Record], Arrays]:
    """For a checkpoint: one JSON record per trajectory, and for every column along tokens, and for routes, an array
    `name/column` of all, concatenated; a record's `sizes` are of those that have not one value a token. All are of one
    class."""
    columns = columns_of(type(trajectories[0]) if trajectories else Trajectory)
    of_tokens = [c for c in columns if c.dtype and not (c.is_optional and all(is_default(t, c) for t in trajectories))]
    records = [
        {
            "length": trajectory.num_rows,
            "finish_reason": trajectory.finish_reason,
            "weight_version": trajectory.weight_version,
            **({"sizes": sizes} if (sizes := _sizes(trajectory, of_tokens)) else {}),
            **{
                c.key: plain(c.kind, getattr(trajectory, c.field))
                for c in columns
                if not c.dtype and not is_default(trajectory, c)
            },
        }
        for trajectory in trajectories
    ]
    arrays = {
        f"{name}/{c.key}": np.concatenate([np.empty(0, c.dtype), *(getattr(t, c.field) for t in trajectories)])
        for c in of_tokens
    }
    if any(trajectory.routes.size for trajectory in trajectories):
        arrays[f"{name}/routes"] = np.concatenate([trajectory.routes.ravel() for trajectory in trajectories])
    return records, arrays


def _sizes(trajectory: Trajectory, columns: Sequence[Column]) -> dict[str, int]:
    """How many values those of the columns have that have not one a token."""
    found = {c.key: len(getattr(trajectory, c.field)) for c in columns}
    return {key: size for key, size in found.items() if size != trajectory.num_rows}


def unpack_trajectories(
    records: Sequence[Mapping[str, Any]], arrays: Mapping[str, npt.NDArray[Any]], name: str, kind: type[T]
) -> list[T]:
    """The inverse of `pack_trajectories`, also for checkpoints that lack some columns."""
    columns = columns_of(kind)
    of_tokens = {}
    for c in (c for c in columns if c.dtype and f"{name}/{c.key}" in arrays):
        sizes = [saved.get("sizes", {}).get(c.key, saved["length"]) for saved in records]
        of_tokens[c.field] = np.split(arrays[f"{name}/{c.key}"], np.cumsum(sizes, dtype=np.int64))
    shapes = [saved.get("routes", (0, 0, 0)) for saved in records]
    route_ends = np.cumsum([0, *map(math.prod, shapes)])
    flat_routes = arrays.get(f"{name}/routes", np.empty(0, np.int16))
    return [
        restored(
            kind,
            {
                **{c.field: saved[c.key] for c in columns if not c.dtype and c.key in saved},
                **{field: parts[i] for field, parts in of_tokens.items()},
                "routes": flat_routes[route_start:route_end].reshape(shape),
            },
            saved["finish_reason"],
            saved["weight_version"],
        )
        for i, (saved, shape, (route_start, route_end)) in enumerate(
            zip(records, shapes, pairwise(route_ends), strict=True)
        )
    ]
