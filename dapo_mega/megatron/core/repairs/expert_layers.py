"""Layers of experts: what they hold on to after they were used, and how they take their FP8 states back."""

from __future__ import annotations

from typing import Any

import torch


def let_go_of_graphs(stage: torch.nn.Module) -> None:
    """A dispatcher of experts keeps its last scores until the next micro-batch, and with them their graph: of a layer
    that was recomputed that is its input and the input's gradient, one of each for every layer. Can go when Megatron
    detaches `probs` of `MoETokenDispatcher`s or hands them on as arguments. Tested by "biased experts again" in
    `tests/te_cpu/emulated/test_rehearsal.py`."""
    for layer in stage.modules():
        if hasattr(layer, "token_dispatcher"):
            layer.register_forward_hook(_detach)


def _detach(layer: Any, *_: Any) -> None:
    held = vars(layer.token_dispatcher)
    held.update({name: kept.detach() for name, kept in held.items() if isinstance(kept, torch.Tensor) and kept.grad_fn})


def merge_layer_states(stage: torch.nn.Module, state: dict[str, Any]) -> None:
    """Make one layer's state of those of its experts, as which it was saved. Megatron does so as the layer is loaded,
    but where parameters are in FP8, Transformer Engine has taken the first expert's state for the layer's by then. Can
    go when Transformer Engine loads FP8 states behind its hooks. Tested by "delayed_params_ep2_resumed" in
    `tests/te_cpu/emulated/test_layouts.py`."""
    for name, layer in stage.named_modules():
        if f"{name}._extra_state1" in state:
            for merge in layer._load_state_dict_pre_hooks.values():
                merge(state, f"{name}.", {}, False, [], [], [])
