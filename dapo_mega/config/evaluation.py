"""Held-out evaluation during a run."""

from __future__ import annotations

from pydantic import Field

from dapo_mega.config.base import Section


class EvaluationConfig(Section):
    """Held-out evaluation through the same engine: avg@k, pass@k, maj@k."""

    every: int = Field(
        default=0, ge=0, description="Steps between evaluations on data.evaluation. 0: only at_start and at_end."
    )
    at_start: bool = Field(default=False, description="Evaluate before the first step: the score to compare with.")
    at_end: bool = Field(default=False, description="Evaluate after the last step.")
    samples_per_prompt: int = Field(
        default=32,
        ge=1,
        description="Responses per problem: the k of avg@k, pass@k and maj@k. Small data sets need more for a steady "
        "score.",
    )
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature of evaluation. 0: greedy.")
    top_p: float = Field(
        default=0.7,
        gt=0,
        le=1,
        description="Sample from the likeliest tokens that hold this share of the probability. 1: from all.",
    )
    top_k: int = Field(default=0, ge=0, description="Sample from this many likeliest tokens. 0: from all.")
