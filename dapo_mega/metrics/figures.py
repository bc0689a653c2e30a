"""The curves to watch a run by: those that the DAPO paper monitors (arXiv 2503.14476, figures 2, 3 and 7) and more."""

from collections.abc import Collection
from dataclasses import dataclass, replace

_ANY = "<name>"


@dataclass(frozen=True)
class Curve:
    """One metric of a figure, or with `<name>` in it a family."""

    metric: str
    label: str


@dataclass(frozen=True)
class Figure:
    """Curves that are drawn over one another; those of families once for each name."""

    title: str
    y_label: str
    curves: tuple[Curve, ...]


FIGURES = (
    Figure("Reward", "mean reward", (
        Curve("rollout/reward_mean", "training"),
        Curve("rollout/accuracy_reward_mean", "training, without length rewards"),
        Curve("evaluation/reward_mean", "evaluation"),
    )),
    Figure("Accuracy", "share correct", (
        Curve("rollout/accuracy_mean", "training"),
        Curve("evaluation/avg_at_k", "evaluation avg@k"),
        Curve("evaluation/pass_at_k", "evaluation pass@k"),
    )),
    Figure("Response length", "mean tokens", (
        Curve("rollout/response_length_mean", "training"), Curve("evaluation/response_length_mean", "evaluation"),
    )),
    Figure("Generation entropy", "nats per token", (Curve("policy/entropy", "entropy"),)),
    Figure("Loss", "loss", (Curve("policy/loss", "loss"),)),
    Figure("KL divergence", "nats per token", (
        Curve("policy/kl_to_old", "to the step's start"), Curve("policy/kl_to_reference", "to the starting model"),
        Curve("policy/kl_to_teacher", "to the teacher"),
    )),
    Figure("Reward: <name>", "mean of this part", (
        Curve("reward/part_<name>", "training"), Curve("evaluation/part_<name>", "evaluation"),
    )),
    Figure("Groups by outcome", "share of groups", (
        Curve("groups/kept_share", "kept"),
        Curve("groups/all_right_share", "all right"),
        Curve("groups/all_wrong_share", "all wrong"),
    )),
    Figure("Probability of generated tokens", "mean probability", (
        Curve("rollout/mean_token_probability", "probability"),
    )),
    Figure("Engines against trainer", "mean |log-prob difference|, nats", (
        Curve("rollout/logprob_abs_diff_mean", "nats"),
    )),
    Figure("Gradient", "norm", (Curve("policy/grad_norm", "policy"), Curve("critic/grad_norm", "critic"))),
    Figure("Critic: loss", "reward^2", (Curve("critic/value_loss", "loss"),)),
    Figure("Critic: explained variance", "share", (Curve("critic/explained_variance", "share"),)),
)  # fmt: skip
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
