"""Metrics of a step's groups for each source of prompts (`Prompt.data_source`)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from dapo_mega.types import Group, Prompt

_MAX_LABELS = 32
_OTHERS = "others"


def source_labels(prompts: Sequence[Prompt]) -> Mapping[str, str]:
    """The name in metrics of each source of the prompts; none if all are of one source.

    Of many sources those with the most prompts have names of their own, and the others are counted together.
    """
    counts = Counter(prompt.data_source for prompt in prompts)
    if len(counts) < 2:
        return {}
    ranked = sorted(counts, key=lambda source: (-counts[source], source))
    named = ranked if len(ranked) <= _MAX_LABELS else ranked[: _MAX_LABELS - 1]
    return {source: _label(source) if source in named else _OTHERS for source in ranked}


def metrics_of_sources(groups: Sequence[Group], labels: Mapping[str, str]) -> dict[str, float]:
    """Share of the groups, accuracy and mean length of the responses, for each source that has a label."""
    by_label: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.prompt.data_source in labels:
            by_label[labels[group.prompt.data_source]].append(group)
    metrics: dict[str, float] = {}
    for label, members in by_label.items():
        scored = [response for group in members for response in group.responses]
        metrics[f"source/share_{label}"] = len(members) / len(groups)
        metrics[f"source/response_length_mean_{label}"] = float(np.mean([len(s.response.token_ids) for s in scored]))
        verdicts = [s.correct for s in scored if s.correct is not None]
        if verdicts:
            metrics[f"source/accuracy_{label}"] = float(np.mean(verdicts))
    return metrics


def _label(source: str) -> str:
    """The source as a part of a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.@-]", "_", source).lstrip("_.@-")[:64] or "none"
