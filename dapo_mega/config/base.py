"""What every configuration section is, and small arithmetic that several need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every configuration section: immutable, and a typing mistake is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `defaults`, section by section."""
    result = dict(defaults)
    for key, value in given.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]
