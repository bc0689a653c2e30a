"""The runs of an ablation: each arm with each seed, resolved and checked before anything is started."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_mega.ablation.arms import Arm, ladder, methods, reset_keys
from dapo_mega.ablation.tasks import RUN_FILE, Task, dapo_mega, find_task
from dapo_mega.config import RunConfig, load_config
from dapo_mega.config.base import differences
from dapo_mega.config.files import read_yaml
from dapo_mega.errors import InputError

_EVALUATED = ("evaluation.at_start=true", "evaluation.at_end=true")


@dataclass(frozen=True)
class Request:
    """What the user asked for. `rows` and `methods` are names; `config` None is the file of `task`."""

    output: Path
    config: Path | None
    task: str | None
    rows: Sequence[str]
    methods: Sequence[str]
    seeds: Sequence[int]
    overrides: Sequence[str]
    processes: int


@dataclass(frozen=True)
class Run:
    """One run: an arm with a seed. `config` is what `file` and `overrides` resolve to."""

    arm: Arm
    seed: int
    file: Path
    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def name(self) -> str:
        return f"{self.arm.name} seed {self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    def command(self, processes: int) -> list[str]:
        return dapo_mega("train", "--config", str(self.file), *self.overrides, processes=processes)


@dataclass(frozen=True)
class Plan:
    """All runs, seed by seed, so that a whole table is there early. `task` makes what they start from, if not None."""

    output: Path
    task: Task | None
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    processes: int

    @property
    def cold_start(self) -> Path:
        """The folder of data, model and cold start."""
        return self.output / "cold_start"

    def of_arm(self, arm: Arm) -> list[Run]:
        return [run for run in self.runs if run.arm == arm]


def make_plan(request: Request) -> Plan:
    """Raises InputError, naming the run, if one of them cannot be started as it is."""
    if request.config and request.task:
        raise InputError("give either --config or --task: a task brings its own file")
    output = request.output.absolute()
    task = None if request.config else find_task(request.task or "quickstart")
    file = request.config or RUN_FILE
    common = tuple(task.overrides(output / "cold_start")) if task else ()
    load_config(RunConfig, file, [*common, *request.overrides])  # Says what is wrong with the file before any arm does.
    given = _algorithm_section(file)
    arms = [*ladder(request.rows, given, request.overrides), *methods(request.methods, given)]
    seeds = tuple(dict.fromkeys(request.seeds))
    for key in (override.partition("=")[0].strip() for override in request.overrides):
        if key in ("output_dir", "seed", "algorithm.preset", "algorithm"):
            raise InputError(f"{key} differs from run to run; use --output-dir, --seeds, --rows or --methods")
    runs = [
        _resolve(arm, seed, file, (*common, *arm.first, *request.overrides, *arm.last), output)
        for seed in seeds
        for arm in arms
    ]
    return Plan(output, task, tuple(arms), seeds, tuple(runs), request.processes)


def describe(plan: Plan) -> Iterator[str]:
    """Lines that say which runs there are, and what each arm changes: a row of the ladder against the row before, a
    method against the first one."""
    if plan.task:
        yield f"cold start, shared by all runs: {plan.cold_start} ({plan.task.about})"
    count = f"arms: {len(plan.arms)}, seeds: {len(plan.seeds)}"
    yield f"{len(plan.runs)} runs ({count}) of {plan.runs[0].config.num_steps} steps in {plan.output}"
    if reset := reset_keys(_algorithm_section(plan.runs[0].file)):
        yield f"set by each arm, whatever the file says: {', '.join(f'algorithm.{key}' for key in reset)}"
    for group in dict.fromkeys(arm.group for arm in plan.arms):
        yield f"{group}:"
        before: RunConfig | None = None
        for arm in (arm for arm in plan.arms if arm.group == group):
            config = plan.of_arm(arm)[0].config
            changes = changed_keys(before, config).items() if before else ()
            text = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes)
            yield f"  {arm.title} ({arm.name}): {text or ('no change' if before else 'the first')}"
            before = config if group == "ladder" or before is None else before


def changed_keys(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The keys in which two runs differ, with both values, but for folder and seed."""
    return {name: values for name, values in differences(before, after).items() if name not in ("output_dir", "seed")}


def _resolve(arm: Arm, seed: int, file: Path, overrides: tuple[str, ...], output: Path) -> Run:
    folder = output / arm.group / arm.name / f"seed{seed}"
    overrides = (*overrides, f"seed={seed}", f"output_dir={folder}", *_EVALUATED)
    try:
        config = load_config(RunConfig, file, overrides)
        if not config.algorithm.dynamic_sampling and config.batch.generation_groups is not None:
            # Over-sampling is a part of dynamic sampling: without it a step's surplus would only grow old.
            overrides = (*overrides, "batch.generation_groups=null")
            config = load_config(RunConfig, file, overrides)
    except InputError as error:
        raise InputError(f"{arm.title} ({arm.name}): {error}") from error
    return Run(arm, seed, file, overrides, config)


def _algorithm_section(file: Path) -> dict[str, Any]:
    section = read_yaml(file).get("algorithm")
    return section if isinstance(section, dict) else {}
