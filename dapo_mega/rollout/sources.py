"""Metrics of a step's groups for each source of prompts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from dapo_mega.rollout.scoring import lengths_of, verdicts_of
from dapo_mega.types import Group, Prompt

T = TypeVar("T")

_MAX_LABELS = 32

Source = tuple[str, str]
"""A dataset of `data.mixture` and a data source in it."""


def source_labels(prompts: Sequence[Prompt]) -> Mapping[Source, str]:
    """The name in metrics of each source of the prompts; none if all are of one source.

    A source that several datasets have in common is named after each dataset instead. Of many sources those with the
    most prompts have names of their own, and the others are counted together.
    """
    counts = Counter(_source(prompt) for prompt in prompts)
    if len(counts) < 2:
        return {}
    num_datasets = Counter(source for _, source in counts)
    names = {pair: pair[0] if num_datasets[pair[1]] > 1 else pair[1] for pair in counts}
    ranked = sorted(counts, key=lambda pair: (-counts[pair], pair))
    named = ranked if len(ranked) <= _MAX_LABELS else ranked[: _MAX_LABELS - 1]
    return {pair: _label(names[pair]) if pair in named else "others" for pair in ranked}


def by_label(found: Iterable[tuple[Prompt, T]], labels: Mapping[Source, str]) -> dict[str, list[T]]:
    """What belongs to prompts, by the name in metrics of their sources, without those whose source has none."""
    of_label: dict[str, list[T]] = {}
    for prompt, one in found:
        if label := labels.get(_source(prompt)):
            of_label.setdefault(label, []).append(one)
    return of_label


def metrics_of_sources(groups: Sequence[Group], labels: Mapping[Source, str]) -> dict[str, float]:
    """Share of the groups, accuracy and mean length of the responses, for each source that has a label."""
    metrics: dict[str, float] = {}
    for label, members in by_label(((group.prompt, group) for group in groups), labels).items():
        scored = [response for group in members for response in group.trajectories]
        metrics[f"source/share_{label}"] = len(members) / len(groups)
        metrics[f"source/response_length_mean_{label}"] = float(np.mean(lengths_of(scored)))
        if verdicts := verdicts_of(scored):
            metrics[f"source/accuracy_{label}"] = float(np.mean(verdicts))
    return metrics


def _source(prompt: Prompt) -> Source:
    return prompt.dataset, prompt.data_source


def _label(source: str) -> str:
    """The source as a part of a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.@-]", "_", source).lstrip("_.@-")[:64] or "none"
