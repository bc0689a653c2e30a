"""Marks by which Megatron sums the gradients of parameters and their norm over processes, where it sets them wrongly.

Tested by the step of gpt-oss in `tests/distributed/test_families.py`.
"""

from __future__ import annotations

import torch


def correct_marks(stage: torch.nn.Module) -> None:
    """Tensor-parallel processes have sinks of their own heads and, with `expert_tensor_parallel_size` 1, biases of
    their own experts, but Megatron takes these for copies: the gradient norm counts those of one process only, and
    sequence parallelism sums the gradients of the biases. So does 0.18 with weights of experts on Transformer Engine's
    layers (`tests/te_cpu/emulated/test_layouts.py`). Can go when it marks all as cut."""
    for name, parameter in stage.named_parameters():
        if name.endswith(".softmax_offset") or (".experts." in name and ".linear_fc2.bias" in name):
            vars(parameter).update(tensor_model_parallel=True, sequence_parallel=False)
        elif ".experts." in name and ".linear_fc" in name and ".weight" in name:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
