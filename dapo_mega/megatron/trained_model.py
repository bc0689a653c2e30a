"""A Megatron-Core model with its optimizer: one update per mini-batch of packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.config import ComputeConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.decoder import PackedStage, unwrapped
from dapo_mega.megatron.core.optimization import (
    counted_weights,
    load_optimizer,
    make_optimizer,
    make_schedule,
    router_losses,
    with_gradients,
)
from dapo_mega.megatron.gathering import WeightGatherer
from dapo_mega.megatron.lora import Lora
from dapo_mega.megatron.megatron_model import Batch, MakeLabels, MakeLoss, MegatronModel
from dapo_mega.models.peft_adapters import check_lora
from dapo_mega.models.stored_model import StoredModel
from dapo_mega.types import Receivers, Selection, WeightBucket, WeightSource

_ROUTER_LOSSES: Final = ("load_balancing_loss", "router_z_loss")


@dataclass(frozen=True)
class Update:
    """What one optimizer step did: the sums of all micro-batches and ranks, and the gradient's norm before clipping.
    `router_losses` are the auxiliary losses of a mixture of experts by their names in metrics, as means over layers,
    micro-batches and processes."""

    sums: Mapping[str, float]
    grad_norm: float
    learning_rate: float
    router_losses: Mapping[str, float]
    is_skipped: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no token was in the loss; no weight has changed then."""
        return self.sums["denominator"] == 0

    def finite(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """These metrics of the loss; of a skipped update only numbers, to spoil none of the step's means."""
        return {name: value for name, value in metrics.items() if not self.is_skipped or math.isfinite(value)}


class TrainedModel(MegatronModel):
    """A model being trained: Megatron's DDP, distributed AdamW, gradient clipping and learning-rate schedule."""

    role = "policy"

    def __init__(
        self,
        stored: StoredModel,
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        processes: Processes,
        *,
        make_stage: Callable[..., PackedStage],
        updates_per_step: int,
        num_steps: int,
        compute: ComputeConfig,
        lora: LoraConfig | None = None,
        seed: int = 0,
    ) -> None:
        """With `lora` only adapters learn; `seed` is that of their first values and of dropout."""
        if lora:
            check_lora(lora, stored.family, stored.arch)
        super().__init__(stored, model, parallel, processes, compute, make_stage)
        inner = [unwrapped(chunk) for chunk in self.chunks]
        self.lora = Lora(inner, self.layout, processes, self.config, lora, seed) if lora else None
        merged = {"merged": self.lora.merged} if self.lora else {}
        # Engines have no layers of multi-token prediction.
        of_engines = replace(self.layout, arch=replace(self.arch, trains_mtp=False))
        self._gatherers = {"merged": WeightGatherer(inner, of_engines, processes, **merged)}
        self._gatherers["whole"] = self._gatherers["merged"]
        if self.arch.trains_mtp:
            self._gatherers["whole"] = WeightGatherer(inner, self.layout, processes)
        if self.lora:
            self._gatherers["base"] = WeightGatherer(inner, self.layout, processes)
            self._gatherers["adapters"] = WeightGatherer(inner, self.lora.layout, processes)
        self.chunks = with_gradients(self.chunks, self.config, compute)
        self.optimizer = make_optimizer(optimizer, self.config, compute, self.chunks)
        self._overlaps_param_gather = compute.overlap_param_gather
        self.updates_per_step = updates_per_step
        self.fp8_settings = compute.fp8.model_dump(include={"scaling", "format", "bf16_layers_at_ends"})
        self.max_skipped, self._skipped_in_a_row = optimizer.max_skipped_updates, 0
        self.scheduler = make_schedule(self.optimizer, optimizer, updates_per_step, num_steps)

    def load_optimizer(self, optimizer: Mapping[str, Any], schedule: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint. Settings, such as learning rates and betas, stay those of the
        configuration; `schedule` is what `schedule_state` returned, its place counted in steps of this run's size."""
        load_optimizer(self.optimizer, optimizer)
        updates_per_step = schedule.get("updates_per_step", self.updates_per_step)  # Earlier versions saved none.
        place = schedule["num_steps"] * self.updates_per_step // updates_per_step
        self.scheduler.load_state_dict({**schedule, "num_steps": place})

    def schedule_state(self) -> dict[str, Any]:
        """The schedule's place, and updates per step, for a checkpoint."""
        return {**self.scheduler.state_dict(), "updates_per_step": self.updates_per_step}

    def _step(
        self, batches: Sequence[Batch], make_loss: MakeLoss, make_labels: MakeLabels, sum_names: Sequence[str]
    ) -> Update:
        """One optimizer step on a mini-batch given as this rank's micro-batches.

        `make_loss`'s functions return the loss, its denominator and the sums [names], `denominator` among them, of one
        micro-batch. A gradient that is not finite changes neither weights nor the optimizer's state: the update is
        skipped, on all ranks, or all raise InputError after more than `optimizer.max_skipped_updates` in a row. The
        schedule goes on, as it counts the run's steps.
        """
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = self._summed(self._run(batches, make_labels, make_loss), sum_names)
        # Stepping first gives the first update 1 / warm-up of the learning rate instead of 0.
        self.scheduler.step(increment=1)
        grad_norm, is_skipped = 0.0, False
        if sums["denominator"] != 0:
            self.optimizer.prepare_grads()
            grad_norm = float(self.optimizer.get_grad_norm())
            is_skipped = self._is_refused(grad_norm)
            if not is_skipped:
                successful, grad_norm, _ = self.optimizer.step()
                assert successful
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        return Update(sums, float(grad_norm), learning_rate, router_losses(self.config, len(batches)), is_skipped)

    def _metrics(self, update: Update, of_loss: Mapping[str, float]) -> dict[str, float]:
        """The metrics of an update: those of its loss, and under the model's role what all losses have in common."""
        metrics = {**update.finite(of_loss), f"{self.role}/learning_rate": update.learning_rate}
        if self.max_skipped:
            metrics[f"{self.role}/skipped_update_share"] = float(update.is_skipped)
        if not update.is_empty and not update.is_skipped:
            metrics[f"{self.role}/grad_norm"] = update.grad_norm
            losses = update.router_losses
            metrics |= {f"{self.role}/{name}": losses[name] for name in _ROUTER_LOSSES if name in losses}
        return metrics

    def _is_refused(self, grad_norm: float) -> bool:
        """Collective: whether the gradient is not finite anywhere. Raises InputError after too many in a row."""
        control = self.processes.control
        # Those of multi-token prediction are not in the norm.
        beside = (layers.parameters() for chunk in self.chunks if (layers := getattr(unwrapped(chunk), "mtp", None)))
        is_finite = all(bool(weight.main_grad.isfinite().all()) for weights in beside for weight in weights)
        refused = torch.tensor(float(not (math.isfinite(grad_norm) and is_finite)))
        dist.all_reduce(refused, dist.ReduceOp.MAX, group=control)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if refused else 0
        if self._skipped_in_a_row > self.max_skipped:
            found: list[str] = [""] * dist.get_world_size(control)
            dist.all_gather_object(found, self._bad_gradients(), group=control)
            places = [f"in {text} of process {rank}" for rank, text in enumerate(found) if text]
            apart = ", multi-token prediction left out" if self.arch.trains_mtp else ""
            skipped = f" after {self.max_skipped} skipped in a row" if self.max_skipped else ""
            raise InputError(
                f"the {self.role}'s gradient is not finite{skipped}: its norm is {grad_norm:g}{apart}, "
                f"{places[0] if places else 'as the sum of its squares overflows'}; no weight has changed, and the "
                f"norm of the weights is {self._norm_of_weights():.4g}. Look at {self.role}/grad_norm, and mismatch/ "
                f"in RL, of the steps before; continue from the last checkpoint with --accept-changes and a lower "
                f"{'critic' if self.role == 'critic' else 'optimizer'}.learning_rate, or set "
                f"optimizer.max_skipped_updates to skip up to so many such updates in a row"
            )
        return bool(refused)

    def _bad_gradients(self) -> str:
        """Which of this rank's weights have a gradient that is not finite; empty if none."""
        named = [pair for chunk in self.chunks for pair in unwrapped(chunk).named_parameters()]
        bad = [name for name, weight in named if weight.requires_grad and not bool(weight.main_grad.isfinite().all())]
        return f"{len(bad)} of the {len(named)} gradients ({bad[0]} first)" if bad else ""

    def _norm_of_weights(self) -> float:
        """Collective: the norm of all weights, each counted once."""
        squares = sum(float(weight.detach().double().square().sum()) for weight in counted_weights(self.optimizer))
        total = torch.tensor(squares, dtype=torch.float64)
        dist.all_reduce(total, group=self.processes.control)
        return math.sqrt(total)

    def weights(
        self, bucket_bytes: int, to: Receivers = "leaders", replicas: Collection[int] | None = None
    ) -> Iterator[WeightBucket]:
        """Collective; see `WeightSource` and `WeightGatherer.weights`."""
        return self.selected("merged").weights(bucket_bytes, to, replicas)

    def weight_plan(self, bucket_bytes: int) -> list[list[WeightBucket]]:
        """See `WeightSource`."""
        return self._gatherers["merged"].weight_plan(bucket_bytes)

    def selected(self, selection: Selection) -> WeightSource:
        """Collective; a part of what there is, to be read before the next update. Of layers' parts that are no targets,
        B has zeros."""
        self.finish_param_gather()
        return self._gatherers[selection]

    def finish_param_gather(self) -> None:
        """Collective: afterwards every rank has the weights of the last update, also when gathering them was left to
        the next forward pass."""
        if self._overlaps_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def _summed(self, sums: Sequence[Tensor], names: Sequence[str]) -> dict[str, float]:
        """The sums of all micro-batches and data-parallel ranks, in the order of `names`, on every rank."""
        total = torch.zeros(len(names), dtype=torch.float64)
        if self.processes.counts_outputs:
            for values in sums:
                total += values.double().cpu()
        dist.all_reduce(total, group=self.processes.control)
        return dict(zip(names, total.tolist(), strict=True))
