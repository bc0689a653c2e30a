"""The policy: a Megatron-Core model with its optimizer, updated on packed micro-batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import track_moe_metrics
from torch import Tensor

from dapo_mega.algorithms.aggregation import AggregationKind
from dapo_mega.batching.microbatch import MicroBatch, context_slice
from dapo_mega.batching.plan import PackingLayout
from dapo_mega.batching.samples import FlatSamples
from dapo_mega.batching.scatter import ScatterGroups
from dapo_mega.batching.step import StepBatch, pack_step
from dapo_mega.config import ComputeConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.distributed.errors import raise_on_all_ranks
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.gathering import WeightGatherer
from dapo_mega.megatron.layer_specs import check_compute, use_deterministic_algorithms, uses_transformer_engine
from dapo_mega.megatron.model import build_chunks, transformer_config, unwrapped, with_gradients
from dapo_mega.megatron.objectives import Objective, TokenBatch, TokenOutputs
from dapo_mega.megatron.output_layer import ChosenTokens
from dapo_mega.megatron.packed_attention import packed_segments
from dapo_mega.megatron.weights import ChunkLayout, load_hf_weights
from dapo_mega.models import Architecture, ModelFamily, load_architecture
from dapo_mega.types import WeightBucket


@dataclass(frozen=True)
class TokenScores:
    """Log-probs and entropies [N] float32 of the response tokens of one micro-batch; empty off the last stage."""

    logprobs: Tensor
    entropy: Tensor


class ScoringModel:
    """A Megatron model that can score response tokens: the frozen reference, and the base of the policy."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        processes: Processes,
        temperature: float,
        compute: ComputeConfig | None = None,
    ) -> None:
        """Build this rank's model chunks and load its shard of the Hugging Face checkpoint `model.path`."""
        compute = compute or ComputeConfig()
        self.path = Path(model.path)
        family, arch = load_architecture(self.path)
        arch.check_layout(parallel)
        check_compute(arch, model, compute)
        if compute.deterministic:
            use_deterministic_algorithms()
        self.family: ModelFamily = family
        self.arch: Architecture = arch
        self.processes = processes
        self.parallel = parallel
        self.config = transformer_config(arch, model, parallel, compute)
        self.layout = ChunkLayout(family, arch, parallel.pipeline, parallel.virtual_pipeline)
        self._plan_attention = not uses_transformer_engine(model)
        self._fp8_multiple = _FP8_TOKEN_MULTIPLE[compute.fp8.scaling]
        self._schedule = get_forward_backward_func()
        self.chunks: list[Any] = build_chunks(
            arch, self.config, model, temperature=temperature, fused_output_layer=compute.fused_output_layer
        )
        with raise_on_all_ranks(processes.control):
            load_hf_weights([unwrapped(chunk) for chunk in self.chunks], self.path, self.layout, processes)
        for chunk in self.chunks:
            chunk.eval()

    @property
    def token_multiple(self) -> int:
        """The length of a whole micro-batch must be a multiple of this: context parallelism cuts it into pieces,
        sequence parallelism cuts along tokens, and FP8 products take blocks of tokens."""
        per_process = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        per_process = math.lcm(per_process, self._fp8_multiple)
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
        token_budget: int,
        aggregation: AggregationKind,
        max_response_tokens: int,
        samples_per_update: int | None = None,
    ) -> StepBatch:
        """Plan, scatter and pack rank 0's samples; returns this rank's micro-batches. Other ranks' samples are ignored.

        Collective. All samples form one mini-batch unless `samples_per_update` is given.
        """
        processes = self.processes
        batch = pack_step(
            samples if processes.rank == 0 else None,
            self.packing_layout,
            ScatterGroups(processes.control, processes.leaders, processes.replica, processes.data_rank),
            token_budget=token_budget,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
            samples_per_update=samples_per_update,
        )
        mini_batches = [[self.context_shard(micro) for micro in mini_batch] for mini_batch in batch.mini_batches]
        return replace(batch, mini_batches=tuple(map(tuple, mini_batches)))

    def score(self, micro_batches: Sequence[MicroBatch], *, temperature: float | None = None) -> list[TokenScores]:
        """Log-probs and entropies of every response token without gradients, one entry per micro-batch; `temperature`
        defaults to the model's."""
        for chunk in self.chunks:
            chunk.eval()
        batches = [TokenBatch(micro_batch) for micro_batch in micro_batches]
        with torch.no_grad(), self._at_temperature(temperature):
            results = self._run(batches, _collect_scores, with_entropy=True, forward_only=True)
        if self.processes.is_last_stage:
            return results
        return [TokenScores(torch.empty(0), torch.empty(0)) for _ in micro_batches]

    @contextlib.contextmanager
    def _at_temperature(self, temperature: float | None) -> Iterator[None]:
        stages = [unwrapped(chunk) for chunk in self.chunks]
        own = [stage.temperature for stage in stages]
        try:
            for stage, value in zip(stages, own, strict=True):
                stage.temperature = value if temperature is None else temperature
            yield
        finally:
            for stage, value in zip(stages, own, strict=True):
                stage.temperature = value

    def _run(
        self, batches: Sequence[TokenBatch], make_loss: MakeLoss, *, with_entropy: bool, forward_only: bool
    ) -> list[Any]:
        """Run Megatron's schedule over micro-batches; returns what `make_loss`'s functions return, on the last
        stage."""

        def forward_step(iterator: Iterator[TokenBatch], chunk: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)
            return self._forward(chunk, batch.micro_batch.to(self.processes.device), with_entropy), make_loss(batch)

        iterators = [iter(batches) for _ in self.chunks]
        results: list[Any] = self._schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(batches),
            # Stages exchange the real shapes (variable_seq_lengths); the schedule only needs some length.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def _forward(self, chunk: Any, batch: MicroBatch, with_entropy: bool) -> Tensor:
        """Hidden states, or on the last chunk log-probs and entropies [2, N] of the response tokens."""
        segments = packed_segments(
            batch.cu_seqlens,
            batch.max_seqlen,
            plan_attention=self._plan_attention,
            context_rank=self.processes.context_rank,
            context_size=self.processes.context_size,
        )
        rows = batch.targets.response_mask.nonzero()[:, 0]
        chosen = ChosenTokens(rows, batch.targets.token_ids[rows].long(), with_entropy)
        output: Tensor = chunk(
            batch.tokens[None], batch.positions[None], None, labels=chosen, packed_seq_params=segments
        )
        return output


