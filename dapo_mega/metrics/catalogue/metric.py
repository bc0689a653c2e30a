"""One entry of the catalogue."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics whose name has a part in angle brackets.

    `healthy` is empty if no value is good or bad in general. `members` gives the meaning of each value that the part
    in angle brackets can have; without members the part is a whole number.
    """

    name: str
    unit: str
    meaning: str
    healthy: str = ""
    warning: str = ""
    action: str = ""
    members: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """The part of the name before the slash."""
        return self.name.partition("/")[0]

    def names(self) -> list[str]:
        """All names that the entry describes. A family of numbers is one name, with its angle brackets."""
        return [re.sub("<.*>", member, self.name) for member in self.members] or [self.name]

    def describes(self, name: str) -> bool:
        """Whether `name`, as recorded, is this metric or one of the family."""
        pattern = "|".join(re.sub("<.*>", r"\\d+", known) for known in self.names())
        return bool(re.fullmatch(pattern, name))
