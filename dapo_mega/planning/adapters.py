"""Counts what LoRA adapters add to a model: their elements, and what autograd keeps of them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from dapo_mega.config import LoraConfig, ParallelConfig
from dapo_mega.planning.rank_layout import Chunk, RankLayout

if TYPE_CHECKING:
    from dapo_mega.models import Architecture
    from dapo_mega.models.peft_adapters import AdaptedWeight


class Adapted(NamedTuple):
    """A weight of a layer that has adapters, and its size in the model; one of an expert stands for those of all."""

    weight: AdaptedWeight
    rows: int
    columns: int

    @property
    def is_expert(self) -> bool:
        return self.weight.placed.expert is not None

    @property
    def name(self) -> str:
        """Megatron's."""
        return self.weight.placed.megatron[0]

    def local_size(self, placement: RankLayout) -> tuple[int, int, int]:
        """On one process: rows of B, columns of A, and how many such weights there are."""
        parallel, experts = placement.parallel, placement.arch.experts
        size = (parallel.expert_tensor if self.is_expert else parallel.tensor) if self.weight.is_cut else 1
        number = experts.number // parallel.expert if self.is_expert and experts else 1
        if self.weight.is_row:
            return self.rows, self.columns // size, number
        return self.rows // size, self.columns, number

    def num_alike(self, placement: RankLayout, rank: int) -> int:
        """Elements of A and B that tensor-parallel processes hold alike, outside of experts."""
        if self.is_expert:
            return 0
        up, down, _ = self.local_size(placement)
        is_alike = not self.weight.is_cut
        return rank * (
            (is_alike or not self.weight.is_row) * down * len(self.weight.parts) + (is_alike or self.weight.is_row) * up
        )


def num_trained_parameters(arch: Architecture, lora: LoraConfig) -> int:
    """Elements of A and B of the whole model."""
    whole, chunk = RankLayout(arch, ParallelConfig(), 1), Chunk(range(arch.num_layers), True, True)
    return sum(map(sum, adapter_numels(whole, chunk, lora)))


def adapter_numels(placement: RankLayout, chunk: Chunk, lora: LoraConfig) -> tuple[list[int], list[int]]:
    """Elements of each A and B of a chunk on one process, and of a value model's head: outside of experts, and of
    experts. B has rows for all parts of a fused layer."""
    arch, rank = placement.arch, lora.rank
    dense = [arch.hidden_size] * (arch.has_value_head and chunk.is_last)
    experts: list[int] = []
    alike = {(arch.has_experts(layer), arch.has_delta(layer)): layer for layer in chunk.layers}
    for layer in chunk.layers:
        example = alike[arch.has_experts(layer), arch.has_delta(layer)]
        for found in adapted_in(arch, example, lora):
            up, down, number = found.local_size(placement)
            numels = [rank * down] * len(found.weight.parts) + [rank * up]
            if found.is_expert:
                experts += numels * number
            else:
                dense += numels
    return dense, experts


@cache
def adapted_in(arch: Architecture, layer: int, lora: LoraConfig) -> list[Adapted]:
    """The weights of a layer that have adapters."""
    from dapo_mega.models.families import find_family
    from dapo_mega.models.peft_adapters import adapted, factor_shape, peft_name

    tensors = find_family(arch.model_type).tensors(arch, range(layer, layer + 1), False, False)
    found = []
    for weight in adapted((placed for placed in tensors if placed.expert in (None, 0)), lora.targets):
        rows, columns = (
            [factor_shape(peft_name(name, factor), arch, 1)[axis] for name in weight.placed.hf]
            for axis, factor in enumerate("BA")
        )
        found.append(Adapted(weight, sum(rows), columns[0]))
    return found


def kept_by_adapters(
    found: Adapted, placement: RankLayout, lora: LoraConfig, element: int, tokens: float, rows: float
) -> float:
    """Bytes that autograd keeps of the adapters of one weight: the A of all targets in one matrix; B where the layer is
    of several parts, with zeros for each part that it is not of; what is between them; dropped inputs, and which were.
    `tokens` of a process lie between layers, `rows` go to its experts."""
    up, down, number = found.local_size(placement)
    inner = lora.rank * len(found.weight.parts)
    inputs = rows if found.is_expert else tokens * (placement.sequence_size if found.weight.is_row else 1)
    is_gathered = found.weight.is_cut and not (found.weight.is_row or found.is_expert)
    between = tokens * placement.sequence_size if is_gathered else rows if found.is_expert else tokens
    kept = inner * (number * (down + up * (len(found.weight.placed.hf) > 1)) + between) * element
    return kept + (lora.dropout > 0) * inputs * down * (element + 1)
