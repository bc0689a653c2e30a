"""The experts that a transformers model sends tokens to."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


class ChosenExperts:
    """Those of a model's last forward pass, as its layers hand them to their experts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._num_layers = model.config.get_text_config().num_hidden_layers
        self._by_layer: dict[int, Tensor] = {}
        for name, module in model.named_modules():
            if found := re.fullmatch(r".*\.layers\.(\d+)\.mlp\.experts", name):
                module.register_forward_pre_hook(partial(self._note, int(found[1])))

    def chosen(self, num_rows: int) -> Tensor:
        """Of so many rows [rows, tokens, layers, experts per token] int16, -1 in layers without experts."""
        tokens, per_token = next(iter(self._by_layer.values())).shape
        device = next(iter(self._by_layer.values())).device
        routes = torch.full((tokens, self._num_layers, per_token), -1, dtype=torch.int16, device=device)
        for layer, experts in self._by_layer.items():
            routes[:, layer] = experts.to(torch.int16)
        return routes.view(num_rows, -1, *routes.shape[1:])

    def _note(self, layer: int, _: torch.nn.Module, given: tuple[Any, ...]) -> None:
        self._by_layer[layer] = given[1]
