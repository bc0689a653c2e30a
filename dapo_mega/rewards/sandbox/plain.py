"""Values that a solution returns, as JSON: only plain data is taken over, whatever its classes claim to be.

A number of a class with an own `__eq__`, for instance, arrives as the number alone.
"""

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_EXACT_IN_JSON = 2**53

Encode = Callable[[Any], Any]


def encode(value: Any, other: Encode) -> Any:
    """The value as what JSON can hold. `other` encodes what is not plain data; it may raise TypeError."""
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if issubclass(kind, int):
        number = int.__int__(value)
        return number if abs(number) < _EXACT_IN_JSON else {"int": hex(number)}
    if issubclass(kind, float):
        real = float.__float__(value)
        return real if math.isfinite(real) else {"float": repr(real)}
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, list):
        return [encode(item, other) for item in list.__iter__(value)]
    if issubclass(kind, tuple):
        return {"tuple": [encode(item, other) for item in tuple.__iter__(value)]}
    if issubclass(kind, dict):
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in dict.items(value)]}
    for base in (set, frozenset):
        if issubclass(kind, base):
            return {base.__name__: [encode(item, other) for item in base.__iter__(value)]}
    if kind is bytes or kind is bytearray:
        return {kind.__name__: value.hex()}
    if kind is complex:
        return {"complex": repr(value)}
    if kind is Fraction or kind is Decimal:
        return {kind.__name__: str(value)}
    if kind.__module__ == "numpy" and hasattr(kind, "tolist"):
        return encode(value.tolist(), other)
    return other(value)


def decode(value: Any, other: Encode) -> Any:
    """The value that `encode` was given. `other` decodes what it had encoded. Raises ValueError for anything else."""
    if isinstance(value, list):
        return [decode(item, other) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("not an encoded value")
    ((kind, content),) = value.items()
    try:
        if kind == "dict":
            return {decode(key, other): decode(item, other) for key, item in content}
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind]([decode(item, other) for item in content])
        if kind in _SCALARS:
            return _SCALARS[kind](content)
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"not an encoded {kind}: {error}") from None
    return other(value)


_COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_SCALARS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16), "float": float, "complex": complex, "Decimal": Decimal,
    "bytes": bytes.fromhex, "bytearray": bytearray.fromhex,
    "Fraction": lambda text: Fraction(*map(int, text.split("/"))),
}  # fmt: skip
