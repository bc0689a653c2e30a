"""One entry of the catalogue."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics whose name has a part in angle brackets.

    `healthy` is empty if no value is good or bad in general. `members` gives the meaning of each value that the part
    in angle brackets can have; without members the part is a whole number, or any name if it is called <name>.
    `better` is the direction in which the value improves, other things being equal; empty if neither does. A histogram
    shows how values are distributed; all others are one number per step.
    """

    name: str
    unit: str
    meaning: str
    healthy: str = ""
    warning: str = ""
    action: str = ""
    members: Mapping[str, str] = field(default_factory=dict)
    better: Literal["higher", "lower", ""] = ""
    is_histogram: bool = False

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
        part = r"[A-Za-z0-9][A-Za-z0-9_.@-]*" if "<name>" in self.name else r"\d+"
        pattern = "|".join(re.sub("<.*>", lambda _: part, known) for known in self.names())
        return bool(re.fullmatch(pattern, name))
