"""Megatron's parallel layout."""

import re
from itertools import accumulate
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from dapo_mega.config.base import Section, divisors


class ParallelConfig(Section):
    """Megatron's parallel layout. The data-parallel size is the world size divided by the other sizes."""

    tensor: int = Field(default=1, ge=1)
    """GPUs that share each layer's matrices; keep it within a machine. Raise it when out of memory."""
    pipeline: int = Field(default=1, ge=1)
    """Pipeline stages: groups of GPUs that hold consecutive layers. For models too large for one machine."""
    virtual_pipeline: int = Field(default=1, ge=1)
    """Model chunks per pipeline stage. 2 or more interleaves them: less idle time, more communication."""
    pipeline_layout: tuple[int, ...] | None = None
    """Layers of each model chunk, in the order in which a token passes through them: [3, 4, 2], or as in Megatron
    `Et*3|t*4|ttL`. 0 leaves the embedding or the output layer alone. null: as even as possible, ends with fewer."""
    context: int = Field(default=1, ge=1)
    """GPUs that share the tokens of each sequence. For long responses."""
    expert: int = Field(default=1, ge=1)
    """GPUs that share the experts of a mixture of experts."""
    expert_tensor: int = Field(default=1, ge=1)
    """GPUs that share each expert's matrices: 1 or tensor."""
    sequence: bool = False
    """Share activations over the tensor-parallel GPUs too. Saves memory; needs tensor >= 2."""
    world_size: int | None = Field(default=None, ge=1)
    """Number of trainer processes (GPUs) that the file is made for. --dry-run and plan_run use it, and torchrun must
    start as many; null: any."""

    @field_validator("pipeline_layout", mode="before")
    @classmethod
    def _read_layout(cls, given: Any) -> Any:
        return _chunk_sizes(given) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError("parallel.sequence=true needs parallel.tensor >= 2; set one of the two")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_pipeline={self.virtual_pipeline} interleaves chunks of pipeline stages; it needs "
                f"parallel.pipeline >= 2, or must be 1"
            )
        sizes = self.pipeline_layout
        if sizes is not None and (len(sizes) != self.num_chunks or min(sizes) < 0 or 0 in sizes[1:-1]):
            raise ValueError(
                f"parallel.pipeline_layout={list(sizes)} must have the layers of parallel.pipeline={self.pipeline} x "
                f"parallel.virtual_pipeline={self.virtual_pipeline} = {self.num_chunks} chunks, at least 1 in each "
                f"but the first and the last; correct one of the three"
            )
        if self.expert_tensor > 1 and self.expert_tensor != self.tensor:
            raise ValueError(f"parallel.expert_tensor={self.expert_tensor} must be 1 or parallel.tensor={self.tensor}")
        if self.world_size is not None:
            self.data_size(self.world_size)
        return self

    def data_size(self, world_size: int) -> int:
        """Number of data-parallel replicas among `world_size` processes."""
        replica = self.tensor * self.pipeline * self.context
        if world_size % replica:
            raise ValueError(
                f"world size {world_size} is not a multiple of tensor {self.tensor} x pipeline "
                f"{self.pipeline}{f' x context {self.context}' if self.context > 1 else ''} = {replica}; start "
                f"{max(1, world_size // replica) * replica} or {(world_size // replica + 1) * replica} processes, or "
                f"change parallel.tensor / parallel.pipeline{' / parallel.context' if self.context > 1 else ''}"
            )
        per_stage = world_size // self.pipeline
        experts = self.expert * self.expert_tensor
        if per_stage % experts:
            raise ValueError(
                f"parallel.expert={self.expert} x parallel.expert_tensor={self.expert_tensor} = {experts} does not "
                f"divide the {per_stage} processes of a pipeline stage (world size {world_size} / pipeline "
                f"{self.pipeline}); choose expert sizes from {divisors(per_stage)}"
            )
        return world_size // replica

    @property
    def num_chunks(self) -> int:
        """Model chunks of all stages together."""
        return self.pipeline * self.virtual_pipeline

    def chunk_layers(self, num_layers: int) -> list[range]:
        """The layers of each model chunk of a model, in the order in which a token passes through them; chunk c is on
        stage c % pipeline. Where `pipeline_layout` does not say, those that are left over go to the chunks between,
        then to the first: the last has the output layer."""
        sizes = self.pipeline_layout
        if sizes is None:
            size, rest = divmod(num_layers, self.num_chunks)
            larger = [*range(1, self.num_chunks - 1), 0][:rest]
            sizes = tuple(size + (chunk in larger) for chunk in range(self.num_chunks))
        return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

    @property
    def segment_multiple(self) -> int:
        """Packed sequences are padded to a multiple of this: context parallelism cuts each into 2 x context pieces."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def micro_batch_multiple(self) -> int:
        """Number of micro-batches per process must be a multiple of this: interleaved stages work in full rounds."""
        return self.pipeline if self.virtual_pipeline > 1 else 1


def _chunk_sizes(text: str) -> list[int]:
    """Layers of each chunk of Megatron's `pipeline_model_parallel_layout`, such as `Et*3|(tt|)*4L`."""
    unrolled = re.sub(r"[,\s]", "", text)
    for repeated in (r"\(([^()]*)\)\*(\d{1,3})", r"([^*])\*(\d{1,3})"):
        unrolled = re.sub(repeated, lambda found: found[1] * int(found[2]), unrolled)
    if not re.fullmatch(r"Et*(\|t*)*L", unrolled):
        raise ValueError(
            f"parallel.pipeline_layout={text!r} is not a layout; give E for the embedding, t for each layer, | between "
            f"chunks and L for the output layer, such as Et*3|t*4|ttL, or a list of layers such as [3, 4, 2]"
        )
    return [chunk.count("t") for chunk in unrolled.split("|")]
