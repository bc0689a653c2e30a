"""The curves to watch a run by: those that the DAPO paper monitors (arXiv 2503.14476, figures 2, 3 and 7) and more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from dapo_mega.metrics import names

_ANY = "<name>"


@dataclass(frozen=True)
class Curve:
    """One metric of a figure, or with `<name>` in it a family."""

    metric: str
    label: str
    is_evaluation: bool = False


@dataclass(frozen=True)
class Figure:
    """Curves that are drawn over one another; those of families once for each name."""

    title: str
    y_label: str
    curves: tuple[Curve, ...]


FIGURES = (
    Figure(
        "Reward",
        "mean reward",
        (
            Curve(names.REWARD_MEAN, "training"),
            Curve(names.ACCURACY_REWARD_MEAN, "training, without length rewards"),
            Curve(names.EVALUATION_REWARD_MEAN, "evaluation", is_evaluation=True),
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
    Figure("Loss", "loss", (Curve(names.LOSS, "loss"),)),
    Figure(
        "KL divergence",
        "nats per token",
        (Curve(names.KL_TO_OLD, "to the step's start"), Curve(names.KL_TO_REFERENCE, "to the starting model")),
    ),
    Figure(
        "Reward: <name>",
        "mean of this part",
        (Curve("reward/part_<name>", "training"), Curve("evaluation/part_<name>", "evaluation", is_evaluation=True)),
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
    Figure(
        "Probability of generated tokens", "mean probability", (Curve(names.MEAN_TOKEN_PROBABILITY, "probability"),)
    ),
    Figure("Engines against trainer", "mean |log-prob difference|, nats", (Curve(names.LOGPROB_DIFFERENCE, "nats"),)),
    Figure("Gradient", "norm", (Curve(names.GRAD_NORM, "policy"), Curve("critic/grad_norm", "critic"))),
    Figure("Critic: loss", "reward^2", (Curve("critic/value_loss", "loss"),)),
    Figure("Critic: explained variance", "share", (Curve("critic/explained_variance", "share"),)),
)
MAIN_METRICS = tuple(curve.metric for figure in FIGURES for curve in figure.curves if _ANY not in curve.metric)
"""What runs are compared by."""


def figures_of(metrics: Collection[str]) -> list[Figure]:
    """The figures that have a curve among these metrics, with a figure for each name of a family, such as each part of
    the reward."""
    found = []
    for figure in FIGURES:
        if _ANY not in figure.title:
            found += [figure] if any(curve.metric in metrics for curve in figure.curves) else []
            continue
        starts = tuple(curve.metric.removesuffix(_ANY) for curve in figure.curves)
        for name in dict.fromkeys(metric.partition("_")[2] for metric in metrics if metric.startswith(starts)):
            curves = tuple(replace(curve, metric=curve.metric.replace(_ANY, name)) for curve in figure.curves)
            found.append(Figure(figure.title.replace(_ANY, name), figure.y_label, curves))
    return found
