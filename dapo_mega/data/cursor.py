"""Walks over prompts: every prompt once per epoch, by default in an order that depends only on (seed, epoch)."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from dapo_mega.algorithms.orders import Indices, random_words, shuffled
from dapo_mega.errors import InputError

_KEYS = ("seed", "num_prompts", "epoch", "position")


class PromptCursor:
    """An endless walk over `num_prompts` prompts; batches run across epoch boundaries. `epoch` is that of the next one.

    The whole state is four integers, so a checkpoint can be taken between any two calls of `next`, and the walk
    continued from it equals one that was never interrupted.
    """

    def __init__(
        self,
        num_prompts: int,
        seed: int,
        order: Callable[[int], Indices] | None = None,
        retired: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """`order(epoch)` is a permutation of the prompts, by default a shuffle. `retired` [num_prompts] marks those
        that are passed over; it may change, but never to all."""
        if num_prompts < 1:
            raise InputError(f"num_prompts={num_prompts}: the dataset has no prompts; give one that has some")
        if seed < 0:
            raise InputError(f"seed={seed} is negative; give 0 or more")
        self._num_prompts = num_prompts
        self._seed = seed
        self.epoch = 0
        self._position = 0
        self._order_of = order or (lambda epoch: shuffled(random_words(num_prompts, seed, epoch)))
        self._order: Indices | None = None
        self._retired = retired

    def next(self, n: int) -> list[int]:
        """Indices of the next `n` prompts, each in [0, num_prompts)."""
        if n < 0:
            raise InputError(f"asked for {n} prompts; give 0 or more")
        indices: list[int] = []
        while len(indices) < n:
            if self._order is None:
                self._order = self._order_of(self.epoch)
            stop = min(self._num_prompts, self._position + n - len(indices))
            coming = self._order[self._position : stop]
            if self._retired is not None:
                coming = coming[~self._retired[coming]]
            indices.extend(int(i) for i in coming)
            self._position = stop
            if stop == self._num_prompts:
                self.begin_epoch()
        return indices

    def begin_epoch(self) -> None:
        """Go to the start of the next epoch, whose order is made when it is needed."""
        self._order, self.epoch, self._position = None, self.epoch + 1, 0

    def state(self) -> dict[str, int]:
        """The state that decides all further results of `next`, as plain integers."""
        return {"seed": self._seed, "num_prompts": self._num_prompts, "epoch": self.epoch, "position": self._position}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue where `state` was taken; `InputError` when it belongs to another dataset size or seed."""
        if set(state) != set(_KEYS) or not all(type(state[key]) is int and state[key] >= 0 for key in _KEYS):
            needed = f"the integers {', '.join(_KEYS)} of 0 or more"
            raise InputError(f"a prompt cursor's state has {needed}, got {dict(state)}")
        if (position := state["position"]) >= state["num_prompts"]:
            raise InputError(f"position {position} is outside the {state['num_prompts']} prompts of the state")
        for key, own in (("num_prompts", self._num_prompts), ("seed", self._seed)):
            if state[key] != own:
                raise InputError(
                    f"the saved prompt cursor has {key}={state[key]}, this run has {own}; resume with the data and "
                    f"seed of the saved run, or start a new run from its weights"
                )
        self._order = None  # It may depend on more than the epoch.
        self.epoch, self._position = state["epoch"], position
