"""What an answer is in mathematics: a value, a list, a tuple or interval, a set, a matrix, a relation."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_mega.rewards.numerals import Numeral
from dapo_mega.rewards.units import Unit


@dataclass(frozen=True)
class Value:
    """A single value. `text` is its LaTeX without unit, percent sign and words around it, `key` its canonical spelling.

    `letter` is that of the choice which it names, `named` what stands beside the letter,
    `base` what a number names as its base.
    """

    text: str
    key: str
    numeral: Numeral | None = None
    is_percent: bool = False
    unit: Unit | None = None
    is_word: bool = False
    letter: str | None = None
    named: Node | None = None
    base: str | None = None


@dataclass(frozen=True)
class Named:
    """`name = value`; `text` is the whole equation."""

    name: str
    value: Node
    text: str


@dataclass(frozen=True)
class Items:
    """Several values: a list without brackets, or what stands between `opening` and `closing`."""

    opening: str
    closing: str
    items: tuple[Node, ...]

    @property
    def is_list(self) -> bool:
        return not self.opening

    @property
    def is_set(self) -> bool:
        return self.opening == "\\{"


@dataclass(frozen=True)
class Union:
    """Sets or intervals, united."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix, as its rows."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Relation:
    """An equation or inequality that is not merely a named value or an interval."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Ratio:
    """`3:5`, `1:2:3`. `seconds` since midnight where it may be a time of day, `half` being `a` or `p` where that is
    known."""

    parts: tuple[Node, ...]
    seconds: int | None
    half: str
    text: str


Node = Value | Ratio | Named | Items | Union | Matrix | Relation
