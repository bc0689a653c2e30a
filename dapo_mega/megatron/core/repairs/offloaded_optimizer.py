"""Checkpoints of Megatron-Core's offloading optimizer in the form of the optimizer that offloads nothing.

`HybridDeviceOptimizer` saves classes among the settings of its groups, which a checkpoint must not hold. Its loading
steps once on random gradients, looks for float32 copies of weights that are float32 already (KeyError), leaves the
host's copies of weights as they were and puts the step count where it overwrites each later one. Here its state is read
and written in place, so a run may continue with any other share. Can go when Megatron's own loading passes the test of
changed shares in `tests/te_cpu/emulated/test_devices.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_as_if_not_offloaded(optimizer: Any) -> None:
    """Make this optimizer's checkpoints those of `compute.optimizer_offload=0`, and loadable."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.state_dict = functools.partial(_state, part)
            part.load_state_dict = functools.partial(_load, part)
            part._set_main_param_and_optimizer_states = functools.partial(_set_states, part)
            part.optimizer._sync_hdo_state_to_sub_optimizers = lambda: None  # What is written in place needs none.


def _state(part: Any) -> dict[str, Any]:
    """As DistributedOptimizer.state_dict: settings and step count of each group, without tensors."""
    hybrid = part.optimizer
    _allocate(hybrid)
    left_out = {"params", *hybrid.defaults} - set(hybrid.sub_optimizer_kwargs)
    groups = [{key: value for key, value in g.items() if key not in left_out} for g in hybrid.param_groups]
    return {"optimizer": {"param_groups": [{**group, "step": _step(hybrid)} for group in groups]}}


def _load(part: Any, state: Mapping[str, Any]) -> None:
    """As DistributedOptimizer.load_state_dict. Settings stay those of the configuration."""
    _allocate(part.optimizer)
    (step,) = {int(group.get("step", 0)) for group in state["optimizer"]["param_groups"]}
    for inner in part.optimizer.sub_optimizers:
        counted = [values["step"] for values in inner.state.values() if "step" in values]
        for count in counted:
            count.fill_(step)
        if not counted:  # Fused optimizers count by group.
            for group in inner.param_groups:
                group["step"] = step
    if "param_state" in state:
        part.load_parameter_state_from_fully_reshardable(state["param_state"])


def _set_states(part: Any, model_param: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    hybrid = part.optimizer
    group, order = part.model_param_group_index_map[model_param]
    main_param = hybrid.param_groups[group]["params"][order]
    for copy in (main_param, hybrid.param_to_inner_param[main_param]):
        copy.copy_(tensors["param"])
    for name in _MOMENTS:
        hybrid.state[main_param][name].copy_(tensors[name])


def _step(hybrid: HybridDeviceOptimizer) -> int:
    """The number of updates that were made."""
    places = [p for inner in hybrid.sub_optimizers for p in (*inner.state.values(), *inner.param_groups)]
    return next((int(place["step"]) for place in places if "step" in place), 0)


def _allocate(hybrid: HybridDeviceOptimizer) -> None:
    """Zeros for the state of parameters that have none yet, as before the first update."""
    for inner in hybrid.sub_optimizers:
        counts_itself = isinstance(inner, torch.optim.AdamW)
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter].update({name: torch.zeros_like(parameter) for name in _MOMENTS})
                    if counts_itself:
                        inner.state[parameter]["step"] = torch.zeros((), device=parameter.device)
    hybrid._sync_sub_optimizers_state_to_hdo()
