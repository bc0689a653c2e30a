"""Latent attention without Transformer Engine."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.transformer import multi_latent_attention


def know_local_layers() -> None:
    """Megatron 0.16.1 assumes in this module that Transformer Engine is installed, and uses its types. Can go when
    multi_latent_attention sets HAVE_TE by whether it could be imported."""
    module: Any = multi_latent_attention
    module.HAVE_TE = HAVE_TE
