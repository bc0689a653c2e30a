"""Calibrates a plan by a real run: what its steps took by its metrics, over what a plan of that run says."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import InputError
from dapo_mega.metrics.jsonl import read_metrics
from dapo_mega.models import Architecture
from dapo_mega.planning.estimate import Assumptions, Estimate, estimate
from dapo_mega.planning.parameters import num_parameters
from dapo_mega.planning.plan import find_architecture
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.step_time import Calibration

_NUM_LEFT_OUT = 2
_MIN_STEPS = 5
_LOADS_APART = 1.25
_STALLED = 3.0
_OF_ENGINES = ("fleet/idle_share", "fleet/engines_serving")
_OF_GENERATION = ("fleet/requests_at_work", "rollout/tokens", "rollout/response_length_std")
Records = Sequence[dict[str, float]]


@dataclass(frozen=True)
class MeasuredRun:
    """What a real run says for a plan: factors, and what was generated. `spread` is the standard deviation of the
    logarithm of a log-normal length with the run's mean and standard deviation. `keeps_proportion`: the engines were
    always about equally full, so that both parts of decoding have one factor. `num_stalled` steps took so much longer
    than the others that they do not count."""

    calibration: Calibration
    mean_response: float
    spread: float
    kept_share: float
    keeps_proportion: bool
    num_steps: int
    num_stalled: int
    about: str

    def lines(self) -> Iterator[str]:
        """What is calibrated, and by which factor."""
        found = self.calibration
        decoding = f"reading weights x {found.decoding_base:,.3g}, each response x {found.decoding_per_response:,.3g}"
        if self.keeps_proportion:
            decoding = f"x {found.decoding_base:,.3g} (engines always as full, so one factor)"
        stalled = f", and {self.num_stalled} of over {_STALLED:g} times the median" if self.num_stalled else ""
        yield (
            f"calibrated by {self.num_steps} steps of {self.about} (without the first and those with evaluations"
            f"{stalled}):"
        )
        yield (
            f"  measured over planned: scoring x {found.scoring:,.3g}, updates x {found.updates:,.3g}, weights to "
            f"engines x {found.weights:,.3g}, decoding: {decoding}; {found.besides_s:,.2g} s of each step besides"
        )
        yield (
            f"  measured: {self.mean_response:,.0f} tokens a response, spread {self.spread:.2g}, "
            f"{self.kept_share:.0%} of the groups kept; not calibrated: places of engines, checkpoints, evaluations"
        )


def read_run_config(run_dir: Path) -> RunConfig:
    """The configuration of a run's folder. Raises InputError if there is none."""
    if not (run_dir / "config.yaml").is_file():
        raise InputError(
            f"--calibrate {run_dir}: {run_dir / 'config.yaml'} does not exist; give the output_dir of a run"
        )
    try:
        return load_config(RunConfig, run_dir / "config.yaml", [])
    except InputError as error:
        raise InputError(
            f"--calibrate {run_dir}: its config.yaml is not of a run with rollouts ({error}); give one of those"
        ) from error


def calibrate(run_dir: Path, arch: Architecture, assumptions: Assumptions, world_size: int) -> MeasuredRun:
    """Compare the run in `run_dir`, of `world_size` GPUs, with its plan under `assumptions`. Raises InputError for a
    run of another model than `arch`, one without engines of a fleet, and one of too few steps."""
    config = read_run_config(run_dir)
    of_run, notes = find_architecture(config)
    if of_run is None:
        raise InputError(f"--calibrate {run_dir}: {'; '.join(notes)}")
    if of_run != arch:
        raise InputError(
            f"--calibrate {run_dir}: that run's model is {_model(of_run)}, and the plan's is {_model(arch)}; calibrate "
            "with a run of the planned model"
        )
    usable = _usable(run_dir, config)
    # A machine that stood still in one step says nothing of the others.
    longest = _STALLED * median(record["time/step_s"] for record in usable)
    records = [record for record in usable if record["time/step_s"] <= longest]
    # A step that lives on what was held before generates nothing.
    generating = [record for record in records if all(record.get(name) for name in _OF_GENERATION)]
    num_engines, length = _mean(records, "fleet/engines_serving"), _mean(generating, "rollout/response_length_mean")
    plan = _plan_of(config, arch, replace(assumptions, mean_response=length), world_size, num_engines)
    base, per_response, keeps_proportion = _decoding(generating, config, plan)
    planned, weights_s = plan.time, _mean(records, "time/weight_sync_s")
    scoring_s, updates_s = _mean(records, "time/score_s"), _mean(records, "time/update_s")
    stages = ("rollout", "score", "update", "weight_sync", "evaluation", "checkpoint")
    rest = _mean(records, "time/step_s") - sum(_mean(records, f"time/{stage}_s") for stage in stages)
    calibration = Calibration(
        scoring=scoring_s / planned.scoring,
        updates=updates_s / (planned.training - planned.scoring - planned.besides),
        # Weights that pass through memory have no planned time.
        weights=weights_s / planned.weights if planned.weights else 1.0,
        decoding_base=base,
        decoding_per_response=per_response,
        besides_s=max(rest, 0.0) + (0.0 if planned.weights else weights_s),
    )
    offered = sum(record["groups/offered"] for record in records)
    kept = sum(record.get("groups/kept_share", 0.0) * record["groups/offered"] for record in records)
    deviation = _mean(generating, "rollout/response_length_std") / length
    return MeasuredRun(
        calibration=calibration,
        mean_response=length,
        spread=max(math.sqrt(math.log1p(deviation**2)), 0.01),
        kept_share=kept / offered if offered else 1.0,
        keeps_proportion=keeps_proportion,
        num_steps=len(records),
        num_stalled=len(usable) - len(records),
        about=f"{run_dir}: {_model(arch)}, {world_size} GPUs, {num_engines:.3g} engines",
    )