MakeLoss = Callable[[TokenBatch], Callable[..., Any]]

# Tokens per process that Transformer Engine's FP8 products take at once.
_FP8_TOKEN_MULTIPLE = {"none": 1, "delayed": 16, "tensorwise": 16, "blockwise": 128}


def _collect_scores(batch: TokenBatch) -> Callable[..., TokenScores]:
    def scores(output: Tensor, non_loss_data: bool = True) -> TokenScores:
        return TokenScores(*output.unbind())

    return scores


class MegatronPolicy(ScoringModel):
    """The model being trained: Megatron's DDP, distributed AdamW, gradient clipping and learning-rate schedule."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        processes: Processes,
        *,
        temperature: float,
        updates_per_step: int,
        num_steps: int,
        compute: ComputeConfig | None = None,
    ) -> None:
        compute = compute or ComputeConfig()
        super().__init__(model, parallel, processes, temperature, compute)
        self._gatherer = WeightGatherer([unwrapped(chunk) for chunk in self.chunks], self.layout, processes)
        self.chunks = with_gradients(self.chunks, self.config, compute)
        self.optimizer: Any = get_megatron_optimizer(_optimizer_config(optimizer, self.config, compute), self.chunks)
        self._overlaps_param_gather = compute.overlap_param_gather
        warmup = optimizer.warmup_steps * updates_per_step
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=optimizer.learning_rate,
            min_lr=optimizer.learning_rate if optimizer.schedule == "constant" else 0.0,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(num_steps * updates_per_step, warmup + 1),
            lr_decay_style=optimizer.schedule,
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            # A checkpoint restores the schedule's position; its shape comes from the configuration.
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    def update(
        self, batches: Sequence[TokenBatch], objective: Objective, *, scores: list[TokenScores] | None = None
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch given as this rank's micro-batches; returns its metrics.

        Loss and gradient are sums over all ranks' tokens divided by the global denominator (DAPO eq. 8), so they do not
        depend on how the mini-batch was split. A mini-batch without tokens in the loss changes no weight and is
        counted. Megatron raises RuntimeError for a gradient that is not finite, before any weight changes.

        `scores`, an empty list if given, gets the scores of each micro-batch's response tokens under the weights
        before the step.
        """
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def make_loss(batch: TokenBatch) -> Any:
            def loss(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                if scores is not None:
                    scores.append(TokenScores(*output.detach().unbind()))
                term = objective.evaluate(TokenOutputs(output[0], output[1]), batch)
                return term.total, term.denominator, torch.stack([term.sums[name] for name in objective.sum_names])

            return loss

        with_entropy = "entropy" in objective.needs or scores is not None
        sums = self._summed(
            self._run(batches, make_loss, with_entropy=with_entropy, forward_only=False), objective.sum_names
        )
        if scores is not None and not self.processes.is_last_stage:
            scores += [TokenScores(torch.empty(0), torch.empty(0)) for _ in batches]
        # Stepping first gives the first update 1 / warm-up of the learning rate instead of 0.
        self.scheduler.step(increment=1)
        is_empty = sums["denominator"] == 0
        grad_norm = 0.0
        if not is_empty:
            successful, grad_norm, _ = self.optimizer.step()
            assert successful
        return {
            **objective.metrics(sums),
            **self._router_losses(len(batches)),
            "policy/empty_update_share": float(is_empty),
            "policy/grad_norm": float(grad_norm),
            "policy/learning_rate": float(self.optimizer.param_groups[0]["lr"]),
        }

    def _router_losses(self, num_micro_batches: int) -> dict[str, float]:
        """The auxiliary losses of a mixture of experts: means over layers, micro-batches and processes."""
        wanted = {}
        if self.config.num_moe_experts and self.config.moe_router_load_balancing_type == "aux_loss":
            wanted["load_balancing_loss"] = "policy/load_balancing_loss"
        if self.config.num_moe_experts and self.config.moe_z_loss_coeff:
            wanted["z_loss"] = "policy/router_z_loss"
        if not wanted:
            return {}
        losses: dict[str, Tensor] = {}
        track_moe_metrics(
            loss_scale=1.0 / num_micro_batches,
            iteration=0,
            total_loss_dict=losses,
            force_initialize=True,
            track_names=list(wanted),
            num_layers=self.config.num_layers,
        )
        return {metric: float(losses[name]) for name, metric in wanted.items()}

    def weights(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        """Collective: full tensors on every replica's leader; see `WeightGatherer.buckets`."""
        self.finish_param_gather()
        return self._gatherer.buckets(bucket_bytes)

    def stage_weights(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        """Collective: full tensors on each pipeline stage's leader; see `WeightGatherer.buckets`."""
        self.finish_param_gather()
        return self._gatherer.buckets(bucket_bytes, per_stage=True)

    def finish_param_gather(self) -> None:
        """Collective: afterwards every rank has the weights of the last update, also when gathering them was left to
        the next forward pass."""
        if self._overlaps_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def _summed(self, sums: Sequence[Tensor], names: Sequence[str]) -> dict[str, float]:
        """The sums of all micro-batches and data-parallel ranks, in the order of `names`, on every rank."""
        total = torch.zeros(len(names), dtype=torch.float64)
        if self.processes.is_last_stage and self.processes.tensor_rank == 0:
            for values in sums:
                total += values.double().cpu()
        dist.all_reduce(total, group=self.processes.control)
        return dict(zip(names, total.tolist(), strict=True))


def _optimizer_config(
    config: OptimizerConfig, transformer: TransformerConfig, compute: ComputeConfig
) -> MegatronOptimizerConfig:
    # Without a GPU the optimizer's state is in host memory already.
    offload = compute.optimizer_offload if torch.cuda.is_available() else 0.0
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        min_lr=config.learning_rate if config.schedule == "constant" else 0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.epsilon,
        clip_grad=config.clip_grad,
        bf16=transformer.bf16,
        params_dtype=transformer.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=compute.overlap_param_gather,
        optimizer_cpu_offload=offload > 0,
        optimizer_offload_fraction=offload,
        overlap_cpu_optimizer_d2h_h2d=offload > 0,
    )
