"""The value model (critic) of PPO: a Megatron-Core model with a scalar head, in the policy's layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.config import ComputeConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.trained_model import TrainedModel
from dapo_mega.megatron.value_head import ValueStage
from dapo_mega.megatron.value_loss import ValueBatch, ValueLoss
from dapo_mega.models.stored_model import open_value_model


class ValueModel(TrainedModel):
    """Estimates the return after each position of a sequence, and learns from returns.

    It takes the micro-batches that a policy of the same parallel sizes has packed.
    """

    role = "critic"

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        processes: Processes,
        *,
        updates_per_step: int,
        num_steps: int,
        compute: ComputeConfig | None = None,
        lora: LoraConfig | None = None,
        seed: int = 0,
    ) -> None:
        """Build this rank's model chunks and load its shard of `model.path`: a value model, or a policy, whose layers
        get a head of zeros. Then all values are 0, and the first advantages are those of no baseline instead of a
        random one. With `lora` adapters and the head learn."""
        stored = open_value_model(Path(model.path))
        super().__init__(
            stored,
            model,
            stored.arch.layout_beside(parallel),
            optimizer,
            processes,
            make_stage=partial(ValueStage, has_bias=stored.arch.value_bias),
            updates_per_step=updates_per_step,
            num_steps=num_steps,
            compute=compute or ComputeConfig(),
            lora=lora,
            seed=seed,
        )

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Values [N] float32 without gradients, one entry per micro-batch, of the states before each response token:
        the rows are those of the policy's log-probs. Empty off the last stage."""
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            batches = [ValueBatch(micro_batch) for micro_batch in micro_batches]
            values: list[Tensor] = self._run(batches, MicroBatch.response_rows)
        return values if self.processes.is_last_stage else [torch.empty(0) for _ in micro_batches]

    def update(self, batches: Sequence[ValueBatch], loss: ValueLoss) -> dict[str, float]:
        """One optimizer step on a mini-batch given as this rank's micro-batches; returns its metrics.

        Like `MegatronPolicy.update`, it does not depend on how the mini-batch was split. Metrics are of the weights
        before the step, `critic/explained_variance` of the batches' old values.
        """

        def make_loss(batch: ValueBatch) -> Any:
            def evaluate(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                term = loss.evaluate(values, batch)
                return term.total, term.denominator, torch.stack([term.sums[name] for name in loss.sum_names])

            return evaluate

        update = self._step(batches, make_loss, MicroBatch.response_rows, loss.sum_names)
        return self._metrics(update, loss.metrics(update.sums))
