"""Orders in which one dataset's prompts are asked, each a permutation that depends on its arguments only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from dapo_mega.config import OwnCode
from dapo_mega.own_code import call, unusable
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


def own_order(own: OwnCode, prompts: Sequence[Prompt], epoch: int, seed: int) -> Indices:
    """What `function(prompts, epoch, seed, **settings)` returns: every index of `prompts` once. Raises InputError for a
    function that cannot be used."""
    key = "data.sampling.order"
    returned = call(key, own.path, own.settings, prompts=prompts, epoch=epoch, seed=seed)
    try:
        order = np.asarray(returned)
    except (TypeError, ValueError):
        order = np.empty(0)
    if order.dtype.kind not in "iu" or not np.array_equal(np.sort(order, axis=None), np.arange(len(prompts))):
        raise unusable(key, own.path, f"it returned {returned!r:.200}, not every index below {len(prompts)} once")
    return order.astype(np.int64)


def easy_to_hard(
    words: Words, difficulties: Floats, stages: Sequence[float], easiest: Literal["highest", "lowest"]
) -> Indices:
    """By difficulty [N], those of one stage shuffled. Stages begin at these values; without any, each value is one."""
    hardness = -difficulties if easiest == "highest" else difficulties
    if stages:
        # A value at which a stage begins belongs to it, whatever the direction.
        signed = sorted(-stage if easiest == "highest" else stage for stage in stages)
        hardness = np.searchsorted(np.array(signed), hardness, side="right").astype(np.float64)
    return np.lexsort((words, hardness))


def prioritised(words: Words, weights: Floats) -> Indices:
    """Drawn one after the other without putting back, each with a probability proportional to its weight [N] >= 0.

    The way of Efraimidis and Spirakis (2006): in the order of Exponential(1) / weight. Those of weight 0 come last.
    """
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    with np.errstate(divide="ignore"):
        return np.argsort(-np.log(uniform) / weights, kind="stable")
