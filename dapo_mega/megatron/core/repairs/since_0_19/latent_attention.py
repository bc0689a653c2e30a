"""The norms of latent attention."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention

_LAYERS = ("q_layernorm", "kv_layernorm", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")


def keep_layers_of_spec() -> None:
    """Megatron builds other layers than its spec names: a query that is not compressed gets a norm before its
    projection, which DeepSeek-V2-Lite does not have, and without Transformer Engine that cannot be built. Can go when
    MLASelfAttention takes the spec's `linear_q_proj` as it is."""
    attention: Any = MLASelfAttention
    if hasattr(attention, "_resolve_qk_norm_config"):
        attention._resolve_qk_norm_config = lambda _, spec: {name: getattr(spec, name) for name in _LAYERS}
