"""GeneralPoints (arXiv 2501.17161, section 4.1): cards, of which each is used once in a formula that equals a target.

A deal is a tuple of ranks, 1 (A) to 13 (K). Under the rule `ten` J, Q and K count as 10; under `distinct`, the rule out
of distribution, as 11, 12 and 13. Every text that the policy is given or imitates is written by the functions under
"Texts".
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, combinations_with_replacement, permutations, product
from math import gcd
from typing import Final, Literal, get_args

import numpy as np

from dapo_mega.errors import InputError

FaceCards = Literal["ten", "distinct"]
Style = Literal["paper", "short"]
STYLES: tuple[Style, ...] = get_args(Style)

ALPHABET: Final = "0123456789AJQK+-*/()=,;:~#?"
"""Every character of the short style, its messages included: no whitespace, which transformers 5.24's Qwen2Tokenizer
loses when it loads a character tokenizer from the folder of a Qwen2 model."""
RANKS: Final = 13
MAX_CARDS: Final = 4
"""Deals of more cards take too long to be listed."""
_HELD_OUT_SHARE: Final = 0.25
_LETTERS: Final = {1: "A", 11: "J", 12: "Q", 13: "K"}

Deal = tuple[int, ...]
_Fraction = tuple[int, int]
_Text = tuple[str, int]
"""A formula and how it binds: 0 a sum, 1 a product, 2 a number."""


def values_of(deal: Iterable[int], face_cards: FaceCards) -> tuple[int, ...]:
    """What the cards count as."""
    return tuple(min(rank, 10) if face_cards == "ten" else rank for rank in deal)


def solutions(values: Iterable[int], target: int) -> list[str]:
    """All formulas that use each value once and equal the target, sorted: every way to bracket, order and join them, in
    exact fractions. Formulas that mean the same by another text are several; without any there is no solution."""
    return sorted(text for text, _ in _formulas(tuple(sorted(values)), target).get((target, 1), ()))


@lru_cache(maxsize=8192)
def _formulas(values: tuple[int, ...], target: int | None = None) -> dict[_Fraction, set[_Text]]:
    """What can be made of these values, by what it equals; only what equals the target, if there is one."""
    if len(values) == 1:
        return {(values[0], 1): {(str(values[0]), 2)}}
    found: dict[_Fraction, set[_Text]] = {}
    for chosen in {part for size in range(1, len(values)) for part in combinations(values, size)}:
        lefts, rights = _formulas(chosen), _formulas(tuple(sorted((Counter(values) - Counter(chosen)).elements())))
        for (a, b), (c, d) in product(lefts, rights):
            results = [("+", a * d + c * b, b * d), ("-", a * d - c * b, b * d), ("*", a * c, b * d)]
            for operator, top, bottom in [*results, ("/", a * d, b * c)] if c else results:
                if target is None or top == target * bottom:
                    divisor = gcd(top, bottom) if bottom > 0 else -gcd(top, bottom)
                    texts = found.setdefault((top // divisor, bottom // divisor), set())
                    texts.update(_joined(operator, *pair) for pair in product(lefts[a, b], rights[c, d]))
    return found


def _joined(operator: str, left: _Text, right: _Text) -> _Text:
    """Two formulas with an operator between them, and the brackets that are needed."""
    binds = int(operator in "*/")
    first = left[0] if left[1] >= binds else f"({left[0]})"
    second = right[0] if right[1] >= binds + (operator in "-/") else f"({right[0]})"
    return f"{first}{operator}{second}", binds


@dataclass(frozen=True)
class PointsProblem:
    """A deal in the order in which it is shown, with its rule and a solution."""

    deal: Deal
    face_cards: FaceCards
    solution: str


@dataclass(frozen=True)
class PointsSplits:
    """Problems by what they are for; no deal of the two evaluations is in the others in any order."""

    train: list[PointsProblem]
    in_distribution: list[PointsProblem]
    out_of_distribution: list[PointsProblem]
    """Under the rule `distinct`, with a J, Q or K in each deal."""
    both_rules: list[PointsProblem]
    """The training problems, and as many under `distinct`: for a model that knows nothing of 11 to 13 otherwise."""


@dataclass(frozen=True)
class PointsTask:
    """The game with this many cards and this target. All randomness is from `seed`."""

    num_cards: int = 4
    target: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.num_cards <= MAX_CARDS:
            raise InputError(f"deals of {self.num_cards} cards: give 2 to {MAX_CARDS}")
        if self.seed < 0:
            raise InputError(f"seed={self.seed} is negative; give 0 or more")

    def solvable(self, deal: Iterable[int], face_cards: FaceCards) -> bool:
        return bool(solutions(values_of(deal, face_cards), self.target))

    def deal(self, rng: np.random.Generator, face_cards: FaceCards) -> Deal:
        """Cards drawn independently, until they can be solved, as in the paper's code."""
        while not self.solvable(deal := tuple(rng.integers(1, RANKS + 1, self.num_cards).tolist()), face_cards):
            pass
        return deal

    def splits(self, num_train: int, num_eval: int) -> PointsSplits:
        """So many problems to train on, and at most so many for each evaluation: distinct ordered deals that can be
        solved. A quarter of all sets of cards is held out. Raises InputError where there are fewer to train on."""
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, self.num_cards, self.target])))
        hands = list(combinations_with_replacement(range(1, RANKS + 1), self.num_cards))
        hands = [hands[i] for i in rng.permutation(len(hands))]
        num_held_out = round(_HELD_OUT_SHARE * len(hands))
        held_out, rest = hands[:num_held_out], hands[num_held_out:]
        train = self._problems(rest, "ten", num_train, rng)
        return PointsSplits(
            train,
            self._problems(held_out, "ten", num_eval, rng, or_all=True),
            self._problems(held_out, "distinct", num_eval, rng, or_all=True),
            train + self._problems(rest, "distinct", num_train, rng, or_all=True),
        )

    def _problems(
        self, hands: list[Deal], face_cards: FaceCards, num: int, rng: np.random.Generator, *, or_all: bool = False
    ) -> list[PointsProblem]:
        usable = [hand for hand in hands if face_cards == "ten" or hand[-1] > 10]
        usable = [hand for hand in usable if self.solvable(hand, face_cards)]
        deals = sorted({deal for hand in usable for deal in permutations(hand)})
        if num < 0 or (num > len(deals) and not or_all):
            raise InputError(
                f"{num} deals of {self.num_cards} cards for {self.target} to train on asked for; there are "
                f"{len(deals)} beside those held out, so ask for fewer, or for more cards"
            )
        chosen = [deals[i] for i in rng.permutation(len(deals))[:num]]
        solved = [(deal, solutions(values_of(deal, face_cards), self.target)) for deal in chosen]
        return [PointsProblem(deal, face_cards, found[int(rng.integers(len(found)))]) for deal, found in solved]


