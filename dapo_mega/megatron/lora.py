"""LoRA: trained matrices A and B beside the frozen weights of a model (arXiv 2106.09685).

Queries, keys and values, and gate and up projections, are one layer of Megatron's and several of peft's: they have an A
each, and their rows of B lie in the order of the weight's rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from dapo_mega.config import LoraConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.core.adapters import Adapter, attach, seed_dropout, with_gradient
from dapo_mega.megatron.core.checkpoint_files import sharded_parameter
from dapo_mega.megatron.weights import ChunkLayout, fill_parameters, local_parameter, named_parameters, shard_of
from dapo_mega.models import ShardRule, take_shard
from dapo_mega.models.families import PlacedTensor
from dapo_mega.models.layouts import DELTA, GATED, delta_sections
from dapo_mega.models.megatron_format.entries import DELTA_PARTS
from dapo_mega.models.peft_adapters import (
    AdaptedWeight,
    AdapterSource,
    NewAdapter,
    PeftAdapter,
    adapted,
    factor_shape,
    factors,
    seed_of,
    trained_names,
    write_config,
)


@dataclass(frozen=True)
class AdapterLayout(ChunkLayout):
    """The A and B of each model chunk, in the place of its weights."""

    targets: tuple[str, ...] = ()

    def tensors(self, chunk: int) -> Iterator[PlacedTensor]:
        return factors(super().tensors(chunk), self.targets)


class Lora:
    """The adapters of this process's model chunks, whose own weights no longer learn, and a value model's head, which
    does."""

    def __init__(
        self,
        chunks: Sequence[Module],
        layout: ChunkLayout,
        processes: Processes,
        config: Any,
        lora: LoraConfig,
        seed: int,
    ) -> None:
        """Adds them to unwrapped models with Megatron's `config`, and fills them."""
        self.config = lora
        self._base = layout
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
                    adapter = Adapter(weight, each, self._parts_of_rows(each), lora, config)
                    attach(*owners[id(weight)], adapter)
                    self._adapters[each.placed] = adapter
        is_trained = self._is_trained
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(is_trained(name))
                if not parameter.requires_grad and hasattr(parameter, "clear_high_precision_init_val"):
                    parameter.clear_high_precision_init_val()  # Transformer Engine's, for an optimizer's weights.
            if isinstance(embedding := getattr(chunk, "embedding", None), Module):
                # Megatron repeats the passes only of layers whose inputs have a gradient, and gives stages without
                # layers one to pass on.
                embedding.register_forward_hook(with_gradient)
        everything = named_parameters(chunks, layout, processes)
        self.parameters = {name: value for name, value in everything.items() if is_trained(name)}
        source: AdapterSource = NewAdapter(layout.arch, lora.rank, seed)
        if lora.path:
            source = PeftAdapter(Path(lora.path), lora, layout.family, layout.arch)
        adapters = {name: value for name, value in everything.items() if ".lora." in name}
        fill_parameters(adapters, source, self.layout, processes)
        if lora.dropout:
            alike = processes.rank - processes.tensor_rank
            seed_dropout(seed_of(f"{seed} alike {alike}"), seed_of(f"{seed} apart {processes.rank}"))

    def _is_trained(self, name: str) -> bool:
        return ".lora." in name or (self.layout.arch.has_value_head and name.startswith("output_layer."))

    def _parts_of_rows(self, weight: AdaptedWeight) -> Tensor:
        """The index of the Hugging Face tensor that each row of this process's shard of B is of."""
        arch, (*_, b) = self.layout.arch, weight.factors()
        rows = [torch.full(factor_shape(name, arch, 1), part) for part, name in enumerate(b.hf)]
        return take_shard(rows, b.layout, arch, *shard_of(b, self._processes)).flatten()

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
        number = self._base.chunks_of(self._processes.pipeline_rank)[chunk]
        for placed in (*self.layout.tensors(number), *self._base.tensors(number)):
            name = next((name for name in placed.megatron if name in self.parameters), None)
            if name is None:
                continue
            rank, size = shard_of(placed, self._processes)
            sections: dict[str, int] = {}
            if placed.layout in DELTA:
                rows = delta_sections(size * len(self.parameters[name]), self.layout.arch)
                sections = {part: num // size for part, num in zip(DELTA_PARTS, rows, strict=True)}
            state[name] = sharded_parameter(
                placed.megatron[0],
                self.parameters[name],
                None if placed.layout is ShardRule.REPLICATED else int(placed.layout is ShardRule.ROW),
                (rank, size),
                is_expert=placed.expert is not None,
                in_halves=placed.layout in GATED,
                sections=sections,
            )
        return state

    @property
    def names(self) -> set[str]:
        """The `peft_name` of the trained tensors of the whole model."""
        return trained_names(self.layout.family, self.layout.arch, self.config.targets)

    def write_config(self, folder: Path, base: Path) -> None:
        """What peft has to know of adapters of the model in `base`."""
        write_config(folder, self.config, self.names, base)

    def left_out(self, saved: Collection[str]) -> list[str]:
        """Adapters among the keys of a checkpoint that are no target here."""
        chunks = range(self.layout.num_chunks)
        known = {placed.megatron[0] for chunk in chunks for placed in self.layout.tensors(chunk)}
        here = [key for key in saved if ".lora." in key and key.startswith("decoder.")]
        return [key for key in here if not {key, key.rpartition(".")[0]} & known]

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes what was loaded of a chunk's `sharded_state`."""
        for name, value in state.items():
            self.parameters[name].copy_(value)
