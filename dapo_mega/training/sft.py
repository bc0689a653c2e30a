"""Supervised fine-tuning with the same policy class: the cold start before RL, as in DeepSeek-R1."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.batching.step import PlannedSamples, plan_samples
from dapo_mega.checkpoints.folders import step_of
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.cli import is_rank_zero, print_once
from dapo_mega.config import SftConfig
from dapo_mega.data import Demonstration, PromptCursor, load_demonstrations, load_tokenizer
from dapo_mega.data.preview import preview_run
from dapo_mega.distributed.commands import Own, command
from dapo_mega.distributed.processes import world_size_from_environment
from dapo_mega.errors import StopRequested, at_step
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.metrics import ProgressDisplay
from dapo_mega.planning.plan import describe_fine_tuning
from dapo_mega.preparation.card import CardReference
from dapo_mega.training.lifecycle import (
    Saving,
    begin_training,
    find_checkpoint,
    held_folder,
    refuse_other_data,
    require_model,
    require_trackers,
    watched,
)
from dapo_mega.training.model_trainer import Facts, ModelTrainer
from dapo_mega.training.process_watch import ProcessWatch
from dapo_mega.training.resume import refuse_changes
from dapo_mega.training.run_records import dataset_cards, open_writer, write_run_record
from dapo_mega.training.run_status import RunStatus

_COLUMNS = (("loss", "policy/loss", ".4f"), ("tokens/s", "policy/tokens_per_s", ".0f"))


def run_sft(config: SftConfig, *, accept_changes: bool = False) -> None:
    """Train on the demonstrations until `num_steps`, from the newest checkpoint if there is one.

    Writes the result to `output_dir/hf`. Every rank draws the same order of demonstrations from the seed. Raises
    InputError if another trainer uses the folder, or if the folder belongs to another configuration and changes are not
    accepted. Raises StopRequested after SIGTERM, once the last step is saved.
    """
    with watched(config) as (status, watch):
        if not _is_finished(config, accept_changes):
            _run(config, status, watch)


def _is_finished(config: SftConfig, accept_changes: bool) -> bool:
    """Whether the run is finished already; prints so. Raises InputError if the run cannot start."""
    folder = Path(config.output_dir)
    describe_fine_tuning(config, world_size_from_environment())
    newest = CheckpointStore.of_run(config.output_dir, config.checkpoint).latest()
    step = step_of(newest) if newest else 0
    is_exported = (folder / "hf" / "config.json").is_file()
    if step or is_exported:
        refuse_changes(config, folder, accepted=accept_changes)
    is_complete = step >= config.num_steps or (is_exported and not step)  # Earlier versions wrote no checkpoints.
    if is_complete and (is_exported or not config.checkpoint.save_hf_at_end):
        print_once(f"{folder} already holds a model fine-tuned for {step or config.num_steps} steps; nothing to do")
        return True
    require_model(config)
    require_trackers(config)
    return False


def _run(config: SftConfig, status: RunStatus, watch: ProcessWatch) -> None:
    folder = Path(config.output_dir)
    if config.threads_per_process:
        torch.set_num_threads(config.threads_per_process)
    tokenizer = load_tokenizer(config.model.path)
    cards = dataset_cards(config) if is_rank_zero() else {}
    data = config.data
    loaded = load_demonstrations(data.train, tokenizer, data.max_tokens, data.long_rows, data.loss_on)
    demonstrations = loaded.sequences
    if loaded.num_dropped or loaded.num_cut:
        print_once(
            f"data.train: of {loaded.num_rows} rows, {loaded.num_dropped} sequences over data.max_tokens="
            f"{data.max_tokens} were left out, {loaded.num_cut} cut; {len(demonstrations)} stay"
        )
    preview = preview_run(config, tokenizer) if is_rank_zero() else ""
    print_once(preview)
    processes = start_processes(config.parallel, config.seed)
    watch.follow_peers(group_is_up=True)
    trainer = FineTuner(config, processes, partial(begin_training, status, watch))
    tuning = _Tuning(config, trainer, demonstrations, cards, preview, watch)
    if processes.rank:
        status.completed_step = lambda: trainer.step
        trainer.obey()
    else:
        with trainer.commanding(), held_folder(folder, status):
            status.completed_step = lambda: tuning.step
            trainer.build()
            tuning.resume()
            status.running()
            trainer.begin()
            tuning.run()
            status.finished()
    watch.forget_peers()
    dist.barrier(group=processes.control)
    stop_processes()
    model = f"; the model: {folder / 'hf'}" if config.checkpoint.save_hf_at_end else ""
    first, last = tuning.losses
    print_once(
        f"finished {config.num_steps} steps, loss {first:.4f} -> {last:.4f}{model}; "
        f"metrics for TensorBoard: {folder / 'tensorboard'}"
    )


class FineTuner(ModelTrainer[SftConfig]):
    def build(self) -> None:
        """Load the model. Raises InputError for one that cannot be trained here."""
        self.facts = self._build()

    @command
    def _build(self) -> Facts:
        config = self._config
        self.policy = MegatronPolicy(
            config.model,
            config.parallel,
            config.optimizer,
            self.processes,
            temperature=1.0,
            updates_per_step=1,
            num_steps=config.num_steps,
            compute=config.compute,
            lora=config.lora,
            seed=config.seed,
        )
        return self._facts()

    def fine_tune(self, demonstrations: Sequence[Demonstration], step: int) -> dict[str, float]:
        """The update of this step on the demonstrations; its metrics."""
        samples = flatten(
            [single_turn(d.prompt_token_ids, d.response_token_ids, sampled=d.in_loss) for d in demonstrations]
        )
        budget = self._config.tokens_per_microbatch
        return self._fine_tune(Own(plan_samples(samples, self.facts.packing_layout, token_budget=budget)), step)

    @command
    def _fine_tune(self, samples: Own[PlannedSamples], step: int) -> dict[str, float]:
        batch = self.policy.receive(
            samples.value, aggregation="token_mean", max_response_tokens=self._config.data.max_tokens
        )
        metrics = self.policy.update([TokenBatch(micro) for micro in batch.mini_batches[0]], SupervisedLoss())
        self.step = step
        return metrics


@dataclass
class _Tuning:
    """The loop of the process that commands, and its state: the last completed step and the position in the
    demonstrations. `cards` are those of the demonstrations and `preview` shows one of them. `losses` are the first and
    the last loss of this start; NaN without a step."""

    config: SftConfig
    trainer: FineTuner
    demonstrations: Sequence[Demonstration]
    cards: Mapping[str, CardReference]
    preview: str
    watch: ProcessWatch
    step: int = 0
    losses: tuple[float, float] = (math.nan, math.nan)

    def __post_init__(self) -> None:
        self._fingerprint = _fingerprint(self.demonstrations)
        self._cursor = PromptCursor(len(self.demonstrations), self.config.seed)
        self._saving = Saving(self.config, self.trainer, self._state)

    def resume(self) -> None:
        """Load the newest intact checkpoint, if there is one. Raises InputError if the demonstrations have changed."""
        newest = find_checkpoint(self.trainer)
        if newest is None:
            return
        state = self.trainer.load(newest)
        refuse_other_data(state.values, self._fingerprint, "demonstrations")
        self._cursor.load_state(state.values["cursor"])
        self.step = state.step

    def run(self) -> None:
        """Train the remaining steps, and export. Raises StopRequested after SIGTERM, once the last step is saved."""
        config = self.config
        write_run_record(config, self.cards)
        first = self.step + 1 if self.step else 0
        progress = ProgressDisplay(config.num_steps, self.step, columns=_COLUMNS)
        with open_writer(config, first, self.preview) as writer, progress:
            if self.step:
                progress.message(f"resuming {config.output_dir} after step {self.step}")
            try:
                while self.step < config.num_steps:
                    self.watch.check_stop()
                    metrics = self._update()
                    writer.write(self.step, metrics)
                    progress.update(self.step, metrics)
                    self._saving.after_step(self.step)
            except StopRequested:
                raise self._saving.before_stop(self.step) from None
            self._saving.export_last()

    def _update(self) -> dict[str, float]:
        started = time.perf_counter()
        chosen = [self.demonstrations[i] for i in self._cursor.next(self.config.batch_samples)]
        with at_step(self.step + 1):
            metrics = self.trainer.fine_tune(chosen, self.step + 1)
        self.step += 1
        loss = metrics.get("policy/loss", self.losses[1])  # A skipped update may have none.
        self.losses = (loss if math.isnan(self.losses[0]) else self.losses[0], loss)
        num_tokens = sum(map(len, chosen))
        metrics["time/step_s"] = time.perf_counter() - started
        metrics["policy/tokens_per_s"] = num_tokens / metrics["time/step_s"]
        return metrics

    def _state(self) -> LoopState:
        values = {"cursor": self._cursor.state(), "dataset_fingerprint": self._fingerprint}
        return LoopState(self.step, values, {})


def _fingerprint(demonstrations: Sequence[Demonstration]) -> str:
    """A hash of all demonstrations in order; a resumed run must have the same."""
    digest = hashlib.sha256()
    for demonstration in demonstrations:
        for tokens in (demonstration.prompt_token_ids, demonstration.response_token_ids):
            digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
        if not demonstration.in_loss.all():
            digest.update(demonstration.in_loss.tobytes())
    return digest.hexdigest()
