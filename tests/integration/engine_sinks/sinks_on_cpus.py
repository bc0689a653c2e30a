"""Attention sinks for SGLang's `torch_native` attention, which has none, so that gpt-oss runs in engines on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def attend_with_sinks() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.layers.attention import torch_native_backend as native
    from sglang.srt.models.gpt_oss import GptOssAttention

    build = GptOssAttention.__init__

    def built(layer: Any, *arguments: Any, **settings: Any) -> None:
        """With sinks in float32: SGLang has them in bfloat16, whatever the dtype."""
        build(layer, *arguments, **settings)
        layer.sinks = torch.nn.Parameter(layer.sinks.float(), requires_grad=False)

    GptOssAttention.__init__ = built
    attend = native.scaled_dot_product_attention
    sinks_of_layer: list[Tensor | None] = [None]

    def attended(
        query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, is_causal: bool, **settings: Any
    ) -> Tensor:
        """Every head sees one more key, of logit `sinks` and value 0."""
        if (sinks := sinks_of_layer[0]) is None:
            return attend(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **settings)
        num_queries, num_keys = query.shape[2], key.shape[2]
        seen = attn_mask if attn_mask is not None else torch.ones(num_queries, num_keys, dtype=torch.bool)
        seen = seen.tril() if is_causal else seen
        logits = query.new_zeros(len(sinks), num_queries, num_keys).masked_fill(~seen, -torch.inf)
        logits = torch.cat((logits, sinks.to(query.dtype)[:, None, None].expand(-1, num_queries, 1)), -1)
        key, value = (functional.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
        return attend(query, key, value, attn_mask=logits[None], is_causal=False, **settings)

    def with_sinks(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attending(*tensors: Any, sinks: Tensor | None = None, **settings: Any) -> Tensor:
            sinks_of_layer[0] = sinks
            try:
                return forward(*tensors, **settings)
            finally:
                sinks_of_layer[0] = None

        return attending

    backend = native.TorchNativeAttnBackend
    native.scaled_dot_product_attention = attended
    backend.forward_extend, backend.forward_decode = map(with_sinks, (backend.forward_extend, backend.forward_decode))
