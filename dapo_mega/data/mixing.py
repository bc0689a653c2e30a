"""Deals turns to datasets in proportion to their weights, without chance."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dapo_mega.errors import InputError


class Mixture:
    """Says whose turn it is. After t turns each dataset has had its share of t to within one turn.

    Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980): the bound is 1 - 1/(2n - 2)
    for n datasets, which no method betters. So any window of turns is off by less than two, and by at most one if there
    are two datasets. Shares are exact fractions, so all machines take the same turns.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = {name: str(weight) for name, weight in weights.items()}
        total = sum(map(Fraction, self._weights.values()))
        self.shares = {name: Fraction(weight) / total for name, weight in self._weights.items()}
        self._turns = dict.fromkeys(weights, 0)

    def next(self) -> str:
        """The name of the dataset that gives the next prompt."""
        count = len(self._turns)
        slack = Fraction(1, 2 * count - 2) if count > 1 else Fraction(1)
        time = sum(self._turns.values()) + 1
        lag = {name: share * time - self._turns[name] for name, share in self.shares.items()}
        # Of those that would not be ahead of their share by more than the bound, the one that must have it soonest.
        may = [name for name in lag if lag[name] >= slack]
        chosen = min(may, key=lambda name: (1 - slack - lag[name]) / self.shares[name])
        self._turns[chosen] += 1
        return chosen

    def state(self) -> dict[str, Any]:
        """JSON values that decide all further turns."""
        return {"weights": dict(self._weights), "turns": dict(self._turns)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, or begin anew if it is of other weights."""
        if state["turns"].keys() != self._turns.keys():
            raise InputError(
                f"the checkpoint mixes the datasets {', '.join(state['turns'])}, this run "
                f"{', '.join(self._turns)}; resume with the same ones, or start a new run from the trained weights"
            )
        is_same = state["weights"] == self._weights
        self._turns = {name: int(state["turns"][name]) if is_same else 0 for name in self._turns}
