"""Keeps count of how the groups of each prompt came out, and of the prompts that are solved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]

_PREFIX = "sampler/"


@dataclass(frozen=True)
class GroupTally:
    """How many of the responses to prompt `index` were right. `request_id` is that of the first of them."""

    request_id: int
    index: int
    num_right: int
    num_responses: int


class PromptOutcomes:
    """Counts per prompt. `retired` [N] marks prompts that are not asked any more; it is changed in place.
    `num_solved_in_a_row` [N] counts the last groups that were right as a whole."""

    def __init__(self, num_prompts: int) -> None:
        self._num_right = np.zeros(num_prompts)
        self._num_responses = np.zeros(num_prompts)
        self.num_solved_in_a_row = np.zeros(num_prompts, np.int64)
        self.retired = np.zeros(num_prompts, np.bool_)

    def success_rates(self) -> npt.NDArray[np.float64]:
        """[N] (right + 1) / (responses + 2), Laplace's estimate, so 1/2 for a prompt without responses.

        Both counts are halved before a group is added: the estimate follows the policy, and the latest group weighs at
        least as much as all before it.
        """
        rates: npt.NDArray[np.float64] = (self._num_right + 1) / (self._num_responses + 2)
        return rates

    def add(self, outcome: GroupTally) -> int:
        """Count a group. Returns how many groups of this prompt in a row, up to this one, were right as a whole."""
        i = outcome.index
        self._num_right[i] = self._num_right[i] / 2 + outcome.num_right
        self._num_responses[i] = self._num_responses[i] / 2 + outcome.num_responses
        is_solved = outcome.num_right == outcome.num_responses
        self.num_solved_in_a_row[i] = self.num_solved_in_a_row[i] + 1 if is_solved else 0
        return int(self.num_solved_in_a_row[i])

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """The counts as arrays `sampler/...`."""
        return {_PREFIX + name: table.copy() for name, table in self._tables().items()}

    def load_state(self, arrays: Arrays) -> None:
        """Continue from `state`; from nothing where it is missing."""
        for name, table in self._tables().items():
            table[:] = arrays.get(_PREFIX + name, 0)

    def _tables(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "num_right": self._num_right,
            "num_responses": self._num_responses,
            "num_solved_in_a_row": self.num_solved_in_a_row,
            "retired": self.retired,
        }
