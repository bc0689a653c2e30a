"""The optimizer and its schedule."""

from typing import Literal

from pydantic import Field

from dapo_mega.config.base import FREE, Section


class OptimizerConfig(Section):
    """AdamW of Megatron's distributed optimizer. The learning rate warms up linearly, then follows `schedule`."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate after warm-up; SFT's default is 1e-5. 1e-6 suits models of 1B and more; tiny ones take 1e-4. Lower
    it if rewards fall or gradient norms jump."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the learning rate rises linearly from 0: rollout steps in RL, updates in SFT."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of AdamW, per unit of learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW adds it to the root of the mean squared gradient."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Gradients with a larger global norm are scaled down to it. 0: no clipping."""
    max_skipped_updates: int = Field(default=0, ge=0, json_schema_extra=FREE)
    """So many updates in a row are skipped where the gradient is not finite: no weight and no state of the optimizer
    changes, the schedule goes on, and skipped_update_share counts them. One more ends the run, as does the first with
    0. Set it, to 3 for example, where single batches overflow; not to hide what diverges."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling, linearly or as a cosine, so that the update after the last one
    of num_steps would have 0: the last one still trains."""
