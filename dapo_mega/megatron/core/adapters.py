"""The low-rank adapters of Megatron's linear layers: how their matrices lie on processes, and what they add to outputs.

A layer computes x W^T + scale (x A^T) B^T. Of A and B, one is cut over the tensor-parallel processes as the weight is,
and the other, small in both directions, is the same on all of them. What crosses processes has `rank` columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import Module

from dapo_mega.config import LoraConfig
from dapo_mega.megatron.core.groups import expert_tensor_group, gathered_tokens, shared_input
from dapo_mega.models.peft_adapters import AdaptedWeight

_ALIKE, _APART = "lora-alike", "lora-apart"
"""Megatron's names for the random states of dropout, where tensor-parallel processes hold the same and where not."""


class Adapter(Module):
    """A and B of one linear layer, or of one expert of a grouped layer.

    `A0`, `A1`, ... [rank, in] are of its parts that are targets, `B` [out, rank] of all parts.
    """

    B: Tensor
    _chosen: Tensor | None

    def __init__(
        self, weight: Tensor, adapted: AdaptedWeight, part_of_row: Tensor, lora: LoraConfig, config: TransformerConfig
    ) -> None:
        """Beside this process's shard `weight`; `part_of_row` [out] has the number of the part of each of its rows."""
        super().__init__()
        rows, columns = weight.shape
        self.is_on = True
        self._names = [f"A{part}" for part in adapted.parts]
        self._is_row, self._is_cut = adapted.is_row, adapted.is_cut
        self._is_expert = adapted.placed.expert is not None
        self._scale, self._dropout = lora.alpha / lora.rank, lora.dropout
        self._sequence_parallel = config.sequence_parallel and config.tensor_model_parallel_size > 1
        self._group: dist.ProcessGroup = (
            expert_tensor_group() if self._is_expert else parallel_state.get_tensor_model_parallel_group()
        )
        for name in self._names:
            self._add(name, (lora.rank, columns), weight, config, is_cut=self._is_row)
        self._add("B", (rows, lora.rank), weight, config, is_cut=self._is_cut and not self._is_row)
        # [out, targets]: which A each row of B is multiplied with. None: with the only one.
        chosen = part_of_row.to(weight.device)[:, None] == torch.tensor(adapted.parts, device=weight.device)
        self.register_buffer("_chosen", None if chosen.all() else chosen.to(config.params_dtype), persistent=False)

    def _add(
        self, name: str, shape: tuple[int, int], weight: Tensor, config: TransformerConfig, *, is_cut: bool
    ) -> None:
        parameter: Any = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=weight.device))
        # Megatron's marks: of which data-parallel group it is, whether the gradients of its copies are of different
        # tokens and so to be summed, and (norms count what is tensor-parallel and not shared) which copy counts.
        parameter.allreduce = getattr(weight, "allreduce", True)
        parameter.sequence_parallel = self._sequence_parallel and not is_cut and not self._is_expert
        parameter.tensor_model_parallel = True
        parameter.shared = not is_cut and self._group.rank() > 0
        self.register_parameter(name, parameter)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """A [targets * rank, in] and B [out, targets * rank], with zeros where a row is not of the target."""
        down = torch.cat([self.get_parameter(name) for name in self._names])
        if self._chosen is None:
            return down, self.B
        return down, (self._chosen[:, :, None] * self.B[:, None]).flatten(1)

    def forward(self, inputs: Tensor) -> Tensor:
        """scale (x A^T) B^T of what the layer gets, laid out as what it returns."""
        down, up = self.matrices()
        group, several = self._group, self._is_cut and self._group.size() > 1
        if self._is_expert and several:
            # The dispatcher sums over processes that share an expert: outputs, and gradients of inputs.
            down, up = (
                m if cut else shared_input(m, group) for m, cut in ((down, self._is_row), (up, not self._is_row))
            )
        inner = F.linear(self._dropped(inputs), down) * self._scale
        if several and not self._is_expert:
            inner = self._exchanged(inner)
        return F.linear(inner, up)

    def _exchanged(self, inner: Tensor) -> Tensor:
        if self._is_row:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            return reduce(inner, group=self._group)
        if self._sequence_parallel:
            return gathered_tokens(inner, self._group)
        return shared_input(inner, self._group)

    def _dropped(self, inputs: Tensor) -> Tensor:
        if not self._dropout or not self.training:
            return inputs
        # What all processes hold alike is dropped alike. Megatron's repeated passes restore these states.
        is_alike = not self._is_row and not self._sequence_parallel and not self._is_expert
        with get_cuda_rng_tracker().fork(_ALIKE if is_alike else _APART):
            return torch.native_dropout(inputs, self._dropout, True)[0]  # Of what is dropped, one byte a number.

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """This process's shard of W + scale B A, computed in float32, in the weight's dtype."""
        down, up = self.matrices()
        return (weight.float() + self._scale * (up.float() @ down.float())).to(weight.dtype)


def attach(linear: Any, weight: str, adapter: Adapter) -> None:
    """Add what the adapter computes to the layer's output. `weight` is the name that its weight has in the layer."""
    if number := weight.removeprefix("weight"):  # One expert's, of a grouped layer.
        if not hasattr(linear, "lora"):
            linear.lora = torch.nn.ModuleDict()
            linear.register_forward_hook(_add_grouped)
        linear.lora[number] = adapter
        return
    linear.lora = adapter
    linear.register_forward_hook(_add)


def _add(linear: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    adapter: Adapter = linear.lora
    if not adapter.is_on:
        return None
    hidden = inputs[0]
    if hasattr(linear, "layer_norm_weight"):  # Transformer Engine's, fused into the layer.
        scale = linear.layer_norm_weight + int(linear.zero_centered_gamma)
        hidden = F.rms_norm(hidden, hidden.shape[-1:], scale, linear.eps)
    return output[0] + adapter(hidden), output[1]


def _add_grouped(linear: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    hidden, sizes = inputs
    if not linear.lora["0"].is_on:
        return None
    parts = hidden.split(sizes if isinstance(sizes, list) else sizes.tolist())
    return output[0] + torch.cat([linear.lora[str(i)](part) for i, part in enumerate(parts)]), output[1]


def with_gradient(_: Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def seed_dropout(alike: int, apart: int) -> None:
    """Begin the random states of dropout: with a seed that the tensor-parallel processes share, and one of this
    process. Checkpoints hold them with Megatron's own."""
    for name, seed in ((_ALIKE, alike), (_APART, apart)):
        tracker = get_cuda_rng_tracker()
        if name not in tracker.get_states():
            tracker.add(name, seed)
