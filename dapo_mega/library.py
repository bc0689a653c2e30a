"""The trainer as a library: a run step by step in a plain Python process or a notebook, and what runs have written."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dapo_mega.config import RunConfig
from dapo_mega.config.files import configured, load_config
from dapo_mega.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

    from dapo_mega.training.build import TrainingRun
    from dapo_mega.training.trainer import Trainer
    from dapo_mega.types import Group


def load(source: str | Path | Mapping[str, Any], *overrides: str) -> RunConfig:
    """The configuration in a YAML file, or of a mapping like it, after `section.key=value` overrides.

    Relative paths in a file start at its folder, all others at the working folder. Raises InputError, one line per
    problem.
    """
    if isinstance(source, Mapping):
        return configured(RunConfig, source, overrides)
    return load_config(RunConfig, Path(source).expanduser(), overrides)


class Run:
    """A run in this process, which has one: `with Run(load("run.yaml")) as run: run.train()`.

    It goes on from the newest checkpoint in its folder, writes what `dapo-mega train` writes, and holds the folder
    until it is closed. Step by step, `learn(collect())` is a step of `train`, to the bit. An interrupt (Ctrl-C, or a
    notebook's stop) leaves the last whole step, which is saved when the context is left.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._closing = contextlib.ExitStack()
        self._run: TrainingRun | None = None
        self._collected: tuple[Sequence[Group], dict[str, float]] | None = None

    def __enter__(self) -> Self:
        """Load models, data and rewards. Raises InputError for a configuration that cannot be run here."""
        from dapo_mega.megatron.core.repairs import cpu_accelerator
        from dapo_mega.megatron.processes import start_processes, stop_processes
        from dapo_mega.training import build, lifecycle, loop
        from dapo_mega.training.resume import refuse_changes
        from dapo_mega.training.run import close
        from dapo_mega.training.run_lock import RunLock
        from dapo_mega.training.run_records import write_run_record
        from dapo_mega.training.trainer import Trainer

        config, folder = self.config, Path(self.config.output_dir)
        if config.parallel.world_size not in (None, 1):
            raise InputError(
                f"parallel.world_size={config.parallel.world_size} needs as many processes; a Run has one: train with "
                f"dapo-mega train --processes {config.parallel.world_size}, or set parallel.world_size=1"
            )
        cpu_accelerator.install()
        lifecycle.require_model(config)
        inputs = build.read_inputs(config)
        with self._closing as stack:
            rewards = build.make_rewards(config)
            stack.callback(rewards.close)
            build.try_rewards(config, rewards, inputs.train_prompts.prompts[0])
            trainer = Trainer(config, start_processes(config.parallel, config.seed))
            stack.callback(stop_processes)
            stack.callback(trainer.close)
            stack.enter_context(RunLock(folder, on_loss=lambda reason: print(f"WARNING: {reason}")))
            if newest := lifecycle.find_checkpoint(trainer):
                refuse_changes(config, folder)
            start = lifecycle.step_of(newest) if newest else 0
            run = build.build_run(config, start, trainer=trainer, inputs=inputs, rewards=rewards)
            stack.callback(close, run)
            if newest:
                loop.restore(run, trainer.load(newest))
            write_run_record(config, inputs.cards)
            loop.begin(run)
            run.is_intact = True
            self._closing, self._run = stack.pop_all(), run
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Save the last whole step, also after an error or an interrupt, and close everything."""
        from dapo_mega.training.loop import give_back, lend_memory, saving

        run, self._run = self._open, None
        with self._closing:
            if self._collected is not None and run.is_intact:
                give_back(run)
            if run.is_intact:
                saving(run).last_step(run.step)
                lend_memory(run)

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self._open.step

    def collect(self) -> Sequence[Group]:
        """The groups of the next step: generated, scored by the reward, filtered. They are collected once: until
        `learn` has taken them, the same ones are returned."""
        from dapo_mega.training.loop import collect_step

        if self.step >= self.config.num_steps:
            raise InputError(f"all {self.config.num_steps} steps are done; raise num_steps to go on")
        if self._collected is None:
            self._collected = collect_step(self._open)
        return self._collected[0]

    def learn(self, groups: Sequence[Group] | None = None) -> dict[str, float]:
        """Score and update on `groups`, by default those of `collect`, in place of them if they are others; send the
        weights to the engines, record the step, evaluate and save where that is due. Returns the step's metrics."""
        from dapo_mega.training.loop import learn

        own = self.collect()
        (_, metrics), self._collected = self._collected or ([], {}), None
        learnt = learn(self._open, own if groups is None else groups, metrics)
        self._open.is_intact = True
        return learnt

    def evaluate(self) -> dict[str, float]:
        """The metrics of a held-out evaluation with the weights as they are. Raises InputError without
        data.evaluation."""
        from dapo_mega.training.loop import evaluate

        if self.config.data.evaluation is None:
            raise InputError("data.evaluation names no dataset to evaluate on; add it")
        return evaluate(self._open)

    def train(self) -> None:
        """The remaining steps, then the model as a Hugging Face checkpoint in the folder `hf` of the run."""
        from dapo_mega.training.loop import end, saving

        while self.step < self.config.num_steps:
            self.learn()
        end(self._open)
        saving(self._open).export_last()

    @property
    def trainer(self) -> Trainer:
        """What holds the models: scores, updates, saves, loads and exports them. Raises InputError while engines have
        its memory."""
        if self._open.trainer.is_lent:
            raise InputError(
                "engines have the memory of the models (rollout.offload_trainer=true); use them between `collect` and "
                "`learn`, or set it to false"
            )
        return self._open.trainer

    @property
    def _open(self) -> TrainingRun:
        if self._run is None:
            raise InputError("this Run is not open; use it as `with Run(config) as run:`")
        return self._run


def read_metrics(run: str | Path) -> pa.Table:
    """The metrics of a run's folder, a row per step and a column per metric, null where a step has none."""
    import pyarrow as pa

    from dapo_mega.metrics import read_metrics as read

    return pa.Table.from_pylist(_with_all_keys(read(_in_run(run, "metrics.jsonl"))))


def read_samples(run: str | Path, step: int | None = None) -> pa.Table:
    """Every response of a run's folder, or of one step, a row each, as the files in `samples` have them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from dapo_mega.samples.files import samples_folder, stored_files

    files = [
        file.path
        for file in stored_files(samples_folder(_in_run(run, "samples").parent))
        if not file.is_evaluation and step in (None, file.step)
    ]
    if not files:
        raise InputError(f"{run} has no samples of {'any step' if step is None else f'step {step}'}")
    return pa.concat_tables([pq.read_table(file) for file in files], promote_options="permissive")


def grade(text: str, answer: str, style: str = "auto") -> bool:
    """Whether a response gives this answer, as the rule of the rewards decides; `style` as reward.extraction. What has
    to be calculated may take a process and some seconds."""
    from dapo_mega.rewards.verifier import AnswerVerifier

    with AnswerVerifier(1, 5.0, style) as verifier:
        return verifier.verify([(text, answer)])[0].correct


def _in_run(run: str | Path, name: str) -> Path:
    path = Path(run).expanduser() / name
    if not path.exists():
        raise InputError(f"{path} does not exist; give the folder of a run that has done a step")
    return path


def _with_all_keys(records: Sequence[Mapping[str, float]]) -> list[dict[str, float | None]]:
    names = dict.fromkeys(name for record in records for name in record)
    return [{name: record.get(name) for name in names} for record in records]
