"""The part of the model on each rank of a layout, and the order of a pipeline stage's passes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from dapo_mega.config import ParallelConfig

if TYPE_CHECKING:
    from dapo_mega.models import Architecture


@dataclass(frozen=True)
class Chunk:
    """One model chunk: consecutive layers, with the embedding in front and the output layer behind where they are."""

    layers: range
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class RankLayout:
    """A model in a parallel layout of `world_size` ranks."""

    arch: "Architecture"
    parallel: ParallelConfig
    world_size: int

    @property
    def of_critic(self) -> "RankLayout":
        """A value model with the same layers in the same layout."""
        return replace(self, arch=self.arch.with_value_head())

    @property
    def of_policy_alone(self) -> "RankLayout":
        """Without the layer of multi-token prediction that is trained beside it."""
        return replace(self, arch=replace(self.arch, trains_mtp=False))

    @property
    def data_size(self) -> int:
        return self.parallel.data_size(self.world_size)

    @property
    def optimizer_shards(self) -> int:
        """Processes that share the optimizer's state of the dense parameters: data x context parallel."""
        return self.data_size * self.parallel.context

    @property
    def expert_shards(self) -> int:
        """Processes that share the optimizer's state of an expert spread over processes."""
        return self.world_size // (self.parallel.pipeline * self.parallel.expert * self.parallel.expert_tensor)

    @property
    def has_spread_experts(self) -> bool:
        """Whether experts have gradient buffers of their own; held whole, they lie among the dense parameters."""
        return self.arch.experts is not None and self.parallel.expert > 1

    @property
    def query_heads(self) -> int:
        return self.arch.num_attention_heads // self.parallel.tensor

    @property
    def key_heads(self) -> int:
        """Key heads, and value heads, that the attention of a process works with; it may share one with others."""
        return max(1, self.arch.num_query_groups // self.parallel.tensor)

    @property
    def gathers_projection(self) -> bool:
        """Whether processes share key heads: each projects to an equal part of all heads, and gathers the rest."""
        return self.parallel.tensor > self.arch.num_query_groups

    @property
    def projected_heads(self) -> int:
        """Heads of queries, their gates, keys and values in the product that a process cuts its own from."""
        gated = 1 + self.arch.output_gate
        if self.gathers_projection:
            return gated * self.arch.num_attention_heads + 2 * self.arch.num_query_groups
        return gated * self.query_heads + 2 * self.key_heads

    @property
    def projection_rows(self) -> int:
        """Rows of the weight that projects to queries, their gates, keys and values, on one process."""
        heads = (1 + self.arch.output_gate) * self.arch.num_attention_heads + 2 * self.arch.num_query_groups
        return heads * self.arch.head_dim // self.parallel.tensor

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding per process, padding included."""
        return self.arch.padded_vocab_size(self.parallel.tensor) // self.parallel.tensor

    @property
    def sequence_size(self) -> int:
        """Processes among which sequence parallelism shares the tokens between the tensor-parallel regions."""
        return self.parallel.tensor if self.parallel.sequence else 1

    def chunks(self, stage: int) -> list[Chunk]:
        """The model chunks of a pipeline stage, in the order of their layers."""
        return self._chunks[stage :: self.parallel.pipeline]

    @cached_property
    def _chunks(self) -> list[Chunk]:
        layers = self.parallel.chunk_layers(self.arch.num_layers)
        return [Chunk(held, number == 0, number == len(layers) - 1) for number, held in enumerate(layers)]

    @cached_property
    def stage_layers(self) -> list[list[int]]:
        """The layers of each pipeline stage."""
        stages = map(self.chunks, range(self.parallel.pipeline))
        return [[layer for chunk in chunks for layer in chunk.layers] for chunks in stages]

    def held_forwards(self, stage: int, num_micro_batches: int) -> Iterator[list[int]]:
        """For every moment at which a stage has just finished a forward pass: how many forward passes of each of its
        chunks wait for their backward pass (1F1B; interleaved with two or more chunks, as Megatron orders them). After
        the warm-up the schedule repeats itself, and one repetition is given."""
        pipeline, virtual = self.parallel.pipeline, self.parallel.virtual_pipeline
        total = num_micro_batches * virtual
        warmup = pipeline - stage - 1
        if virtual > 1:
            warmup = 2 * warmup + (virtual - 1) * pipeline
        warmup = min(warmup, total)
        held = [0] * virtual
        for step in range(min(total, warmup + pipeline * virtual)):
            held[_chunk_at(step, pipeline, virtual)] += 1
            yield list(held)
            if step >= warmup:
                held[virtual - 1 - _chunk_at(step - warmup, pipeline, virtual)] -= 1

    def bubble_share(self, num_micro_batches: int) -> float:
        """Idle share of a stage's time: (p - 1) / (v m) over the work, Narayanan et al. 2021, section 2.2."""
        idle = (self.parallel.pipeline - 1) / (self.parallel.virtual_pipeline * num_micro_batches)
        return idle / (1 + idle)


def _chunk_at(step: int, pipeline: int, virtual: int) -> int:
    """Chunk of the `step`-th forward pass: rounds of as many micro-batches as there are stages."""
    return step % (pipeline * virtual) // pipeline
