"""Supervised fine-tuning with the same policy class: the cold start before RL, as in DeepSeek-R1."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from dapo_mega.checkpoints.folders import step_of
from dapo_mega.checkpoints.store import HELD_OUT, CheckpointStore, LoopState
from dapo_mega.cli import is_rank_zero, print_once
from dapo_mega.config import PromptSamplingConfig, SftConfig, SftDataConfig
from dapo_mega.data import Demonstration, Pair, load_demonstrations, load_pairs, load_tokenizer
from dapo_mega.data.preview import preview_run
from dapo_mega.data.prompts import Demonstrations
from dapo_mega.data.sampler import PromptSampler
from dapo_mega.distributed.processes import world_size_from_environment
from dapo_mega.errors import InputError, StopRequested, at_step
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.metrics import ProgressDisplay
from dapo_mega.planning.plan import describe_fine_tuning
from dapo_mega.training.fine_tuner import FineTuner, Imitator
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
from dapo_mega.training.preferences import PreferenceTuner
from dapo_mega.training.process_watch import ProcessWatch
from dapo_mega.training.resume import refuse_changes
from dapo_mega.training.run_records import dataset_cards, open_writer, write_run_record
from dapo_mega.training.run_status import RunStatus
from dapo_mega.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COLUMNS = (("loss", "policy/loss", ".4f"), ("tokens/s", "policy/tokens_per_s", ".0f"))


def run_sft(config: SftConfig, *, accept_changes: bool = False) -> None:
    """Train on the demonstrations for `num_steps` or `epochs`, or until evaluations end it. Goes on from the newest
    checkpoint if there is one.

    Writes the result to `output_dir/hf`. Every rank draws the same order of demonstrations from the seed. Raises
    InputError if another trainer uses the folder, or if the folder belongs to another configuration and changes are not
    accepted. Raises StopRequested after SIGTERM, once the last step is saved.
    """
    with watched(config) as (status, watch):
        folder = Path(config.output_dir)
        describe_fine_tuning(config, world_size_from_environment())
        if CheckpointStore.of_run(config.output_dir, config.checkpoint).latest() or _is_exported(folder):
            refuse_changes(config, folder, accepted=accept_changes)
        data = _load(config) if config.epochs else None
        if not _is_finished(config.with_steps(len(data.training)) if data else config):
            require_model(config)
            require_trackers(config)
            _run(config, data or _load(config), status, watch)


def _is_exported(folder: Path) -> bool:
    return (folder / "hf" / "config.json").is_file()


def _is_finished(config: SftConfig) -> bool:
    """Whether the run is finished already; prints so."""
    folder = Path(config.output_dir)
    store = CheckpointStore.of_run(config.output_dir, config.checkpoint)
    newest = store.latest()
    step = step_of(newest) if newest else 0
    is_complete = step >= config.num_steps or (_is_exported(folder) and not step)  # Earlier versions wrote none.
    if newest and config.evaluation.stop_after:
        is_complete = is_complete or store.evaluations_since_best(newest) >= config.evaluation.stop_after
    if is_complete and (_is_exported(folder) or not config.checkpoint.save_hf_at_end):
        print_once(f"{folder} already holds a model fine-tuned for {step or config.num_steps} steps; nothing to do")
        return True
    return False


Row = Demonstration | Pair


@dataclass(frozen=True)
class _Data:
    """The sequences, or pairs, to train on, those of a dataset next to each other, and those held out; metrics of what
    was left out of the first."""

    training: Sequence[Row]
    held_out: Sequence[Row]
    metrics: Mapping[str, float]


def _load(config: SftConfig) -> _Data:
    """Raises InputError as `load_demonstrations` does."""
    require_model(config)
    data, tokenizer = config.data, load_tokenizer(config.model.path)
    if config.dpo:
        return _load_pairs(data, tokenizer)
    loaded: dict[str, Demonstrations] = {}
    names = {data.key_of(name): name for name in data.training}
    for key, dataset in data.by_key.items():
        try:
            loaded[key] = load_demonstrations(
                dataset, tokenizer, data.max_tokens, data.long_rows, data.loss_on, names.get(key, "")
            )
        except InputError as error:
            raise InputError(f"{key}: {error}") from error
        if loaded[key].num_dropped or loaded[key].num_cut:
            print_once(
                f"{key}: {loaded[key].num_dropped} sequences of {loaded[key].num_rows} rows are longer than "
                f"data.max_tokens={data.max_tokens} and left out, {loaded[key].num_cut} are cut; "
                f"{len(loaded[key].sequences)} stay"
            )
    of_training = [loaded[key] for key in names]
    metrics = {
        "sampling/sequences_dropped": float(sum(each.num_dropped for each in of_training)),
        "sampling/sequences_cut": float(sum(each.num_cut for each in of_training)),
    }
    return _Data(
        [sequence for each in of_training for sequence in each.sequences],
        loaded["data.evaluation"].sequences if data.evaluation else (),
        {} if data.long_rows == "refuse" else metrics,
    )


def _load_pairs(data: SftDataConfig, tokenizer: PreTrainedTokenizerBase) -> _Data:
    loaded = {
        key: load_pairs(dataset, tokenizer, data.max_tokens, data.loss_on, key) for key, dataset in data.by_key.items()
    }
    training = [replace(pair, dataset=name) for name in data.training for pair in loaded[data.key_of(name)]]
    return _Data(training, loaded.get("data.evaluation", ()), {})


def _run(given: SftConfig, data: _Data, status: RunStatus, watch: ProcessWatch) -> None:
    config = given.with_steps(len(data.training))
    folder = Path(config.output_dir)
    if config.threads_per_process:
        torch.set_num_threads(config.threads_per_process)
    cards = dataset_cards(config) if is_rank_zero() else {}
    preview = preview_run(config, load_tokenizer(config.model.path)) if is_rank_zero() else ""
    print_once(preview)
    processes = start_processes(config.parallel, config.seed)
    watch.follow_peers(group_is_up=True)
    kind: type[FineTuner[Any]] = PreferenceTuner if config.dpo else Imitator
    trainer = kind(config, processes, partial(begin_training, status, watch))
    tuning = _Tuning(config, trainer, data, preview, watch)
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
            write_run_record(given, cards)
            tuning.run()
            status.finished()
    watch.forget_peers()
    dist.barrier(group=processes.control)
    stop_processes()
    model = f"; the model: {folder / 'hf'}" if config.checkpoint.save_hf_at_end else ""
    first, last = tuning.losses
    print_once(
        f"finished {tuning.step or config.num_steps} steps, loss {first:.4f} -> {last:.4f}{model}; "
        f"metrics for TensorBoard: {folder / 'tensorboard'}"
    )


@dataclass
class _Best:
    """The evaluation with the lowest loss, and how many came after it; `data` is a hash of what is evaluated on."""

    data: str
    loss: float = math.inf
    step: int = 0
    num_worse: int = 0

    def add(self, loss: float, step: int) -> bool:
        """Count an evaluation. Whether it is the best."""
        is_best = loss < self.loss
        self.loss, self.step, self.num_worse = (
            (loss, step, 0) if is_best else (self.loss, self.step, self.num_worse + 1)
        )
        return is_best


@dataclass
class _Tuning:
    """The loop of the process that commands, and its state: the last completed step, the position in the
    demonstrations, and the best evaluation. `preview` shows one demonstration. `losses` are the first and the last loss
    of this start; NaN without a step."""

    config: SftConfig
    trainer: FineTuner[Any]
    data: _Data
    preview: str
    watch: ProcessWatch
    step: int = 0
    losses: tuple[float, float] = (math.nan, math.nan)

    def __post_init__(self) -> None:
        self._fingerprint = _fingerprint(self.data.training)
        # An order that shuffles looks at nothing but the number of prompts.
        prompts = cast("Sequence[Prompt]", self.data.training)
        self._sampler = PromptSampler(prompts, PromptSamplingConfig(), self.config.seed, self.config.data.weights)
        self._best = _Best(_fingerprint(self.data.held_out))
        self._saving = Saving(self.config, self.trainer, self._state)
        self._keep_best()

    def resume(self) -> None:
        """Load the newest intact checkpoint, if there is one. Raises InputError if the demonstrations have changed."""
        newest = find_checkpoint(self.trainer)
        if newest is None:
            return
        state = self.trainer.load(newest)
        refuse_other_data(state.values, self._fingerprint, "demonstrations")
        self._sampler.load_state(state.values["cursor"], state.arrays)
        best = _Best(**state.values.get(HELD_OUT, {"data": ""}))
        if best.data == self._best.data:  # Losses on other data cannot be compared.
            self._best = best
        self.step = state.step
        self._keep_best()

    def run(self) -> None:
        """Train the remaining steps, and export. Raises StopRequested after SIGTERM, once the last step is saved."""
        config = self.config
        first = self.step + 1 if self.step else 0
        progress = ProgressDisplay(config.num_steps, self.step, columns=_COLUMNS)
        with open_writer(config, first, self.preview) as writer, progress:
            if self.step:
                progress.message(f"resuming {config.output_dir} after step {self.step}")
            elif config.evaluation.at_start:
                writer.write(0, self._evaluated(progress))
            try:
                while self.step < config.num_steps and not self._is_stopped:
                    self.watch.check_stop()
                    metrics = self._update()
                    before = self._best.step
                    if config.evaluation.every and (
                        self.step % config.evaluation.every == 0 or self.step == config.num_steps
                    ):
                        metrics |= self._evaluated(progress)
                    writer.write(self.step, metrics)
                    progress.update(self.step, metrics)
                    is_best = self._best.step != before and config.evaluation.keep_best
                    self._saving.after_step(self.step, is_best=is_best)
            except StopRequested:
                raise self._saving.before_stop(self.step) from None
            if self._is_stopped:
                progress.message(
                    f"{self._best.num_worse} evaluations in a row were no better than that after step "
                    f"{self._best.step}, loss {self._best.loss:.4f}: the run ends (evaluation.stop_after)"
                )
                self._saving.last_step(self.step)
            self._saving.export_last()

    @property
    def _is_stopped(self) -> bool:
        limit = self.config.evaluation.stop_after
        return limit is not None and self._best.num_worse >= limit

    def _evaluated(self, progress: ProgressDisplay) -> dict[str, float]:
        metrics = self.trainer.evaluate(self.data.held_out)
        loss = metrics["evaluation/loss"]
        self._best.add(loss, self.step)
        self._keep_best()
        said = "  ".join(f"{name.removeprefix('evaluation/')}={value:.4g}" for name, value in metrics.items())
        progress.message(f"held-out evaluation after step {self.step}: {said}")
        return metrics

    def _keep_best(self) -> None:
        self.trainer.store.pinned = self._best.step if self.config.evaluation.keep_best else None

    def _update(self) -> dict[str, float]:
        started = time.perf_counter()
        chosen = [self.data.training[i] for i in self._sampler.next(self.config.batch_samples)]
        with at_step(self.step + 1):
            metrics = self.trainer.fine_tune(chosen, self.step + 1)
        self.step += 1
        loss = metrics.get("policy/loss", self.losses[1])  # A skipped update may have none.
        self.losses = (loss if math.isnan(self.losses[0]) else self.losses[0], loss)
        metrics["time/step_s"] = time.perf_counter() - started
        metrics["policy/tokens_per_s"] = sum(map(len, chosen)) / metrics["time/step_s"]
        return {**metrics, **self._sampler.metrics(), **self.data.metrics}

    def _state(self) -> LoopState:
        cursor, arrays = self._sampler.state()
        values = {"cursor": cursor, "dataset_fingerprint": self._fingerprint, HELD_OUT: asdict(self._best)}
        return LoopState(self.step, values, arrays)


def _fingerprint(rows: Sequence[Row]) -> str:
    """A hash of all demonstrations in order; a resumed run must have the same."""
    digest = hashlib.sha256()
    for row in rows:
        for demonstration in (row.chosen, row.rejected) if isinstance(row, Pair) else (row,):
            for tokens in (demonstration.prompt_token_ids, demonstration.response_token_ids):
                digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
            if not demonstration.in_loss.all():
                digest.update(demonstration.in_loss.tobytes())
    return digest.hexdigest()
