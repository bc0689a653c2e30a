"""The policy: a Megatron-Core model with its optimizer, updated on packed micro-batches of the DAPO objective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from dapo_mega.config import ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.handover import leaving_together
from dapo_mega.models import Architecture, ModelFamily, load_architecture
from dapo_mega.packing import MicroBatch
from dapo_mega.policy.layer_specs import packed_segments, uses_transformer_engine
from dapo_mega.policy.logprobs import vocab_parallel_logprobs
from dapo_mega.policy.model import build_stage, transformer_config, unwrapped, with_gradients
from dapo_mega.policy.objectives import Objective, TokenBatch
from dapo_mega.policy.processes import Processes
from dapo_mega.policy.weights import StageLayout, WeightGatherer, load_hf_weights


@dataclass(frozen=True)
class TokenScores:
    """Log-probs and entropies [N] float32 of the response tokens of one micro-batch; empty off the last stage."""

    logprobs: Tensor
    entropy: Tensor


class ScoringModel:
    """A Megatron model that can score response tokens: the frozen reference, and the base of the policy."""

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, processes: Processes, temperature: float) -> None:
        """Builds this process's stage and loads its shard of the Hugging Face checkpoint `model.path`."""
        self.path = Path(model.path)
        family, arch = load_architecture(self.path)
        arch.check_layout(parallel.tensor, parallel.pipeline)
        self.family: ModelFamily = family
        self.arch: Architecture = arch
        self.processes = processes
        self.temperature = temperature
        self.config = transformer_config(arch, model, parallel)
        self.layout = StageLayout(family, arch, parallel.pipeline)
        self._plan_attention = not uses_transformer_engine(model)
        self._schedule = get_forward_backward_func()
        self.stage: Any = build_stage(arch, self.config, model)
        with leaving_together(processes.control):
            load_hf_weights(unwrapped(self.stage), self.path, self.layout, processes)
        self.stage.eval()

    @property
    def token_multiple(self) -> int:
        """Micro-batch lengths must be a multiple of this (sequence parallelism cuts along tokens)."""
        return self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[TokenScores]:
        """Log-probs and entropies of every response token, without gradients, one entry per micro-batch."""
        self.stage.eval()
        with torch.no_grad():
            results = self._run(iter(micro_batches), len(micro_batches), _collect_scores, forward_only=True)
        if self.processes.is_last_stage:
            return results
        return [TokenScores(torch.empty(0), torch.empty(0)) for _ in micro_batches]

    def _run(self, batches: Iterator[Any], num_micro_batches: int, make_loss: Any, *, forward_only: bool) -> list[Any]:
        """Megatron's schedule over micro-batches; returns what the losses report, on the last stage."""

        def forward_step(iterator: Iterator[Any], stage: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)
            micro_batch: MicroBatch = batch.micro_batch if isinstance(batch, TokenBatch) else batch
            logits = self._forward(stage, micro_batch.to(self.processes.device))
            return logits, make_loss(self, batch)

        results: list[Any] = self._schedule(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=[self.stage],
            num_microbatches=num_micro_batches,
            # Stages exchange true shapes (variable_seq_lengths); this is only the schedule's nominal length.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def _forward(self, stage: Any, batch: MicroBatch) -> Tensor:
        segments = packed_segments(batch.cu_seqlens, batch.max_seqlen, plan_attention=self._plan_attention)
        # Log-probs cast chunk by chunk; Float16Module would cast all logits to float32 at once.
        extra = {"fp32_output": False} if self.config.bf16 else {}
        output: Tensor = stage(batch.tokens[None], batch.positions[None], None, packed_seq_params=segments, **extra)
        return output

    def response_logprobs(self, logits: Tensor, batch: MicroBatch, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] of the micro-batch's response tokens from logits [1, T, V / tp]."""
        rows = batch.response_mask.nonzero()[:, 0].to(logits.device)
        return vocab_parallel_logprobs(
            logits[0],
            rows,
            batch.targets.to(logits.device)[rows],
            temperature=self.temperature,
            vocab_size=self.arch.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            with_entropy=with_entropy,
        )


def _collect_scores(model: ScoringModel, batch: MicroBatch) -> Any:
    def scores(logits: Tensor, non_loss_data: bool = True) -> TokenScores:
        return TokenScores(*model.response_logprobs(logits, batch, with_entropy=True))

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
    ) -> None:
        super().__init__(model, parallel, processes, temperature)
        self.gatherer = WeightGatherer(unwrapped(self.stage), self.layout, processes)
        self.stage = with_gradients(self.stage, self.config)
        self.optimizer: Any = get_megatron_optimizer(_optimizer_config(optimizer, self.config), [self.stage])
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
            # A checkpoint restores how far the schedule is; what it looks like is the configuration's.
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> dict[str, float]:
        """One optimizer step on a mini-batch given as this rank's micro-batches; returns its metrics.

        Loss and gradient are sums over all ranks' tokens divided by the global denominator (DAPO eq. 8), so they
        do not depend on how the mini-batch was split. A mini-batch without any token in the loss changes nothing and
        is counted. Megatron raises RuntimeError for a gradient that is not finite, before any weight changes.
        """
        self.stage.train()
        self.stage.zero_grad_buffer()
        self.optimizer.zero_grad()

        def make_loss(model: ScoringModel, batch: TokenBatch) -> Any:
            return lambda logits: objective.evaluate(model.response_logprobs, logits, batch)

        reports = self._run(iter(batches), len(batches), make_loss, forward_only=False)
        totals = self._sum_reports(reports, objective)
        # Stepping first makes the first update run at 1 / warm-up of the rate instead of at 0.
        self.scheduler.step(increment=1)
        is_empty = objective.denominator(totals) == 0
        grad_norm = 0.0
        if not is_empty:
            successful, grad_norm, _ = self.optimizer.step()
            assert successful
        return {
            **objective.summarise(totals),
            "policy/empty_update_share": float(is_empty),
            "policy/grad_norm": float(grad_norm),
            "policy/learning_rate": float(self.optimizer.param_groups[0]["lr"]),
        }

    def _sum_reports(self, reports: Sequence[Tensor], objective: Objective) -> Tensor:
        """Sum the micro-batches' report vectors over the data-parallel ranks; known to every process."""
        total = torch.zeros(objective.report_size, dtype=torch.float64)
        if self.processes.is_last_stage and self.processes.tensor_rank == 0:
            for report in reports:
                total += report.double().cpu()
        dist.all_reduce(total, group=self.processes.control)
        return total


def _optimizer_config(config: OptimizerConfig, transformer: Any) -> MegatronOptimizerConfig:
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
    )
