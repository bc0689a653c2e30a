"""What is declared beside the code that it is about: sections of the configuration, and metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from dapo_mega.types import METRIC_PART


class Section(BaseModel):
    """Base of every configuration section: immutable, and unknown keys are errors. A key's docstring describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        for key in cls.model_fields.values():
            key.description = " ".join(key.description.split()) if key.description else None


def checked_function(given: str | None) -> str | None:
    """`given`. Raises ValueError unless it names a function of a file or of a module."""
    if given is None:
        return None
    place, colon, name = given.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ValueError(f"function {given!r} must be FILE.py:NAME or package.module:NAME, such as my_code.py:score")
    if not place.endswith(".py") and ("/" in place or not all(part.isidentifier() for part in place.split("."))):
        raise ValueError(
            f"function {given!r} names neither a file that ends in .py nor a module; give FILE.py:NAME or "
            f"package.module:NAME"
        )
    return given


FunctionPath = Annotated[str, "function", AfterValidator(checked_function)]
FunctionPathOrNone = Annotated[str | None, "function", AfterValidator(checked_function)]


Better = Literal["higher", "lower", ""]
"""The direction in which a metric's value improves, other things being equal; empty if neither does."""


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics whose name has a part in angle brackets.

    `members` gives the meaning of each value that the part in angle brackets can have; without members the part is a
    whole number, or any name if it is called <name>.
    """

    name: str
    unit: str
    meaning: str
    healthy: str = ""
    warning: str = ""
    action: str = ""
    members: Mapping[str, str] = field(default_factory=dict)
    better: Better = ""

    @property
    def prefix(self) -> str:
        """The part of the name before the slash."""
        return self.name.partition("/")[0]

    def text(self) -> str:
        """All that the entry says, as Markdown."""
        parts = [f"{self.meaning} Unit: {self.unit}."]
        parts += [f"Better: {self.better}."] if self.better else []
        parts += [f"Healthy: {self.healthy}."] if self.healthy else []
        advice = self.warning + (f" → {self.action}" if self.action else "")
        return "\n\n".join([*parts, *([f"Warning sign: {advice}."] if advice else [])])

    def names(self) -> list[str]:
        """All names that the entry describes. A family of numbers is one name, with its angle brackets."""
        return [re.sub("<.*>", member, self.name) for member in self.members] or [self.name]

    def describes(self, name: str) -> bool:
        """Whether `name`, as recorded, is this metric or one of the family."""
        part = METRIC_PART.pattern if "<name>" in self.name else r"\d+"
        pattern = "|".join(re.sub("<.*>", lambda _: part, known) for known in self.names())
        return bool(re.fullmatch(pattern, name))
