"""Numbers of datasets as they were written, whatever type their column has."""

import decimal
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


class NumberText(str):
    """A number of a JSON file, as it was written there."""


class RoundedFloat(float):
    """A whole number of a column of floats, so large that the column may hold it in place of a neighbour."""


NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""What JSON files hold as `NumberText` for values that are none."""


def plain(value: Any) -> Any:
    """A copy with numbers as int and float; integers too long for Python to read stay text."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, NumberText):
        try:
            return json.loads(value)
        except ValueError:
            return str(value)
    return float(value) if isinstance(value, RoundedFloat) else value


def number_text(value: float | decimal.Decimal) -> str:
    """Digits without exponent; of a whole float without decimal point, of a decimal as many as it has."""
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    return format(decimal.Decimal(repr(value + 0.0)), "f").removesuffix(".0")


def arrow_records(batch: "pa.RecordBatch") -> Iterator[dict[str, Any]]:
    """The rows of a batch. Floats are the shortest number that their column stores so (0.1 in float32 is 0.1, not
    0.10000000149), `RoundedFloat` where that may not be what was written."""
    names = batch.schema.names
    columns: list[Sequence[Any]] = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        exact, values = _exact(field.type), column.to_pylist()
        columns.append([exact(value) for value in values] if exact else values)
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))


_Exact = Callable[[Any], Any]


@cache
def _exact(kind: "pa.DataType") -> _Exact | None:
    """What brings a Python value of this Arrow type to its exact form; None where it has it."""
    import pyarrow as pa

    found: _Exact | None = None
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _exact(kind.value_type)
    if pa.types.is_floating(kind):
        found = partial(_shortest, np.dtype(f"f{kind.bit_width // 8}"))
    elif pa.types.is_struct(kind):
        fields = {field.name: exact for field in kind if (exact := _exact(field.type))}
        found = partial(_with_fields, fields) if fields else None
    elif pa.types.is_map(kind):  # A list of pairs.
        pair = (_exact(kind.key_type), _exact(kind.item_type))
        found = partial(_pairs, *pair) if any(pair) else None
    elif pa.types.is_nested(kind) and not pa.types.is_union(kind):
        inner = _exact(kind.value_type)
        found = partial(_items, inner) if inner else None
    return (lambda value: None if value is None else found(value)) if found else None


def _shortest(width: np.dtype[Any], value: float) -> float:
    number = value if width.itemsize == 8 else float(str(width.type(value)))
    limits = np.finfo(width)
    if not number.is_integer() or abs(number) < 2 ** (limits.nmant + 1):
        return number
    # A number of up to `precision` digits comes back as it was written; one of more may be another's neighbour.
    return RoundedFloat(number) if len(number_text(number).lstrip("-").rstrip("0")) > limits.precision else number


def _with_fields(exact: Mapping[str, _Exact], value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: exact[name](item) if name in exact else item for name, item in value.items()}


def _pairs(key: _Exact | None, item: _Exact | None, value: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(key(k) if key else k, item(v) if item else v) for k, v in value]


def _items(exact: _Exact, value: Sequence[Any]) -> list[Any]:
    return [exact(item) for item in value]
