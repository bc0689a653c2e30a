"""Held-out evaluation during a run."""

from __future__ import annotations

from pydantic import Field

from dapo_mega.config.base import Section


class EvaluationConfig(Section):
    """Held-out evaluation through the same engine: avg@k, pass@k, maj@k."""

    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0: only at_start and at_end.")
    at_start: bool = False
    at_end: bool = False
    samples_per_prompt: int = Field(default=32, ge=1, description="k.")
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=0.7, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
