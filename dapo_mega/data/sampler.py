"""Chooses the prompts that training asks next: shuffled, from easy to hard, or by what the policy fails at, from one
dataset or from several by their weights."""

import logging
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dapo_mega.algorithms.orders import OrderedPrompts
from dapo_mega.config import PromptSamplingConfig
from dapo_mega.data.cursor import PromptCursor
from dapo_mega.data.outcomes import Arrays, GroupTally, PromptOutcomes
from dapo_mega.errors import InputError
from dapo_mega.types import Prompt

logger = logging.getLogger(__name__)


class PromptSampler:
    """An endless sequence of prompts. What comes next depends only on the seed and `state`.

    Each dataset (`Prompt.dataset`) is walked by itself, and begins its next epoch by itself. How groups came out
    changes the order from the next step on, whatever the order in which engines answered: `observe` notes it, and
    `end_step` counts by request id.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: PromptSamplingConfig,
        seed: int,
        weights: Mapping[str, float] | None = None,
        num_kept: int = 1,
    ) -> None:
        """`prompts[i].index == i`, those of a dataset next to each other. `weights` has every dataset's; without it
        there is one dataset. At least `num_kept` prompts are never retired, each dataset's share of them."""
        self._config, self._seed = config, seed
        self._prompts = prompts
        self._mixture = Mixture(weights or {"": 1.0})
        self._outcomes = PromptOutcomes(len(prompts))
        self._pending: list[GroupTally] = []
        self._has_warned = False
        self._spans = _spans(prompts, self._mixture.shares)
        self._num_kept = {name: math.ceil(share * num_kept) for name, share in self._mixture.shares.items()}
        self._retiring = [config.retire_after, *self._num_kept.values()]
        self._cursors = {name: self._cursor(name, span) for name, span in self._spans.items()}

    def next(self, n: int) -> list[int]:
        """Indices of the next `n` prompts."""
        if len(self._cursors) == 1:
            ((name, cursor),) = self._cursors.items()
            return [self._spans[name].start + i for i in cursor.next(n)]
        turns = [self._mixture.next() for _ in range(n)]
        return [self._spans[name].start + self._cursors[name].next(1)[0] for name in turns]

    def observe(self, outcome: GroupTally) -> None:
        """Note how a group came out; `end_step` counts it."""
        if self._config.needs_outcomes:
            self._pending.append(outcome)

    def end_step(self) -> None:
        """Count the outcomes since the last step; retire solved prompts, and draw prioritised ones anew."""
        for outcome in sorted(self._pending, key=lambda outcome: outcome.request_id):
            self._retire_if_solved(outcome.index, self._outcomes.add(outcome))
        self._pending = []
        if self._config.order.needs_outcomes:
            for cursor in self._cursors.values():
                cursor.begin_epoch()

    def metrics(self) -> dict[str, float]:
        """How far each dataset is walked, and what is retired; empty for one dataset that is only shuffled."""
        metrics: dict[str, float] = {}
        if self._is_plain:
            return metrics
        for name, cursor in self._cursors.items():
            label, span = name or "train", self._spans[name]
            if self._config.order.needs_outcomes:
                metrics[f"sampling/success_rate_{label}"] = float(self._outcomes.success_rates()[span].mean())
            else:
                metrics[f"sampling/epochs_{label}"] = float(cursor.epoch)
            if self._config.retire_after:
                num_retired = int(self._outcomes.retired[span].sum())
                metrics[f"sampling/retired_{label}"] = float(num_retired)
                metrics[f"sampling/left_{label}"] = float(span.stop - span.start - num_retired)
        return metrics

    def state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """JSON values and arrays that decide all further results of `next`."""
        if self._is_plain:
            return dict(self._cursors[""].state()), {}
        values = {
            "order": self._config.order.label,
            "cursors": {name: cursor.state() for name, cursor in self._cursors.items()},
            "mixture": self._mixture.state(),
            "pending": [astuple(outcome) for outcome in self._pending],
            "retiring": self._retiring,
        }
        return values, self._outcomes.state() if self._config.needs_outcomes else {}

    def load_state(self, values: Mapping[str, Any], arrays: Arrays) -> None:
        """Continue where `state` was taken, also with other settings: another order begins with new epochs, other
        weights count from here on, and what is retired is decided anew. Raises InputError for other datasets."""
        self.rewind(values)
        self._outcomes.load_state(arrays)
        if values.get("retiring", self._retiring) != self._retiring:
            self._outcomes.retired[:] = False
            for index, num_solved in enumerate(self._outcomes.num_solved_in_a_row):
                self._retire_if_solved(index, int(num_solved))

    def rewind(self, values: Mapping[str, Any]) -> None:
        """Go back to the values of a state since which no step has ended."""
        if "cursors" not in values:  # Of one dataset that is only shuffled.
            values = {"order": "shuffle", "cursors": {"": values}, "pending": []}
        if values["cursors"].keys() != self._cursors.keys():
            raise InputError(
                f"the checkpoint has a place in {_named(values['cursors'])}, this run asks prompts of "
                f"{_named(self._cursors)}; resume with the same datasets, or start a new run from the trained weights"
            )
        for name, cursor in self._cursors.items():
            cursor.load_state(values["cursors"][name])
            if values["order"] != self._config.order.label:
                cursor.begin_epoch()
        if "mixture" in values:
            self._mixture.load_state(values["mixture"])
        self._pending = [GroupTally(*outcome) for outcome in values["pending"]]

    @property
    def _is_plain(self) -> bool:
        """Whether one dataset is shuffled and no more. Its state is the cursor's, as that of all runs once was."""
        return "" in self._cursors and self._config.order.kind == "shuffle" and self._config.retire_after is None

    def _cursor(self, name: str, span: slice) -> PromptCursor:
        stream = (zlib.crc32(name.encode()),) if name else ()
        asked = OrderedPrompts(self._prompts[span], self._seed, stream, lambda: self._outcomes.success_rates()[span])
        order = partial(self._config.order.of_epoch, asked)
        return PromptCursor(span.stop - span.start, self._seed, order, self._outcomes.retired[span])

    def _retire_if_solved(self, index: int, num_solved: int) -> None:
        """Retire a prompt that was solved so many times in a row, unless its dataset has no more than must stay."""
        name, retired = self._prompts[index].dataset, self._outcomes.retired
        if retired[index] or num_solved < (self._config.retire_after or math.inf):
            return
        if (~retired[self._spans[name]]).sum() > self._num_kept[name]:
            retired[index] = True
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "all prompts of %s are solved and retired but the last %d, which a step needs; soon they carry no "
                "signal either. Add harder prompts, or end the run",
                _named([name]),
                self._num_kept[name],
            )


def _spans(prompts: Sequence[Prompt], names: Iterable[str]) -> dict[str, slice]:
    counts = dict.fromkeys(names, 0)
    for prompt in prompts:
        counts[prompt.dataset] += 1
    stops = np.cumsum(list(counts.values())).tolist()
    return {name: slice(stop - counts[name], stop) for name, stop in zip(counts, stops, strict=True)}


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"data.mixture.{name}" if name else "data.train" for name in names)


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
