"""Latent attention without Transformer Engine, and the gradient norm of its down projections with it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.transformer import multi_latent_attention


def know_whether_transformer_engine_is_there() -> None:
    """This module assumes it, and uses its types. Newer versions set HAVE_TE by whether it could be imported."""
    module: Any = multi_latent_attention
    module.HAVE_TE = HAVE_TE


def count_down_projections_once(stage: torch.nn.Module) -> None:
    """Transformer Engine marks every weight as cut over processes, also the down projections, which each process has
    whole: the gradient norm would count them once per process. Newer versions clear the mark of "duplicated" layers."""
    for attention in stage.modules():
        if isinstance(attention, multi_latent_attention.MLASelfAttention):
            for name in ("linear_q_down_proj", "linear_kv_down_proj"):
                for parameter in getattr(attention, name, torch.nn.Module()).parameters():
                    setattr(parameter, "tensor_model_parallel", False)  # noqa: B010
