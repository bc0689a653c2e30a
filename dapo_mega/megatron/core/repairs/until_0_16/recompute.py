"""Full recompute in groups of layers that do not divide a chunk's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _NoLayer(torch.nn.Module):
    layer_number = 1

    def forward(self, *, hidden_states: Tensor, context: Any, **_: Any) -> tuple[Tensor, Any]:
        return hidden_states, context


def end_groups_with_the_last_layer(stage: Any) -> None:
    """The last group reaches beyond the last layer, and is given layers that do nothing. Newer versions end it."""
    layers, missing = stage.decoder.layers, _NoLayer()
    stage.decoder._get_layer = lambda index: layers[index] if index < len(layers) else missing
