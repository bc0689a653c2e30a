"""The optimizer and its schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dapo_mega.config.base import Section


class OptimizerConfig(Section):
    """AdamW of Megatron's distributed optimizer. Warm-up is linear, in rollout steps, then constant."""

    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0, description="Largest global gradient norm; 0: no clipping.")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
