"""LoRA: trained low-rank matrices A and B beside the frozen weights of Megatron's linear layers (arXiv 2106.09685).

A layer computes x W^T + scale (x A^T) B^T. Of A and B, one is cut over the tensor-parallel processes as the weight is,
and the other, small in both directions, is the same on all of them. What crosses processes has `rank` columns. Queries,
keys and values, and gate and up projections, are one layer of Megatron's and several of peft's: they have an A each,
and their rows of B lie in the order of the weight's rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor
from torch.nn import Module

from dapo_mega.config import LoraConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.weights import ChunkLayout, fill_parameters, local_parameter, named_parameters, shard_of
from dapo_mega.models import ShardRule, take_shard
from dapo_mega.models.families import PlacedTensor
from dapo_mega.models.hf_shapes import hf_shape
from dapo_mega.models.peft_adapters import (
    AdaptedWeight,
    AdapterSource,
    NewAdapter,
    PeftAdapter,
    adapted,
    factors,
    seed_of,
    trained_names,
    write_config,
)

_SHARDED_DROPOUT, _REPLICATED_DROPOUT = "lora-sharded", "lora-replicated"


@dataclass(frozen=True)
class AdapterLayout(ChunkLayout):
    """The A and B of each model chunk, in the place of its weights."""

    targets: tuple[str, ...] = ()

    def tensors(self, chunk: int) -> Iterator[PlacedTensor]:
        return factors(super().tensors(chunk), self.targets)


class Adapter(Module):
    """A and B of one linear layer, or of one expert of a grouped layer.

    `A0`, `A1`, ... [rank, in] are of its parts that are targets, `B` [out, rank] of all parts.
    """

    def __init__(
        self, weight: Tensor, adapted: AdaptedWeight, part_of_row: Tensor, lora: LoraConfig, config: TransformerConfig
    ) -> None:
        """Beside this process's shard `weight`; `part_of_row` [out] has the number of the part of each of its rows."""
        super().__init__()
        rows, columns = weight.shape
        self.is_on = True
        self._names = [f"A{part}" for part in adapted.parts]
        self._is_row = adapted.is_row
        self._is_expert = adapted.placed.expert is not None
        self._scale, self._dropout = lora.alpha / lora.rank, lora.dropout
        self._sequence_parallel = config.sequence_parallel and config.tensor_model_parallel_size > 1
        self._group: dist.ProcessGroup = (
            parallel_state.get_expert_tensor_parallel_group()
            if self._is_expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        for name in self._names:
            self._add(name, weight.new_empty(lora.rank, columns), weight, is_cut=self._is_row)
        self._add("B", weight.new_empty(rows, lora.rank), weight, is_cut=not self._is_row)
        # [out, targets]: which A each row of B is multiplied with. None: with the only one.
        chosen = part_of_row.to(weight.device)[:, None] == torch.tensor(adapted.parts, device=weight.device)
        self.register_buffer("_chosen", None if chosen.all() else chosen.to(weight.dtype), persistent=False)

    def _add(self, name: str, values: Tensor, weight: Tensor, *, is_cut: bool) -> None:
        parameter: Any = torch.nn.Parameter(values)
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
        group, several = self._group, self._group.size() > 1
        if self._is_expert and several:
            # The dispatcher sums over processes that share an expert: outputs, and gradients of inputs.
            down, up = (m if cut else _copied(m, group) for m, cut in ((down, self._is_row), (up, not self._is_row)))
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
            return gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=self._group)
        return _copied(inner, self._group)

    def _dropped(self, inputs: Tensor) -> Tensor:
        if not self._dropout or not self.training:
            return inputs
        # What all processes hold alike is dropped alike. Megatron's repeated passes restore these states.
        is_alike = not self._is_row and not self._sequence_parallel and not self._is_expert
        with get_cuda_rng_tracker().fork(_REPLICATED_DROPOUT if is_alike else _SHARDED_DROPOUT):
            return F.dropout(inputs, self._dropout)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """This process's shard of W + scale B A, computed in float32, in the weight's dtype."""
        down, up = self.matrices()
        return (weight.float() + self._scale * (up.float() @ down.float())).to(weight.dtype)


