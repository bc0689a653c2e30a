"""What a replayed step computed, against what was recorded: how far apart, and where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dapo_mega.samples.reading import RecordedSample
from dapo_mega.samples.rows import Floats

_ABSOLUTE = 0.1
"""Values next to 0 may differ by this share of the tolerance, whatever they are."""


@dataclass(frozen=True)
class Difference:
    """One quantity. `largest` is the largest absolute difference among its values, `where` the place of that; `excess`
    is by how many tolerances it exceeds what is allowed, at most 1 where it does not."""

    name: str
    num_values: int
    num_different: int
    largest: float
    where: str
    recorded: float
    replayed: float
    excess: float

    @property
    def is_equal(self) -> bool:
        return self.num_different == 0


def compare_numbers(
    recorded: Mapping[str, float], replayed: Mapping[str, float], tolerance: float, suffix: str = ""
) -> list[Difference]:
    """The metrics that both have, in the order of `recorded`."""
    return [
        _difference(f"{name}{suffix}", [("", float(recorded[name]), float(replayed[name]))], tolerance)
        for name in recorded
        if name in replayed
    ]


def compare_samples(
    recorded: Sequence[RecordedSample], replayed: Sequence[tuple[Floats, Floats]], tolerance: float
) -> list[Difference]:
    """Log-probs and ratios of the tokens, and the responses' advantages. `replayed[i]` are sample i's log-probs at the
    step's start with its advantages [2, L], and those of the last update [1, L], NaN where there are none."""
    pairs = list(zip(recorded, replayed, strict=True))
    updated = [(r, new) for r, new in pairs if r.update_logprobs is not None and not np.isnan(new[1]).all()]
    quantities: dict[str, Iterable[tuple[RecordedSample, Floats, Floats]]] = {
        "log-probs at the step's start": ((r, r.trainer_logprobs, new[0][0]) for r, new in pairs),
        "log-probs in the last update": ((r, _updated(r), new[1][0]) for r, new in updated),
        "ratios in the last update": (
            (r, np.exp(_updated(r) - r.trainer_logprobs), np.exp(new[1][0] - new[0][0])) for r, new in updated
        ),
    }
    found = []
    for name, of_samples in quantities.items():
        values = list(of_samples)
        triples = [
            (f"response {sample.request_id}, token {t + 1}", float(old[t]), float(new[t]))
            for sample, old, new in values
            for t in np.flatnonzero(~((old == new) | (np.isnan(old) & np.isnan(new)))).tolist()  # Those not the same.
        ]
        number = sum(len(old) for _, old, _ in values)
        found.append(_difference(name, triples, tolerance, num_values=number))
    # Recorded as computed, in float64, and trained on in float32.
    advantages = [
        (
            f"response {r.request_id}",
            float(np.float32(r.advantage)),
            float(np.float32(new[0][1][~np.isnan(new[0][1])].mean(dtype=np.float64))),
        )
        for r, new in pairs
    ]
    return [*(d for d in found if d.num_values), _difference("advantages", advantages, tolerance)]


def _updated(sample: RecordedSample) -> Floats:
    assert sample.update_logprobs is not None
    return sample.update_logprobs


def _difference(
    name: str,
    values: Sequence[tuple[str, float, float]],
    tolerance: float,
    num_values: int | None = None,
) -> Difference:
    """Of (place, recorded, replayed)."""
    different = [v for v in values if not (v[1] == v[2] or (math.isnan(v[1]) and math.isnan(v[2])))]
    where, old, new = max(different, key=lambda v: _gap(v[1], v[2]), default=("", 0.0, 0.0))
    if not different and values:
        where, old, new = values[0]
    excess = max((_excess(v[1], v[2], tolerance) for v in different), default=0.0)
    largest = _gap(old, new) if different else 0.0
    return Difference(
        name, len(values) if num_values is None else num_values, len(different), largest, where, old, new, excess
    )


def _gap(old: float, new: float) -> float:
    return math.inf if math.isnan(old) != math.isnan(new) else abs(old - new)


def _excess(old: float, new: float, tolerance: float) -> float:
    allowed = max(tolerance * max(abs(old), abs(new)), _ABSOLUTE * tolerance)
    return _gap(old, new) / allowed if allowed else math.inf
