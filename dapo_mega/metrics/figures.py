"""The training curves that the DAPO paper monitors (arXiv 2503.14476, figures 2, 3 and 7)."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_mega.metrics import names


@dataclass(frozen=True)
class Curve:
    """One metric of a figure."""

    metric: str
    label: str
    is_evaluation: bool = False


@dataclass(frozen=True)
class Figure:
    """Curves that are drawn over one another."""

    title: str
    y_label: str
    curves: tuple[Curve, ...]


FIGURES = (
    Figure(
        "Reward",
        "mean reward",
        (
            Curve(names.REWARD_MEAN, "with length shaping"),
            Curve(names.ACCURACY_REWARD_MEAN, "correctness only"),
        ),
    ),
    Figure(
        "Accuracy",
        "share correct",
        (
            Curve(names.ACCURACY_MEAN, "training"),
            Curve(names.EVALUATION_AVG_AT_K, "evaluation avg@k", is_evaluation=True),
            Curve(names.EVALUATION_PASS_AT_K, "evaluation pass@k", is_evaluation=True),
        ),
    ),
    Figure(
        "Response length",
        "mean tokens",
        (
            Curve(names.RESPONSE_LENGTH_MEAN, "training"),
            Curve(names.EVALUATION_RESPONSE_LENGTH_MEAN, "evaluation", is_evaluation=True),
        ),
    ),
    Figure("Generation entropy", "nats per token", (Curve(names.ENTROPY, "entropy"),)),
    Figure(
        "Probability of generated tokens", "mean probability", (Curve(names.MEAN_TOKEN_PROBABILITY, "probability"),)
    ),
    Figure(
        "Groups by outcome",
        "share of groups",
        (
            Curve(names.KEPT_SHARE, "kept"),
            Curve(names.ALL_RIGHT_SHARE, "all right"),
            Curve(names.ALL_WRONG_SHARE, "all wrong"),
        ),
    ),
)
MAIN_METRICS = tuple(curve.metric for figure in FIGURES for curve in figure.curves)
"""What runs are compared by."""