def _copied(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    copy: Tensor = copy_to_tensor_model_parallel_region(tensor, group=group)
    return copy


class Lora:
    """The adapters of this process's model chunks, whose own weights no longer learn."""

    def __init__(
        self,
        chunks: Sequence[Module],
        layout: ChunkLayout,
        processes: Processes,
        config: TransformerConfig,
        lora: LoraConfig,
        seed: int,
    ) -> None:
        """Adds them to GPTModels that are not wrapped, and fills them."""
        self.config = lora
        self.layout = AdapterLayout(**vars(layout), targets=lora.targets)
        self._processes = processes
        self._adapters: dict[PlacedTensor, Adapter] = {}
        weights = named_parameters(chunks, layout, processes)
        owners = {
            id(weight): (module, name)
            for chunk in chunks
            for module in chunk.modules()
            for name, weight in module.named_parameters(recurse=False)
        }
        for number in layout.chunks_of(processes.pipeline_rank):
            for each in adapted(layout.tensors(number), lora.targets):
                if any(name in weights for name in each.placed.megatron):
                    weight = local_parameter(weights, each.placed)
                    adapter = Adapter(weight, each, self._parts_of_rows(each.placed), lora, config)
                    _attach(*owners[id(weight)], adapter)
                    self._adapters[each.placed] = adapter
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(".lora." in name)
            if config.recompute_granularity and isinstance(embedding := getattr(chunk, "embedding", None), Module):
                # Megatron repeats the passes only of layers whose inputs have a gradient.
                embedding.register_forward_hook(_with_gradient)
        everything = named_parameters(chunks, layout, processes)
        self.parameters = {name: value for name, value in everything.items() if ".lora." in name}
        source: AdapterSource = NewAdapter(layout.arch, lora.rank, seed)
        if lora.path:
            source = PeftAdapter(Path(lora.path), lora, layout.family, layout.arch)
        fill_parameters(self.parameters, source, self.layout, processes)
        if lora.dropout:
            _seed_dropout(processes, seed)

    def _parts_of_rows(self, placed: PlacedTensor) -> Tensor:
        """The index of the Hugging Face tensor that each row of this process's shard is of."""
        arch = self.layout.arch
        rows = [torch.full((hf_shape(name, arch)[0], 1), part) for part, name in enumerate(placed.hf)]
        rule = ShardRule.REPLICATED if placed.layout is ShardRule.ROW else placed.layout
        return take_shard(rows, rule, arch, *shard_of(placed, self._processes)).flatten()

    def merged(self, placed: PlacedTensor, weight: Tensor) -> Tensor:
        """This process's shard of a parameter as engines are to have it."""
        return self._adapters[placed].merged(weight) if placed in self._adapters else weight

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within it the model is the one that training began with: the reference."""
        for adapter in self._adapters.values():
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in self._adapters.values():
                adapter.is_on = True

    def sharded_state(self, chunk: int) -> dict[str, Any]:
        """What a checkpoint of Megatron's holds of this process's `chunk`-th chunk, by the names of parameters."""
        state: dict[str, Any] = {}
        number = self.layout.chunks_of(self._processes.pipeline_rank)[chunk]
        for placed in self.layout.tensors(number):
            name = next((name for name in placed.megatron if name in self.parameters), None)
            if name is None:
                continue
            rank, size = shard_of(placed, self._processes)
            is_cut = placed.layout is not ShardRule.REPLICATED
            axis = int(placed.layout is ShardRule.ROW)
            is_expert = placed.expert is not None
            replica = (
                parallel_state.get_expert_data_parallel_rank()
                if is_expert
                else parallel_state.get_data_parallel_rank(with_context_parallel=True)
            )
            tensor = ShardedTensor.from_rank_offsets(
                placed.megatron[0],
                self.parameters[name],
                *([(axis, rank, size)] if is_cut else []),
                replica_id=(0, 0 if is_cut else rank, replica),
            )
            is_two = placed.layout is ShardRule.GATE_UP
            state[name] = apply_swiglu_sharded_factory(tensor, ()) if is_two else tensor
        return state

    @property
    def names(self) -> set[str]:
        """What peft calls the trained tensors of the whole model."""
        return trained_names(self.layout.family, self.layout.arch, self.config.targets)

    def write_config(self, folder: Path, base: Path) -> None:
        """What peft has to know of adapters of the model in `base`."""
        write_config(folder, self.config, self.names, base)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes what was loaded of a chunk's `sharded_state`."""
        for name, value in state.items():
            self.parameters[name].copy_(value)


def _attach(linear: Any, weight: str, adapter: Adapter) -> None:
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
        hidden = F.rms_norm(hidden, hidden.shape[-1:], linear.layer_norm_weight, linear.eps)
    return output[0] + adapter(hidden), output[1]


def _add_grouped(linear: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    hidden, sizes = inputs
    if not linear.lora["0"].is_on:
        return None
    parts = hidden.split(sizes if isinstance(sizes, list) else sizes.tolist())
    return output[0] + torch.cat([linear.lora[str(i)](part) for i, part in enumerate(parts)]), output[1]


def _with_gradient(_: Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _seed_dropout(processes: Processes, seed: int) -> None:
    """Random states of their own, which checkpoints hold with Megatron's."""
    tracker = get_cuda_rng_tracker()
    alike = processes.rank - processes.tensor_rank
    for name, place in ((_REPLICATED_DROPOUT, alike), (_SHARDED_DROPOUT, processes.rank)):
        if name not in tracker.get_states():
            tracker.add(name, seed_of(f"{seed} {name} {place}"))
