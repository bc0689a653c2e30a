"""Metrics of a step's groups for each source of prompts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from dapo_mega.rollout.scoring import lengths_of, verdicts_of
from dapo_mega.types import Group, Prompt

_MAX_LABELS = 32
_OTHERS = "others"

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
    return {pair: _label(names[pair]) if pair in named else _OTHERS for pair in ranked}


def label_of(prompt: Prompt, labels: Mapping[Source, str]) -> str | None:
    """The name in metrics of the prompt's source, if it has one."""
    return labels.get(_source(prompt))


def metrics_of_sources(groups: Sequence[Group], labels: Mapping[Source, str]) -> dict[str, float]:
    """Share of the groups, accuracy and mean length of the responses, for each source that has a label."""
    by_label: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if label := label_of(group.prompt, labels):
            by_label[label].append(group)
    metrics: dict[str, float] = {}
    for label, members in by_label.items():
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
