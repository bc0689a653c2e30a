"""Orders in which one dataset's prompts are asked, each a section of the configuration and a permutation that depends
on its arguments only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from dapo_mega.algorithms.own import OwnCode
from dapo_mega.declared import Section
from dapo_mega.types import Prompt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


def random_words(num_prompts: int, seed: int, epoch: int, *stream: int) -> Words:
    """64 random bits per prompt, which depend on the arguments only; `stream` tells datasets apart."""
    # Raw Philox words instead of Generator's methods: NumPy promises the words never change between its versions, but
    # not the algorithms of Generator, and a resumed run may meet another version.
    words: Words = np.random.Philox(np.random.SeedSequence([seed, epoch, *stream])).random_raw(num_prompts)
    return words


def shuffled(words: Words) -> Indices:
    """A random order."""
    return np.argsort(words, kind="stable")


def prioritised(words: Words, weights: Floats) -> Indices:
    """Drawn one after the other without putting back, each with a probability proportional to its weight [N] >= 0.

    The way of Efraimidis and Spirakis (2006): in the order of Exponential(1) / weight. Those of weight 0 come last.
    """
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    with np.errstate(divide="ignore"):
        return np.argsort(-np.log(uniform) / weights, kind="stable")


@dataclass(frozen=True)
class OrderedPrompts:
    """One dataset's prompts, and what an order may look at: `stream` tells datasets apart, and `success_rates` gives
    those of the prompts until now [N]."""

    prompts: Sequence[Prompt]
    seed: int
    stream: tuple[int, ...] = ()
    success_rates: Callable[[], Floats] | None = None

    def words(self, epoch: int) -> Words:
        """64 random bits per prompt."""
        return random_words(len(self.prompts), self.seed, epoch, *self.stream)


class PromptOrder(Section):
    """One order of prompts, with its parameters."""

    kind: str

    needs_difficulty: ClassVar[bool] = False
    """Whether it reads `columns.difficulty`."""
    needs_outcomes: ClassVar[bool] = False
    """Whether it depends on which responses were right, and so begins anew with every step."""

    @property
    def label(self) -> str:
        """What it is called in checkpoints."""
        return self.kind

    def of_epoch(self, of: OrderedPrompts, epoch: int) -> Indices:
        """The indices of the prompts in the order in which the epoch asks them."""
        raise NotImplementedError


class ShuffleOrder(PromptOrder):
    """Every prompt once per epoch, in a new order each."""

    kind: Literal["shuffle"] = "shuffle"

    def of_epoch(self, of: OrderedPrompts, epoch: int) -> Indices:
        return shuffled(of.words(epoch))


class CurriculumOrder(PromptOrder):
    """From easy to hard, by `columns.difficulty`."""

    kind: Literal["curriculum"] = "curriculum"
    easiest: Literal["highest", "lowest"] = "highest"
    """Which values of columns.difficulty are the easy ones. highest: a pass rate; lowest: a level of difficulty."""
    stages: tuple[float, ...] = ()
    """Values of columns.difficulty at which a new stage begins; within a stage prompts are shuffled. Empty: every value
    is a stage."""
    epochs: int = Field(default=1, ge=1)
    """Epochs from easy to hard; later ones are shuffled."""

    needs_difficulty: ClassVar[bool] = True

    def of_epoch(self, of: OrderedPrompts, epoch: int) -> Indices:
        if epoch >= self.epochs:
            return shuffled(of.words(epoch))
        sign = -1 if self.easiest == "highest" else 1
        hardness = sign * np.array([prompt.difficulty for prompt in of.prompts], np.float64)
        if self.stages:
            # A value at which a stage begins belongs to it, whatever the direction.
            signed = np.array(sorted(sign * stage for stage in self.stages))
            hardness = np.searchsorted(signed, hardness, side="right").astype(np.float64)
        return np.lexsort((of.words(epoch), hardness))


class PrioritisedOrder(PromptOrder):
    """Prompts that the policy fails at come more often (Kimi k1.5, arXiv 2501.12599)."""

    kind: Literal["prioritised"] = "prioritised"
    floor: float = Field(default=0.1, ge=0, le=1)
    """A prompt is asked in proportion to 1 - success rate, but at least to this. 0: solved prompts hardly ever come
    again."""

    needs_outcomes: ClassVar[bool] = True

    def of_epoch(self, of: OrderedPrompts, epoch: int) -> Indices:
        assert of.success_rates is not None
        return prioritised(of.words(epoch), np.maximum(1 - of.success_rates(), self.floor))


class OwnOrder(OwnCode, PromptOrder):  # type: ignore[misc]
    """An order of your own: `function(prompts, epoch, seed, **settings)` returns every index of `prompts` once."""

    key: ClassVar[str] = "data.sampling.order"

    @property
    def label(self) -> str:
        return self.path

    def of_epoch(self, of: OrderedPrompts, epoch: int) -> Indices:
        """What the function returns. Raises InputError for one that cannot be used."""
        returned = self.call(prompts=of.prompts, epoch=epoch, seed=of.seed)
        try:
            order = np.asarray(returned)
        except (TypeError, ValueError):
            order = np.empty(0)
        if order.dtype.kind not in "iu" or not np.array_equal(np.sort(order, axis=None), np.arange(len(of.prompts))):
            raise self.unusable(f"it returned {returned!r:.200}, not every index below {len(of.prompts)} once")
        return order.astype(np.int64)

    def try_out(self, group_size: int) -> None:
        prompts = [Prompt(i, "?" * i, np.zeros(i, np.int32), "") for i in range(1, 9)]
        self.of_epoch(OrderedPrompts(prompts, 0), 0)


OrderChoice = ShuffleOrder | CurriculumOrder | PrioritisedOrder | OwnOrder
