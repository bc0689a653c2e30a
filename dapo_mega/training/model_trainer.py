"""What all processes of a run do together, whatever it learns from: build, load, save and export its models."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.batching.plan import PackingLayout
from dapo_mega.batching.step import StepBatch
from dapo_mega.checkpoints.hf_export import save_adapter, save_hf_checkpoint
from dapo_mega.checkpoints.store import CheckpointStore, LoopState, find_damage_in_share
from dapo_mega.cli import look_past_what_is_there
from dapo_mega.config import TrainingConfig
from dapo_mega.distributed.commands import Commanded, Own, command, gathered
from dapo_mega.distributed.links import Links
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.value_model import ValueModel

ConfigT = TypeVar("ConfigT", bound=TrainingConfig)


@dataclass(frozen=True)
class Facts:
    """What the process that commands has to know of the processes and models."""

    world_size: int
    packing_layout: PackingLayout
    has_critic: bool


class ModelTrainer(Commanded, Generic[ConfigT]):
    """What training by RL and fine-tuning have in common: a policy that is built, loaded, given a batch, saved and
    exported.

    In each process `step` is the last completed step. The process that commands has `facts`, once models are built, and
    `saved_step`, which was saved or loaded last; it has models only if it is one of the trainer's.
    """

    facts: Facts
    policy: MegatronPolicy
    critic: ValueModel | None = None

    def __init__(
        self,
        config: ConfigT,
        processes: Processes | None,
        began: Callable[[], None] = lambda: None,
        elsewhere: Links | None = None,
    ) -> None:
        """`began` is called in every process when training begins. A process outside of the trainer commands
        `elsewhere`, and has no `processes`."""
        super().__init__(processes.control if processes else None, elsewhere)
        self._config = config
        self._processes = processes
        self.store = CheckpointStore.of_run(config.output_dir, config.checkpoint)
        self.step = 0
        self.saved_step: int | None = None
        self._began = began
        self._batch: StepBatch

    @property
    def processes(self) -> Processes:
        assert self._processes
        return self._processes

    @command
    def begin(self) -> None:
        """From now on there is something to save when the run is to stop. Megatron collects garbage at each checkpoint:
        what is there now need not be looked at again."""
        gc.collect()
        look_past_what_is_there()
        self._began()

    def newest_checkpoint(self) -> tuple[Path | None, list[str]]:
        """The newest intact checkpoint, and a sentence for each newer one that is damaged. Removes the partial ones of
        killed runs, so the run's folder must be locked."""
        self.store.discard_partials()
        return self.store.newest_intact(self._complete_checkpoints(), self._find_damage)

    @gathered
    def _complete_checkpoints(self) -> list[str]:
        return [folder.name for folder in self.store.complete_ones()]

    @gathered
    def _find_damage(self, folder: Path) -> str | None:
        return find_damage_in_share(folder, self.processes)

    def load(self, path: Path) -> LoopState:
        """Continue from a checkpoint; returns the state of the loop. Raises InputError for one of another model."""
        state = self._load(path)
        self.step = self.saved_step = state.step
        return state

    @command
    def _load(self, path: Path) -> LoopState:
        state = self.store.load(self.policy, path, self.critic)
        self.step = state.step
        return state

    def save(self, step: int, state: LoopState) -> None:
        """Write the checkpoint of a step; see `CheckpointStore.save`."""
        self._save(step, Own(state))
        self.saved_step = step

    @command
    def _save(self, step: int, state: Own[LoopState]) -> None:
        self.store.save(self.policy, state.value, step, self.critic)

    @command
    def finish_saving(self, *, wait: bool = True) -> None:
        """Complete the pending checkpoint, if any; without `wait` only if its files are written."""
        self.store.finish(self.policy, wait=wait)

    @command
    def export(self, folder: Path, *, critic: bool = False) -> None:
        """Write the policy, or the critic, as a Hugging Face checkpoint. Raises InputError if writing fails."""
        model = self.critic if critic else self.policy
        assert model
        save_hf_checkpoint(model, folder)

    @command
    def export_adapter(self, folder: Path) -> None:
        """Write the policy's adapters in peft's format. Raises InputError if writing fails."""
        save_adapter(self.policy, folder)

    def _facts(self) -> Facts:
        return Facts(self.processes.world_size, self.policy.packing_layout, self.critic is not None)

    @property
    def _micro_batches(self) -> list[MicroBatch]:
        return [micro for mini_batch in self._batch.mini_batches for micro in mini_batch]
