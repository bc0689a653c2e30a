"""Latent attention without Transformer Engine."""

from __future__ import annotations

from typing import Any

from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import multi_latent_attention


def know_local_linear() -> None:
    """Megatron imports this layer beside Transformer Engine only, and compares the spec's with it. Can go when
    multi_latent_attention imports it always."""
    module: Any = multi_latent_attention
    module.Linear = Linear
