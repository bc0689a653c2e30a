"""Decides whether an answer is the right one by its structure; single values go to a comparison that is given.

Every decision is true, false or open. The same walk decides cheaply in the caller's process (open: ask computer
algebra) and finally in a worker, with computer algebra at hand.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Final

from dapo_mega.rewards.algebra import latex_equal, relations_equal, values_equal
from dapo_mega.rewards.bounds import MAX_ANSWER_CHARACTERS
from dapo_mega.rewards.expressions import compare_expressions
from dapo_mega.rewards.free_text import find_answer
from dapo_mega.rewards.nodes import Items, Matrix, Named, Node, Ratio, Relation, Union, Value
from dapo_mega.rewards.normalization import compact
from dapo_mega.rewards.numerals import Numeral, numerals_equal
from dapo_mega.rewards.signs import clean, repeats
from dapo_mega.rewards.single_values import variables
from dapo_mega.rewards.structure import readings
from dapo_mega.rewards.units import Unit, find_unit

_RADIAN: Final = find_unit("radian")
_MAX_ITEMS: Final = 64
_PLAIN_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_PLAIN_AMOUNT = re.compile(
    r"(?P<number>[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100}))(?:\.0{1,9})?(?: (?P<unit>[a-z]{3,20}))?"
)
_PLAIN_DECIMAL = re.compile(r"[+-]?[0-9]*\.[0-9]+")
_VARIABLE = r"(?:[a-zA-Z]|\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|phi|omega))(?:_(?:\{\w+\}|\w))?"
_VARIABLES = re.compile(rf"{_VARIABLE}|\([a-zA-Z](?:,\s*[a-zA-Z])+\)")
_NO_SOLUTION = re.compile(r"^(?:there(?:is|are))?no(?:real)?(?=solution)")
_FUNCTION = re.compile(r"[a-zA-Z]\([a-z]\)")


@dataclass(frozen=True)
class Grader:
    """Compares answers with a ground truth, exactly or within a relative tolerance.

    `algebra`: decide everything, with computer algebra where needed. Otherwise what needs it stays open (None).
    """

    tolerance: float = 0.0
    algebra: bool = False

    def grade(self, candidate: str, truth: str) -> bool | None:
        """Whether the candidate is the truth. Both must be of bounded length."""
        plain = candidate.strip(" $")
        if self.tolerance == 0 and _PLAIN_INTEGER.fullmatch(plain) and _PLAIN_INTEGER.fullmatch(truth):
            return int(plain) == int(truth)
        # A truth without a unit is meant in the candidate's: decided here, as reading both takes ten times as long.
        amount = _PLAIN_AMOUNT.fullmatch(plain) if self.tolerance == 0 and _PLAIN_INTEGER.fullmatch(truth) else None
        if amount and (amount["unit"] is None or find_unit(amount["unit"])):
            return int(amount["number"].replace(",", "")) == int(truth)
        if not candidate.strip():
            return False
        if self.tolerance == 0:
            # A repeating decimal is never the decimal that it is cut to, of however many digits.
            for one, other in ((plain, truth), (truth, candidate)):
                if _PLAIN_DECIMAL.fullmatch(one) and repeats(other):
                    return False
        if _spelling(candidate) == _spelling(truth) != "":
            return True
        theirs, ours = _readings(candidate), _truth_readings(truth)
        return _any(self._same(a, b) for b in ours for a in theirs)

    def _same(self, a: Node, b: Node) -> bool | None:
        """The candidate's node against the truth's."""
        if a == b:
            return True
        match a, b:
            case (Named(), Named()):
                return self._same_named(a, b)
            case (Named() | Relation(), Named() | Relation()):
                return self._same_relation(a.text, b.text)
            case (Relation(), _):
                return self._last_side(a, b)
            case (Items() | Union(), Relation()):
                return latex_equal(_latex(a), b.text) if self.algebra else None
            case (_, Relation()):
                return False
            case (Named(), Items()) if b.is_list and (named := _by_name(a)):
                return self._same_items(named, b)
            case (Items(), Named()) if a.is_list and (named := _by_name(b)):
                return self._same_items(a, named)
            case (_, Named()):
                return self._same(a, b.value)
            case (Named(), _):
                return self._same(a.value, b)
            case (Items(), Items()):
                return self._same_items(a, b)
            case (Union(), Union()):
                return self._unordered(_united(a), _united(b))
            case (Items(), Union()) if a.is_list or a.is_set:
                return self._unordered(a.items, _united(b))
            case (Union(), Items()) if b.is_list or b.is_set:
                return self._unordered(_united(a), b.items)
            case (Matrix(), Matrix()):
                if len(a.rows) != len(b.rows):
                    return False
                return _every(self._ordered(first, second) for first, second in zip(a.rows, b.rows, strict=True))
            case (Items(), Value()) if a.is_list:
                return self._concluded(a, b)
            case (Items(), Value()) if len(a.items) == 1 and a.is_set:
                return self._same(a.items[0], b)
            case (Value(), Items()) if len(b.items) == 1 and b.is_set:
                return self._same(a, b.items[0])
            case (Value(), Value()):
                return self._same_value(a, b)
            case (Ratio(), Ratio()):
                return self._same_ratio(a, b)
            case (Ratio(), Value()):
                return self._same_quotient(a, b)
            case (Value(), Ratio()):
                return self._same_quotient(b, a)
            case (Value(), Matrix()) | (Matrix(), Value()):
                return latex_equal(_latex(a), _latex(b)) if self.algebra else None
        return False

    def _same_named(self, a: Named, b: Named) -> bool | None:
        same = self._same(a.value, b.value)
        if (
            same
            and re.sub(r"[{}]", "", a.name) != re.sub(r"[{}]", "", b.name)
            and any(kind.fullmatch(a.name) and kind.fullmatch(b.name) for kind in (_VARIABLES, _FUNCTION))
        ):
            # `x = 2` is not `y = 2`, while `A = 2` may be `area = 2`.
            is_rule = isinstance(a.value, Value) and not _is_number(a.value)
            return self._same_relation(a.text, b.text) if is_rule else False
        if same is not False or _is_number(a.value) or not isinstance(a.value, Value) or not isinstance(b.value, Value):
            return same
        # `x = 2y` and `y = x/2`: the same equation in other words.
        return self._same_relation(a.text, b.text)

    def _same_relation(self, a: str, b: str) -> bool | None:
        return relations_equal(a, b) if self.algebra else None

    def _last_side(self, a: Relation, b: Node) -> bool | None:
        """Of `2 + 3 = 5`, a value is 5."""
        if any(sign != "=" for sign in a.signs):
            return False
        return _any(self._same(node, b) for node in readings(a.sides[-1]))

    def _concluded(self, a: Items, b: Value) -> bool | None:
        """Of `m = 40, n = 2, m + n = 42`, the value is 42: the last equation is about those before it."""
        *before, last = a.items
        names = [node.name for node in before if isinstance(node, Named)]
        if isinstance(last, Relation) and len(names) == len(before) and all(name in last.sides[0] for name in names):
            return self._last_side(last, b)
        # `9/4 or 2.25`: one value in two ways.
        return _every(self._same(item, b) for item in a.items)

    def _same_items(self, a: Items, b: Items) -> bool | None:
        first, second = a.items, b.items
        if max(len(first), len(second)) > _MAX_ITEMS:
            return False
        if b.is_list or b.is_set:
            if (
                a.is_list
                or (a.is_set and b.is_set)
                or (a.is_set and len({_stem(name) for name in _names(second)}) <= 1)
            ):
                return self._same_list(first, second)
            return self._ordered(first, second) if b.is_list and a.opening == "(" and a.closing == ")" else False
        if a.is_list:
            names = _names(first)
            in_order = len(names) < 2 or names == sorted(names)
            return self._ordered(first, second) if in_order and (b.opening, b.closing) == ("(", ")") else False
        if (a.opening, a.closing) != (b.opening, b.closing):
            return False
        return self._ordered(first, second)

    def _same_list(self, first: Sequence[Node], second: Sequence[Node]) -> bool | None:
        """Lists and sets: the same values in any order, except that values of different names keep to their names."""
        ours, theirs = _names(second), _names(first)
        stems = {_stem(name) for name in ours}, {_stem(name) for name in theirs}
        if stems[0] != stems[1] and all(len(one) == 1 and _VARIABLES.fullmatch(max(one)) for one in stems):
            return False  # `x = 4, x = -6` is not `y = 4, y = -6`.
        if not ours or (len({_stem(name) for name in ours}) == 1 and len(ours) == len(second)):
            return self._unordered(_deduplicated(first), _deduplicated(second))
        if sorted(ours) == sorted(theirs) and len(ours) == len(second) == len(first):
            by_name = {node.name: node for node in first if isinstance(node, Named)}
            if len(by_name) < len(first):
                return self._unordered(first, second)
            return _every(
                self._same(by_name[node.name].value, node.value) for node in second if isinstance(node, Named)
            )
        return self._ordered(first, second)

    def _ordered(self, first: Sequence[Node], second: Sequence[Node]) -> bool | None:
        if len(first) != len(second):
            return False
        return _every(self._same(a, b) for a, b in zip(first, second, strict=True))

    def _unordered(self, first: Sequence[Node], second: Sequence[Node]) -> bool | None:
        if len(first) != len(second) or len(first) > _MAX_ITEMS:
            return False
        rest, is_open = list(first), False
        for b in second:
            verdicts = [self._same(a, b) for a in rest]
            if True in verdicts:
                del rest[verdicts.index(True)]
            elif None in verdicts:
                is_open = True
            else:
                return False
        return None if is_open else True

    def _same_ratio(self, a: Ratio, b: Ratio) -> bool | None:
        """Times of day where both may be such and one is a usual one (`4:30`, not `9:16`), else ratios."""
        is_round = any("m" in one.text.casefold() or (one.seconds or 0) % 300 == 0 for one in (a, b))
        if a.seconds is not None and b.seconds is not None and is_round:
            # `4:30` is meant for `4:30 p.m.`, too.
            return (a.seconds - b.seconds) % (24 * 3600 if a.half and b.half else 12 * 3600) == 0
        if len(a.parts) != len(b.parts) or not a.parts:
            return False
        first, second = _latex(a.parts[0]), _latex(b.parts[0])
        return _every(
            self._same_expression(f"({_latex(x)})({second})", f"({_latex(y)})({first})")
            for x, y in zip(a.parts[1:], b.parts[1:], strict=True)
        )

    def _same_quotient(self, ratio: Ratio, value: Value) -> bool | None:
        """`3:5` may be written as a fraction, and is not 0.6."""
        if len(ratio.parts) != 2 or not ("\\frac" in value.text or "/" in value.text) or "." in value.text:
            return False
        return self._same_expression(rf"\frac{{{_latex(ratio.parts[0])}}}{{{_latex(ratio.parts[1])}}}", value.text)

    def _same_expression(self, a: str, b: str) -> bool | None:
        decided = compare_expressions(a, b, self.tolerance)
        return values_equal(a, b, self.tolerance) if decided is None and self.algebra else decided

    # Single values.

    def _same_value(self, a: Value, b: Value) -> bool | None:
        if b.letter is not None and b.named is None:
            return (a.letter or a.key.upper()) == b.letter
        if a.letter is not None:
            if b.letter is not None:
                return a.letter == b.letter
            return self._same(a.named, b) if a.named is not None else None
        if b.named is not None:
            return self._same(a, b.named)
        if a.is_word or b.is_word:
            return _words(a) == _words(b) != ""
        ours, theirs = b.unit, a.unit
        if ours is not None and theirs is not None and ours.dimensions != theirs.dimensions:
            return False
        if a.base or b.base:
            return a.key == b.key
        if (theirs is None and _are_radians(a, ours)) or (ours is None and _are_radians(b, theirs)):
            ours, theirs = ours or _RADIAN, theirs or _RADIAN
        if ours is not None and theirs is not None and (ours.size, ours.pi_power) != (theirs.size, theirs.pi_power):
            is_exact = ours.pi_power == theirs.pi_power
            a, b = _in_base_units(a, theirs, is_exact), _in_base_units(b, ours, is_exact)
        if a.numeral is not None and b.numeral is not None:
            return self._same_number(a, b)
        if a.key == b.key:
            return True
        if b.numeral is not None and "\\" not in a.key and not any(character.isdigit() for character in a.key):
            return False
        decided = self._same_expression(a.text, b.text)
        if decided is not None or self.algebra:
            return decided
        # Expressions in different letters are not worth asking an algebra system.
        letters = variables(a), variables(b)
        return False if None not in letters and letters[0] != letters[1] else None

    def _same_number(self, a: Value, b: Value) -> bool:
        assert a.numeral is not None
        assert b.numeral is not None
        if self._near(a.numeral, b.numeral):
            return True
        if a.is_percent == b.is_percent:
            return False
        # 28 % is 0.28, and 28 where the question asks for percent.
        percent = Fraction(1, 100)
        return self._near(
            _scaled(a.numeral, percent) if a.is_percent else a.numeral,
            _scaled(b.numeral, percent) if b.is_percent else b.numeral,
        )

    def _near(self, a: Numeral, b: Numeral) -> bool:
        if numerals_equal(a, b):
            return True
        return self.tolerance > 0 and abs(a.value - b.value) <= Fraction(self.tolerance) * abs(b.value)


def _are_radians(value: Value, other: Unit | None) -> bool:
    """Whether a value without a unit is an angle, as the other is, in radians: it has a factor of pi."""
    return other is not None and other.name in ("degree", "degrees") and "\\pi" in value.key


def _in_base_units(value: Value, unit: Unit, is_exact: bool) -> Value:
    """The value as a multiple of the base units of its unit; without a numeral where powers of pi part the two."""
    size = rf"\frac{{{unit.size.numerator}}}{{{unit.size.denominator}}}\cdot \pi^{{{unit.pi_power}}}"
    text = rf"({value.text})\cdot {size}"
    numeral = _scaled(value.numeral, unit.size) if value.numeral and is_exact else None
    return replace(value, text=text, key=compact(text), numeral=numeral)


def _scaled(numeral: Numeral, factor: Fraction) -> Numeral:
    return Numeral(numeral.value * factor, numeral.is_decimal)


def _every(decisions: Iterable[bool | None]) -> bool | None:
    is_open = False
    for decision in decisions:
        if decision is False:
            return False
        is_open = is_open or decision is None
    return None if is_open else True


def _any(decisions: Iterable[bool | None]) -> bool | None:
    is_open = False
    for decision in decisions:
        if decision:
            return True
        is_open = is_open or decision is None
    return None if is_open else False


def _names(nodes: Sequence[Node]) -> list[str]:
    names = [node.name for node in nodes if isinstance(node, Named)]
    # `n = 1, 2, 3` names all of them at once.
    return names if len(names) != 1 else []


def _by_name(node: Named) -> Items | None:
    """`a = 1, b = 2` of `(a, b) = (1, 2)`."""
    names = node.name.strip("()").split(",")
    if len(names) == 1 or not isinstance(node.value, Items) or len(names) != len(node.value.items):
        return None
    return Items("", "", tuple(Named(*pair, node.text) for pair in zip(names, node.value.items, strict=True)))


def _stem(name: str) -> str:
    """`x_1` and `x_{2}` are both values of x."""
    return name.partition("_")[0].rstrip("'")


def _deduplicated(nodes: Sequence[Node]) -> list[Node]:
    """The values, each once, without their names."""
    return list(dict.fromkeys(node.value if isinstance(node, Named) else node for node in nodes))


def _united(union: Union) -> list[Node]:
    """What a union unites; finite sets count by their elements."""
    nodes: list[Node] = []
    for item in union.items:
        nodes += item.items if isinstance(item, Items) and item.is_set else [item]
    return nodes


def _is_number(node: Node) -> bool:
    return isinstance(node, Value) and node.numeral is not None


def _words(value: Value) -> str:
    words = "".join(character for character in value.key.casefold() if character.isalnum()).removesuffix("s")
    return _NO_SOLUTION.sub("no", words)


def _latex(node: Node) -> str:
    match node:
        case Value() | Relation() | Ratio():
            return node.text
        case Named():
            return f"{node.name}={_latex(node.value)}"
        case Items():
            return f"{node.opening}{','.join(map(_latex, node.items))}{node.closing}"
        case Union():
            return "\\cup ".join(map(_latex, node.items))
        case Matrix():
            return "\\begin{pmatrix}" + "\\\\".join("&".join(map(_latex, row)) for row in node.rows) + "\\end{pmatrix}"


def gold_answers(truth: str | Sequence[str]) -> tuple[str, ...]:
    """The right answers of a ground truth, any of which will do: those of a list, or of a JSON list of texts."""
    if not isinstance(truth, str):
        return tuple(truth)
    if not truth.lstrip().startswith('["'):
        return (truth,)
    try:
        answers = json.loads(truth)
    except ValueError:
        return (truth,)
    return tuple(answers) if all(isinstance(answer, str) for answer in answers) else (truth,)


@lru_cache(maxsize=8192)
def stated_truth(truth: str) -> str:
    """The answer of a ground truth that is a whole solution; any other is the answer itself."""
    if len(truth) > MAX_ANSWER_CHARACTERS or "\\box" in truth:
        return find_answer(truth) or truth
    return truth


def graded(candidate: str, truth: str, tolerance: float = 0.0) -> bool:
    """The final decision, with computer algebra: what a worker runs."""
    return bool(Grader(tolerance, algebra=True).grade(candidate, truth))


@lru_cache(maxsize=8192)
def _spelling(text: str) -> str:
    return compact(clean(text))


# Apart, as one truth is compared with many answers.
_readings: Final = lru_cache(maxsize=4096)(readings)
_truth_readings: Final = lru_cache(maxsize=8192)(readings)
