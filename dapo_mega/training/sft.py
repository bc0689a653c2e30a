"""Supervised fine-tuning with the same policy class: the cold start before RL, as in DeepSeek-R1."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.checkpoints.folders import step_of
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.cli import is_rank_zero, print_once
from dapo_mega.config import SftConfig
from dapo_mega.data import Demonstration, PromptCursor, load_demonstrations, load_tokenizer
from dapo_mega.data.preview import preview_run
from dapo_mega.distributed.errors import raise_on_all_ranks
from dapo_mega.distributed.processes import world_size_from_environment
from dapo_mega.errors import StopRequested, at_step
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.metrics import MetricsWriter, ProgressDisplay
from dapo_mega.planning.plan import describe_fine_tuning
from dapo_mega.preparation.card import CardReference
from dapo_mega.training.lifecycle import (
    Saving,
    find_checkpoint,
    held_folder,
    refuse_other_data,
    require_model,
    require_trackers,
    watched,
)
from dapo_mega.training.process_watch import ProcessWatch, stop_together
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
    demonstrations = load_demonstrations(config.data.train, tokenizer, config.data.max_tokens)
    preview = preview_run(config, tokenizer) if is_rank_zero() else ""
    print_once(preview)
    processes = start_processes(config.parallel, config.seed)
    watch.follow_peers(group_is_up=True)
    with held_folder(folder, status, processes):
        policy = MegatronPolicy(
            config.model,
            config.parallel,
            config.optimizer,
            processes,
            temperature=1.0,
            updates_per_step=1,
            num_steps=config.num_steps,
            compute=config.compute,
        )
        tuning = _Tuning(config, policy, demonstrations, cards, preview)
        tuning.resume()
        status.completed_step = lambda: tuning.step
        if processes.rank == 0:
            status.running()
        watch.begin_training()
        tuning.run(watch)
        if config.checkpoint.save_hf_at_end:
            save_hf_checkpoint(policy, folder / "hf")
        if processes.rank == 0:
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


class _Tuning:
    """The loop and its state: the last completed step and the position in the demonstrations."""

    def __init__(
        self,
        config: SftConfig,
        policy: MegatronPolicy,
        demonstrations: Sequence[Demonstration],
        cards: Mapping[str, CardReference],
        preview: str,
    ) -> None:
        """`cards` are those of the demonstrations and `preview` shows one of them, on rank 0."""
        self.step = 0
        self._cards = cards
        self._preview = preview
        self._config = config
        self._policy = policy
        self._demonstrations = demonstrations
        self._fingerprint = _fingerprint(demonstrations)
        self._cursor = PromptCursor(len(demonstrations), config.seed)
        self._store = CheckpointStore.of_run(config.output_dir, config.checkpoint)
        self._saving = Saving(config, self._store, policy, self._state)
        self._writer: MetricsWriter | None = None  # On rank 0 only.
        self._progress: ProgressDisplay | None = None
        self.losses = (math.nan, math.nan)
        """The first and the last loss of this start; NaN without a step."""

    def resume(self) -> None:
        """Load the newest intact checkpoint, if there is one. Raises InputError if the demonstrations have changed."""
        newest = find_checkpoint(self._store, self._policy.processes)
        if newest is None:
            return
        state = self._store.load(self._policy, newest)
        refuse_other_data(state.values, self._fingerprint, "demonstrations")
        self._cursor.load_state(state.values["cursor"])
        self.step = state.step

    def run(self, watch: ProcessWatch) -> None:
        """Train the remaining steps. Raises StopRequested on all ranks after SIGTERM, once the last step is saved."""
        config, control = self._config, self._policy.processes.control
        with contextlib.ExitStack() as stack:
            with raise_on_all_ranks(control):
                if self._policy.processes.rank == 0:
                    write_run_record(config, self._cards)
                    first = self.step + 1 if self.step else 0
                    self._writer = stack.enter_context(open_writer(config, first, self._preview))
                    progress = ProgressDisplay(config.num_steps, self.step, columns=_COLUMNS)
                    self._progress = stack.enter_context(progress)
                    if self.step:
                        progress.message(f"resuming {config.output_dir} after step {self.step}")
            try:
                while self.step < config.num_steps:
                    stop_together(watch.stop_requested(), control)
                    self._record(self._update())
                    self._saving.after_step(self.step)
            except StopRequested:
                raise self._saving.before_stop(self.step) from None
            self._store.finish(self._policy)

    def _update(self) -> dict[str, float]:
        config = self._config
        started = time.perf_counter()
        chosen = [self._demonstrations[i] for i in self._cursor.next(config.batch_samples)]
        with at_step(self.step + 1):
            metrics = self._policy.update(_micro_batches(self._policy, config, chosen), SupervisedLoss())
        self.step += 1
        num_tokens = sum(len(d.prompt_token_ids) + len(d.response_token_ids) for d in chosen)
        metrics["time/step_s"] = time.perf_counter() - started
        metrics["policy/tokens_per_s"] = num_tokens / metrics["time/step_s"]
        return metrics

    def _record(self, metrics: dict[str, float]) -> None:
        loss = metrics.get("policy/loss", self.losses[1])  # A skipped update may have none.
        self.losses = (loss if math.isnan(self.losses[0]) else self.losses[0], loss)
        if self._writer and self._progress:
            self._writer.write(self.step, metrics)
            self._progress.update(self.step, metrics)

    def _state(self) -> LoopState:
        values = {"cursor": self._cursor.state(), "dataset_fingerprint": self._fingerprint}
        return LoopState(self.step, values, {})


def _fingerprint(demonstrations: Sequence[Demonstration]) -> str:
    """A hash of all demonstrations in order; a resumed run must have the same."""
    digest = hashlib.sha256()
    for demonstration in demonstrations:
        for tokens in (demonstration.prompt_token_ids, demonstration.response_token_ids):
            digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
    return digest.hexdigest()


def _micro_batches(
    policy: MegatronPolicy, config: SftConfig, demonstrations: Sequence[Demonstration]
) -> list[TokenBatch]:
    batch = policy.pack(
        flatten([single_turn(d.prompt_token_ids, d.response_token_ids) for d in demonstrations]),
        token_budget=config.tokens_per_microbatch,
        aggregation="token_mean",
        max_response_tokens=config.data.max_tokens,
    )
    return [TokenBatch(micro_batch) for micro_batch in batch.mini_batches[0]]