def _model(arch: Architecture) -> str:
    return (
        f"{arch.model_type} with {num_parameters(arch) / 1e6:,.1f} M parameters, {arch.num_layers} layers of "
        f"{arch.hidden_size}, {arch.vocab_size} tokens"
    )


def _usable(run_dir: Path, config: RunConfig) -> Records:
    """The steps that say what a step costs: without the first ones, and without those that evaluated."""
    try:
        records = read_metrics(run_dir / "metrics.jsonl")
    except FileNotFoundError as error:
        raise InputError(f"--calibrate {run_dir}: the run has no metrics.jsonl; give one that has trained") from error
    except ValueError as error:
        raise InputError(f"--calibrate {run_dir}: {error}") from error
    steps = [record for record in records if record["step"] > 0]
    if steps and not any(_OF_ENGINES[0] in record for record in steps):
        raise InputError(
            f"--calibrate {run_dir}: the run has no metrics of engines ({_OF_ENGINES[0]}), as its rollout.placement="
            f"{config.rollout.placement}; calibrate with a run of rollout.placement=fleet or colocated"
        )
    usable = [
        record
        for record in steps[_NUM_LEFT_OUT:]
        if all(name in record for name in _OF_ENGINES) and not any(name.startswith("evaluation/") for name in record)
    ]
    num_generating = sum(all(record.get(name) for name in _OF_GENERATION) for record in usable)
    if num_generating < _MIN_STEPS:
        raise InputError(
            f"--calibrate {run_dir}: {len(steps)} steps, {num_generating} of which count (without the first "
            f"{_NUM_LEFT_OUT}, those with evaluations, and those without {', '.join(_OF_GENERATION)}); give a run of "
            f"at least {_MIN_STEPS} that do"
        )
    return usable


def _mean(records: Records, name: str) -> float:
    return sum(record.get(name, 0.0) for record in records) / len(records)


def _plan_of(
    config: RunConfig, arch: Architecture, assumptions: Assumptions, world_size: int, num_engines: float
) -> Estimate:
    longest_prompt = config.data.max_prompt_tokens
    given = replace(assumptions, mean_prompt=min(assumptions.mean_prompt, longest_prompt), engine_gpus=None)
    layout = RankLayout(arch, config.parallel, world_size)
    plan = estimate(config, layout, given)
    if config.rollout.placement != "fleet":
        return plan
    tensor = plan.engine.tensor
    return estimate(
        config, layout, replace(given, engine_tensor=tensor, engine_gpus=max(round(num_engines), 1) * tensor)
    )


def _decoding(records: Records, config: RunConfig, plan: Estimate) -> tuple[float, float, bool]:
    """The factors of a decoding step's two parts, and whether they are one. An engine that decodes n responses at once
    for T seconds makes n T / (base + n x per response) tokens, so T = base x tokens / n + per response x tokens."""
    rows = []
    for record in records:
        busy_s = record["time/step_s"] * (1 - record["fleet/idle_share"])
        if config.rollout.continues_responses:
            busy_s -= record["time/weight_sync_s"]  # Calls under way stand still.
        tokens = record["rollout/tokens"]
        rows.append((tokens / record["fleet/requests_at_work"], tokens, busy_s * record["fleet/engines_serving"]))
    speed, loads = plan.generation.speed, [record["fleet/requests_at_work"] for record in records]
    steps = [(base * speed.base_s, tokens * speed.per_response_s, busy_s) for base, tokens, busy_s in rows]
    if max(loads) < _LOADS_APART * min(loads):
        factor = sum(busy_s for *_, busy_s in steps) / sum(base + per_response for base, per_response, _ in steps)
        return factor, factor, True
    return *_least_squares(steps), False


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Non-negative (a, b) that bring a x + b y closest to z, over rows (x, y, z)."""
    xx, yy, xy = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (1, 1), (0, 1)))
    xz, yz = (sum(r[i] * r[2] for r in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant > 0:
        a, b = (yy * xz - xy * yz) / determinant, (xx * yz - xy * xz) / determinant
        if a >= 0 and b >= 0:
            return a, b
    # One part alone: the one that leaves the smaller error.
    return (xz / xx, 0.0) if xz * xz / xx > yz * yz / yy else (0.0, yz / yy)
