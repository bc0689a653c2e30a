"""Chooses the next prompts: every prompt once per epoch, in an order that depends only on (seed, epoch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dapo_mega.errors import InputError

_KEYS = ("seed", "num_prompts", "epoch", "position")


class PromptCursor:
    """An endless walk over `num_prompts` prompts; batches run across epoch boundaries.

    The whole state is four integers, so a checkpoint can be taken between any two calls of `next`, and the walk
    continued from it equals one that was never interrupted.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        if num_prompts < 1:
            raise InputError(f"num_prompts={num_prompts}: the dataset has no prompts; give one that has some")
        if seed < 0:
            raise InputError(f"seed={seed} is negative; give 0 or more")
        self._num_prompts = num_prompts
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = _epoch_order(num_prompts, seed, 0)

    @classmethod
    def from_state(cls, state: Mapping[str, int]) -> PromptCursor:
        """The cursor that `state` was taken from."""
        checked = _checked(state)
        cursor = cls(checked["num_prompts"], checked["seed"])
        cursor.load_state(checked)
        return cursor

    @property
    def epoch(self) -> int:
        """Number of completed passes over the dataset, which is the epoch of the next prompt."""
        return self._epoch

    def next(self, n: int) -> list[int]:
        """Indices of the next `n` prompts, each in [0, num_prompts)."""
        if n < 0:
            raise InputError(f"asked for {n} prompts; give 0 or more")
        indices: list[int] = []
        while len(indices) < n:
            stop = min(self._num_prompts, self._position + n - len(indices))
            indices.extend(int(i) for i in self._order[self._position : stop])
            self._position = stop
            if stop == self._num_prompts:
                self._enter(self._epoch + 1, 0)
        return indices

    def state(self) -> dict[str, int]:
        """The state that decides all further results of `next`, as plain integers."""
        return {
            "seed": self._seed,
            "num_prompts": self._num_prompts,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue where `state` was taken; `InputError` when it belongs to another dataset size or seed."""
        checked = _checked(state)
        for key, own in (("num_prompts", self._num_prompts), ("seed", self._seed)):
            if checked[key] != own:
                raise InputError(
                    f"the saved prompt cursor has {key}={checked[key]}, this run has {own}; resume with the data and "
                    f"seed of the saved run, or start a new run from its weights"
                )
        self._enter(checked["epoch"], checked["position"])

    def _enter(self, epoch: int, position: int) -> None:
        if epoch != self._epoch:
            self._order = _epoch_order(self._num_prompts, self._seed, epoch)
        self._epoch, self._position = epoch, position


def _epoch_order(num_prompts: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    # Sorting raw Philox words instead of calling Generator.permutation: NumPy promises the words never change
    # between its versions, but not the algorithms of Generator, and a resumed run may meet another version.
    words = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_prompts)
    return np.argsort(words, kind="stable")


def _checked(state: Mapping[str, int]) -> Mapping[str, int]:
    if set(state) != set(_KEYS) or not all(type(state[key]) is int and state[key] >= 0 for key in _KEYS):
        raise InputError(f"a prompt cursor's state has the integers {', '.join(_KEYS)} of 0 or more, got {dict(state)}")
    if state["position"] >= state["num_prompts"]:
        raise InputError(f"position {state['position']} is outside the {state['num_prompts']} prompts of the state")
    return state