# Texts ---------------------------------------------------------------------------------------------------------------

_RULES: Final = {
    ("paper", "ten"): "'J', 'Q', and 'K' count as '10'",
    ("paper", "distinct"): "'J', 'Q', and 'K' count as '11', '12', and '13', respectively",
    ("short", "ten"): "J=10,Q=10,K=10",
    ("short", "distinct"): "J=11,Q=12,K=13",
}


def card_name(rank: int) -> str:
    """A, 2 to 10, J, Q or K."""
    return _LETTERS.get(rank, str(rank))


def prompt_text(deal: Sequence[int], face_cards: FaceCards, target: int, style: Style) -> str:
    """The question. Only the rule's sentence differs between the rules; `paper` has the parts of the paper's prompt
    (appendix A), `short` is for a model with a character tokenizer."""
    cards, rule = [card_name(rank) for rank in deal], _RULES[style, face_cards]
    if style == "short":
        return f"{rule};{','.join(cards)}={target}:"
    return (
        f"[Task Description]\nYou are an expert player of the {target} points card game. You will receive a set of "
        f"{len(cards)} cards.\nNote that {rule}, and each card must be used once.\nYour goal is to output a formula "
        f"that evaluates to {target}, made of the numbers of the cards and of operators such as '+', '-', '*', '/', "
        f"'(', ')' and '='.\n\n[Input]\nCards: {cards}\n\n[Output]\nYour response should be a valid JSON object in "
        f'this format:\n{{\n  "cards": [the cards as given],\n  "number": [the number that each card counts as],\n'
        f'  "formula": "an equation that equals {target}"\n}}\n'
    )


def answer_text(problem: PointsProblem, target: int, style: Style) -> str:
    """The solution in the form that the prompt asks for."""
    if style == "short":
        return problem.solution
    answer = {
        "cards": [card_name(rank) for rank in problem.deal],
        "number": values_of(problem.deal, problem.face_cards),
        "formula": f"{problem.solution}={target}",
    }
    return json.dumps(answer)
