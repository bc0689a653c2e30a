"""Finds the Arrow type of each column from its values, one row after the other.

Rows of JSON files may differ in their fields and types. A column whose values have no common type becomes text: its
texts stay, other values are written as JSON.
"""

import datetime
import decimal
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dapo_mega.data.numbers import NumberText, plain
from dapo_mega.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

Kind = Literal["null", "bool", "int", "float", "text", "list", "record", "mixed"]

_MAX_FIELDS = 1000
_INT64 = range(-(2**63), 2**63)
_KINDS: tuple[tuple[type, Kind], ...] = ((bool, "bool"), (float, "float"), (str, "text"), (list, "list"))


@dataclass
class ColumnType:
    """The narrowest type of the values seen: `items` of a list, `fields` of a record in the order of first sight."""

    kind: Kind = "null"
    items: "ColumnType | None" = None
    fields: "dict[str, ColumnType]" = field(default_factory=dict)

    def see(self, value: Any) -> None:
        """Widen the type so that it holds `value`, which is plain (`plain_value`)."""
        kind = _kind(value)
        if "null" in (kind, self.kind):
            self.kind = kind if self.kind == "null" else self.kind
        elif kind != self.kind:
            self.kind = "float" if {kind, self.kind} == {"int", "float"} else "mixed"
        if self.kind == "list" and value is not None:
            self.items = self.items or ColumnType()
            for item in value:
                self.items.see(item)
        elif self.kind == "record" and value is not None:
            for name, inner in value.items():
                self.fields.setdefault(name, ColumnType()).see(inner)
            if len(self.fields) > _MAX_FIELDS:
                self.kind = "mixed"

    def fit(self, value: Any) -> Any:
        """`value` as this type stores it."""
        if value is None:
            return None
        if self.kind == "mixed":
            return _unicode(value if isinstance(value, str) else json.dumps(value))
        if self.kind == "text":
            return _unicode(value)
        if self.kind == "float":
            return float(value)
        if self.kind == "list" and self.items:
            return [self.items.fit(item) for item in value]
        if self.kind == "record":
            return {name: inner.fit(value.get(name)) for name, inner in self.fields.items()} or None
        return value

    def mixed(self, name: str = "") -> list[str]:
        """Dotted names of the columns that became text because their values have no common type."""
        found = [name] if self.kind == "mixed" else []
        if self.kind == "list" and self.items:
            found += self.items.mixed(name)
        if self.kind == "record":
            found += [n for key, inner in self.fields.items() for n in inner.mixed(f"{name}.{key}" if name else key)]
        return found

    def arrow(self) -> "pa.DataType":
        import pyarrow as pa

        if self.kind == "list":
            return pa.list_(pa.field("element", (self.items or ColumnType()).arrow()))
        if self.kind == "record" and self.fields:  # Parquet has no record without fields.
            return pa.struct({name: inner.arrow() for name, inner in self.fields.items()})
        text = pa.string()
        types = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "text": text, "mixed": text}
        return types.get(self.kind, pa.null())


def plain_value(value: Any, where: str) -> Any:
    """The value made of None, bool, int, float, str, lists and dicts; times and decimals become text.

    Raises `InputError` naming `where` for bytes, such as images.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, NumberText):
        return plain(value)
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, where) for item in value]
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    raise InputError(
        f"{where} holds a {type(value).__name__}, which is neither text nor number; name the columns to keep in "
        f"columns.extra, without this one"
    )


def _kind(value: Any) -> Kind:
    if value is None:
        return "null"
    if isinstance(value, int) and not isinstance(value, bool):
        return "int" if value in _INT64 else "mixed"
    return next((kind for type_, kind in _KINDS if isinstance(value, type_)), "record")


def _unicode(text: str) -> str:
    """The text, with halves of surrogate pairs, which no file can hold, as the replacement character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") if not text.isascii() else text
