"""What every run does around its steps: watch its processes, hold its folder, find its checkpoint, stop and save."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_mega.checkpoints.folders import step_of
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.cli import EXIT_INPUT_ERROR, before_leaving, forget_before_leaving, leave, print_once
from dapo_mega.config import TrainingConfig
from dapo_mega.errors import InputError, StopRequested
from dapo_mega.metrics.trackers import missing_packages
from dapo_mega.training.model_trainer import ModelTrainer
from dapo_mega.training.process_watch import ProcessWatch
from dapo_mega.training.run_lock import RunLock
from dapo_mega.training.run_status import RunStatus


@contextlib.contextmanager
def watched(config: TrainingConfig) -> Iterator[tuple[RunStatus, ProcessWatch]]:
    """The run's `status.json`, which tells how this process left, and the watch over SIGTERM and the other processes.

    The status says the newest checkpoint's step until `completed_step` is set.
    """
    status = RunStatus(Path(config.output_dir))
    before_leaving(status.left)
    with ProcessWatch(config.checkpoint.grace_s, config.silence_limit_s) as watch:
        newest = CheckpointStore.of_run(config.output_dir, config.checkpoint).latest()
        step = step_of(newest) if newest else 0
        status.completed_step = lambda: step  # Set before a peer's failure may end this process.
        watch.follow_peers(group_is_up=False)
        yield status, watch
    forget_before_leaving(status.left)


@contextlib.contextmanager
def held_folder(folder: Path, status: RunStatus) -> Iterator[None]:
    """Hold the folder's lock, on rank 0. Raises InputError if another trainer holds it."""

    def lost(reason: str) -> None:
        status.has_lock = False  # Do not overwrite the new holder's status.
        leave(reason, EXIT_INPUT_ERROR)

    with RunLock(folder, on_loss=lost):
        status.has_lock = True
        yield


def begin_training(status: RunStatus, watch: ProcessWatch) -> None:
    """In every process of a run whose rank 0 holds the folder: what goes wrong from now on is the run's."""
    status.has_lock = True
    watch.begin_training()


def require_model(config: TrainingConfig) -> None:
    """Raise InputError if the folder of the initial model does not exist."""
    if not Path(config.model.path).is_dir():
        raise InputError(f"model.path={config.model.path} does not exist; give a folder with a Hugging Face checkpoint")


def require_trackers(config: TrainingConfig) -> None:
    """Raise InputError if a package of `tracking.backends` is not installed."""
    if sentence := missing_packages(config.tracking.backends):
        raise InputError(sentence)


def find_checkpoint(trainer: ModelTrainer[Any]) -> Path | None:
    """The newest intact checkpoint; warns of every newer one that is damaged. Needs the folder's lock.

    Raises InputError where the run has completed checkpoints of which none is intact: its records would be lost."""
    store = trainer.store
    newest, skipped = trainer.newest_checkpoint()
    if not newest and store.last_saved.exists():
        named = store.last_saved.read_text(errors="replace").strip() if store.last_saved.is_file() else ""
        raise InputError(
            f"{store.root.parent} holds a run that has saved {named or 'a checkpoint'}, but no intact "
            f"checkpoint is there now ({'; '.join(skipped) or f'{store.root} is empty or missing'}); restore "
            f"{store.root}, or give another output_dir; to begin anew here and lose the records of the steps so far, "
            f"delete {store.last_saved}"
        )
    found = f"after step {step_of(newest)}" if newest else "from the start"
    for sentence in skipped:
        print_once(f"WARNING: {sentence}; continuing {found}")
    return newest


def refuse_other_data(values: Mapping[str, Any], fingerprint: str, what: str) -> None:
    """Raise InputError if a checkpoint's values are of other training data than this run's."""
    if values["dataset_fingerprint"] != fingerprint:
        raise InputError(
            f"the checkpoint was made with other {what} than data.train gives now; resume with the same data, or start "
            f"a new run in another output_dir"
        )


@dataclass(frozen=True)
class Saving:
    """What a run saves, and where: the trainer's models, and the loop's `state`."""

    config: TrainingConfig
    trainer: ModelTrainer[Any]
    state: Callable[[], LoopState]

    def after_step(self, step: int, *, is_best: bool = False) -> None:
        """Complete the pending checkpoint if its files are written, and write the export and the checkpoint that are
        due.

        The export comes first, so a run that resumes after this step has it. The checkpoint holds everything that
        decides the next step, and is due for the best step, too.
        """
        settings = self.config.checkpoint
        self.trainer.finish_saving(wait=False)
        if settings.hf_every and step % settings.hf_every == 0:
            self._export(f"_step_{step:08d}")
        if (settings.every and step % settings.every == 0) or step == self.config.num_steps or is_best:
            self.trainer.save(step, self.state())

    def last_step(self, step: int) -> str:
        """Complete the checkpoint of the last completed step. Says where it is; empty before the first step."""
        if step > 0 and self.trainer.saved_step != step:
            self.trainer.save(step, self.state())
        self.trainer.finish_saving()
        saved = f"step {step} of {self.config.num_steps} is saved in {self.trainer.store.folder(step)}"
        return saved if step else ""

    def before_stop(self, step: int) -> StopRequested:
        """Save the last completed step. Returns the error to raise, which says how to go on."""
        saved = self.last_step(step) or "no step was done yet"
        return StopRequested(f"a signal ended the run; {saved}; start the same command again to continue")

    def before_error(self, error: Exception, step: int) -> Exception:
        """Save the last completed step. Returns the error to raise, which says what became of it, too."""
        try:
            saved = self.last_step(step)
        except InputError as refused:
            saved = f"its last step, {step}, is not saved ({refused})"
        return type(error)(f"{error}. {saved}; the same command continues after it" if saved else str(error))

    def export_last(self) -> None:
        """Complete the last checkpoint, and write the trained model where `checkpoint.save_hf_at_end` is set."""
        self.trainer.finish_saving()
        if self.config.checkpoint.save_hf_at_end:
            folder = Path(self.config.output_dir)
            if self.trainer.facts.has_critic:  # First: `hf` is what says that the run is finished.
                self.trainer.export(folder / "hf_critic", critic=True)
            self._export()

    def _export(self, when: str = "") -> None:
        folder = Path(self.config.output_dir)
        if self.config.lora:
            self.trainer.export_adapter(folder / f"adapter{when}")
        self.trainer.export(folder / f"hf{when}")
