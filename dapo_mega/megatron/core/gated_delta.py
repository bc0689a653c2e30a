"""Gated delta layers (arXiv:2412.06464) of Megatron's, on packed sequences."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, torch_chunk_gated_delta_rule
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor

from dapo_mega.distributed import accelerator
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.repairs.since_0_18.gated_delta import compute_without_kernels, has_kernels


def delta_spec(config: TransformerConfig, column_parallel: Any, norm: Any, row_parallel: Any) -> ModuleSpec:
    """What stands in the place of attention. Raises InputError where Megatron cannot compute it."""
    if "cu_seqlens" not in inspect.signature(torch_chunk_gated_delta_rule).parameters:
        raise InputError(
            "this Megatron-Core's gated delta layers do not take packed sequences, as those of megatron-core 0.18 and "
            "newer do; install one that does (pip install megatron-core==0.19.2, Python 3.12), or take another model"
        )
    if not has_kernels() or not accelerator.has_gpu():
        compute_without_kernels()
    elif config.deterministic_mode:
        raise InputError(
            "compute.deterministic=true is not possible with flash-linear-attention's kernels of gated delta layers; "
            "set it to false, or uninstall flash-linear-attention"
        )
    parts = GatedDeltaNetSubmodules(in_proj=column_parallel, out_norm=norm, out_proj=row_parallel)
    return ModuleSpec(module=PackedGatedDelta, submodules=parts)


class PackedGatedDelta(GatedDeltaNet):  # type: ignore[misc]
    """Megatron's layer with decays in float32 whatever the model's dtype."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        own = copy.copy(config)
        # The norm within the layer is never zero-centred. Deterministic mode refuses packed sequences.
        own.layernorm_zero_centered_gamma = own.deterministic_mode = False
        super().__init__(own, *args, **kwargs)

    def _compute_g_and_beta(
        self, log_decay: Tensor, bias: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        return -log_decay.float().exp() * F.softplus(alpha.float() + bias), beta.sigmoid()
