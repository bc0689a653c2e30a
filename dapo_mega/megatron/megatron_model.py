"""A Megatron-Core model that runs packed micro-batches through its pipeline: the base of policies and value models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from dapo_mega.algorithms.aggregation import AggregationKind
from dapo_mega.batching.microbatch import MicroBatch, context_slice
from dapo_mega.batching.plan import PackingLayout
from dapo_mega.batching.samples import FlatSamples
from dapo_mega.batching.scatter import ScatterGroups
from dapo_mega.batching.step import PlannedSamples, StepBatch, pack_step, plan_samples
from dapo_mega.config import ComputeConfig, ModelConfig, ParallelConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.compute_checks import check_compute, use_deterministic_algorithms
from dapo_mega.megatron.core.decoder import PackedStage, build_chunks, run_chunk, run_schedule, unwrapped
from dapo_mega.megatron.core.layers import uses_transformer_engine
from dapo_mega.megatron.core.packed_attention import packed_segments
from dapo_mega.megatron.core.routing import set_routes
from dapo_mega.megatron.core.settings import transformer_config
from dapo_mega.megatron.weights import ChunkLayout, load_weights
from dapo_mega.models import Architecture, ModelFamily
from dapo_mega.models.stored_model import StoredModel

# Tokens per process that Transformer Engine's FP8 products take at once.
_FP8_TOKEN_MULTIPLE = {"none": 1, "delayed": 16, "tensorwise": 16, "blockwise": 128}


class Batch(Protocol):
    """A micro-batch with what its loss needs."""

    @property
    def micro_batch(self) -> MicroBatch: ...


MakeLoss = Callable[[Any], Callable[..., Any]]
"""From a `Batch` to the function of the last stage's output that Megatron's schedule calls."""
MakeLabels = Callable[[MicroBatch], Any]
"""From a micro-batch on this process's device to what the last stage's head is asked for."""


class MegatronModel:
    """This rank's chunks of a model on disk, in a parallel layout."""

    def __init__(
        self,
        stored: StoredModel,
        model: ModelConfig,
        parallel: ParallelConfig,
        processes: Processes,
        compute: ComputeConfig,
        make_stage: Callable[..., PackedStage],
    ) -> None:
        """Build this rank's model chunks of `make_stage`'s stages, and load its shard of the checkpoint `stored` in
        `model.path`."""
        self.path = Path(model.path)
        self.export_config = stored.config
        """What config.json of an export holds; None: what that in `path` does."""
        arch = stored.arch
        arch.check_layout(parallel)
        arch.check_fp8(parallel, compute.fp8.scaling)
        check_compute(arch, model, compute)
        if compute.deterministic:
            use_deterministic_algorithms()
        self.family: ModelFamily = stored.family
        self.arch: Architecture = arch
        self.processes = processes
        self.parallel = parallel
        self.config = transformer_config(arch, model, parallel, compute)
        self.layout = ChunkLayout(stored.family, arch, parallel)
        self._plan_attention = not uses_transformer_engine(model)
        self._fp8_multiple = _FP8_TOKEN_MULTIPLE[compute.fp8.scaling]
        self.chunks: list[Any] = build_chunks(arch, self.config, model, make_stage)
        load_weights([unwrapped(chunk) for chunk in self.chunks], stored.source, self.layout, processes)
        for chunk in self.chunks:
            chunk.eval()

    @property
    def token_multiple(self) -> int:
        """The length of a whole micro-batch must be a multiple of this: context parallelism cuts it into pieces,
        sequence parallelism cuts along tokens, and FP8 products take blocks of tokens."""
        per_process = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        per_process *= self._fp8_multiple
        return math.lcm(self.parallel.segment_multiple, per_process * self.parallel.context)

    @property
    def packing_layout(self) -> PackingLayout:
        """The constraints of this parallel layout on micro-batches."""
        return PackingLayout(
            data_size=self.processes.data_size,
            multiple_of=self.token_multiple,
            # Attention costs 4 h L per token against about 24 h^2 of the layers' matrices; causal masks halve it.
            attention_cost=1.0 / (12 * self.arch.hidden_size),
            count_multiple=self.parallel.micro_batch_multiple,
            segment_multiple=self.parallel.segment_multiple,
        )

    def context_shard(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's positions of its replica's micro-batch; all positions without context parallelism."""
        return context_slice(micro_batch, self.processes.context_rank, self.processes.context_size)

    def pack(
        self,
        samples: FlatSamples | None,
        *,
        aggregation: AggregationKind,
        max_response_tokens: int,
        **settings: Any,
    ) -> StepBatch:
        """Plan rank 0's samples with the `settings` of `plan_samples`, and `receive` them; other ranks' are ignored.
        Collective."""
        planned = None
        if samples is not None and self.processes.rank == 0:
            planned = plan_samples(samples, self.packing_layout, **settings)
        return self.receive(planned, aggregation=aggregation, max_response_tokens=max_response_tokens)

    def receive(
        self, planned: PlannedSamples | None, *, aggregation: AggregationKind, max_response_tokens: int
    ) -> StepBatch:
        """This rank's micro-batches of rank 0's samples, packed. Collective; the other ranks pass None."""
        processes = self.processes
        batch = pack_step(
            planned,
            self.packing_layout,
            ScatterGroups(processes.control, processes.leaders, processes.replica, processes.data_rank),
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
        )
        mini_batches = [[self.context_shard(micro) for micro in mini_batch] for mini_batch in batch.mini_batches]
        return replace(batch, mini_batches=tuple(map(tuple, mini_batches)))

    def _run(self, batches: Sequence[Batch], make_labels: MakeLabels, make_loss: MakeLoss | None = None) -> list[Any]:
        """Run Megatron's schedule over micro-batches; returns what `make_loss`'s functions return, on the last stage.
        Without them there is no backward pass, and the head's outputs are returned."""

        def forward_step(iterator: Iterator[Batch], chunk: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)
            output = self._forward(chunk, batch.micro_batch.to(self.processes.device), make_labels)
            return output, make_loss(batch) if make_loss else lambda output, non_loss_data: output

        return run_schedule(forward_step, batches, self.chunks, learns=make_loss is not None)

    def _forward(self, chunk: Any, batch: MicroBatch, make_labels: MakeLabels) -> Tensor:
        """Hidden states, or on the last chunk what its head makes of them and of the labels."""
        set_routes(unwrapped(chunk), batch.targets.routes)
        segments = packed_segments(
            batch.cu_seqlens,
            batch.max_seqlen,
            plan_attention=self._plan_attention,
            context_rank=self.processes.context_rank,
            context_size=self.processes.context_size,
        )
        return run_chunk(chunk, batch.tokens, batch.positions, segments, make_labels(batch))
