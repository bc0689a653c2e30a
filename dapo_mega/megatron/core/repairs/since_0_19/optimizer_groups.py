"""The optimizer's settings at a resume."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer import distrib_optimizer


def find_groups_by_their_parameters() -> None:
    """Megatron looks for each group of parameters in a checkpoint by its learning rates and weight decay too, so that
    none of them could change at a resume. These are the keys of earlier versions; we set no others by group. Can go
    when DistributedOptimizer.load_state_dict finds a group whose settings have changed."""
    module: Any = distrib_optimizer
    module.param_group_identifier_keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
