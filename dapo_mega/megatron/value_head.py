"""The last stage of a value model: hidden states to one value per response token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapo_mega.megatron.core.decoder import PackedStage
from dapo_mega.megatron.core.groups import gathered_tokens
from dapo_mega.megatron.core.settings import TransformerConfig


class ValueHead(torch.nn.Module):
    """A linear layer to one number, computed in float32, which all tensor-parallel processes hold whole.

    Under sequence parallelism each process has its part of the tokens, so Megatron adds up the head's gradients, as it
    does those of norms.
    """

    def __init__(self, config: TransformerConfig, has_bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype)) if has_bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [T] float32 of hidden states [T, hidden]."""
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), bias)[:, 0]


class ValueStage(PackedStage):
    """Its last chunk returns float32 values [N] of the positions [N] that are given as its `labels`."""

    def __init__(self, *args: Any, has_bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            # In place of the vocabulary's, because Megatron's checkpoints ask for an output layer of this name.
            self.output_layer = ValueHead(self.config, has_bias)

    def head(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Values [N] of the positions `labels`."""
        values: Tensor = self.output_layer(hidden_states[:, 0])
        if self.config.sequence_parallel:
            # Every process computes the loss of all tokens, so each takes its own tokens' gradients and adds none up.
            values = gathered_tokens(values, self.tensor_group, sums_gradients=False)
        return values.index_select(0, labels)
