"""How a run scales with GPUs: plans and simulates its best divisions between trainer and engines."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_mega.config import RunConfig
from dapo_mega.errors import InputError
from dapo_mega.metrics.plotting import empty_figure, save_png
from dapo_mega.planning.divisions import Division, in_turns, machine_size, side_by_side
from dapo_mega.planning.estimate import Assumptions
from dapo_mega.planning.report import seconds
from dapo_mega.simulation.divisions import slower_side_s
from dapo_mega.simulation.run import SimulatedRun
from dapo_mega.simulation.schedules import Assumed, simulated

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dapo_mega.models import Architecture

FORMS = ("in turns, synchronous", "split, asynchronous")
"""Engines on the trainer's GPUs, and on GPUs of their own."""

_TRAINER_SHARES = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
_COLUMNS = (
    "GPUs", "form", "trainer + engines", "steps/hour", "per GPU", "trainer waits", "engines idle", "trainer's layout"
)  # fmt: skip


@dataclass(frozen=True)
class ScalingPoint:
    """A run of one form on `num_gpus`; there is no division and no run if nothing fits."""

    num_gpus: int
    form: str
    division: Division | None
    run: SimulatedRun | None

    @property
    def steps_per_hour(self) -> float:
        """0 if nothing fits."""
        return self.run.steps_per_hour if self.run else 0.0

    @property
    def per_gpu(self) -> float:
        """Steps per hour and GPU."""
        return self.steps_per_hour / self.num_gpus


def doublings(first: int, last: int, gpus_per_node: int) -> list[int]:
    """The numbers of GPUs from `first` on, doubled until `last`. Raises InputError for parts of machines."""
    if not 1 < first <= last:
        raise InputError(
            f"--scaling={first}:{last} must be FIRST:LAST with 2 or more GPUs, the smaller number first, such as "
            "16:4096; both are the run's GPUs in total"
        )
    if first > gpus_per_node and first % gpus_per_node:
        raise InputError(
            f"--scaling={first}:{last} begins with {first} GPUs, which are no whole machines of {gpus_per_node} "
            "(--gpus-per-node); give a multiple"
        )
    return [first << power for power in range((last // first).bit_length())]


def scale(
    config: RunConfig, arch: "Architecture", sizes: Iterable[int], assumptions: Assumptions, assumed: Assumed
) -> Iterator[ScalingPoint]:
    """Every form on every number of GPUs, with the configuration's batch.

    In turns the fastest division by plan is simulated, in the synchronous schedule; split the one whose slower side is
    the fastest, of five shares of the machines for the trainer, in the asynchronous schedule with
    `algorithm.max_staleness` of the configuration or 1.
    """
    kept_share = assumed.kept_share if config.algorithm.dynamic_sampling else 1.0
    staleness = max(1, config.algorithm.max_staleness)
    for num_gpus in sizes:
        num_rounds = max(1.0, config.batch.groups_per_step / kept_share / config.generation_groups)
        turns = in_turns(config, arch, num_gpus, assumptions, num_rounds)
        best = min(turns, key=lambda division: division.seconds, default=None)
        run = simulated(best.plan, ("synchronous", 1), assumed) if best else None
        yield ScalingPoint(num_gpus, FORMS[0], best, run)
        unit = machine_size(num_gpus, assumptions)
        trainers = {max(1, round(num_gpus * share / unit)) * unit for share in _TRAINER_SHARES}
        whole = sorted(size for size in trainers if size < num_gpus)
        split = side_by_side(config, arch, num_gpus, assumptions, num_rounds, whole)
        best = min(split, key=lambda division: slower_side_s(division, assumed), default=None)
        run = simulated(best.plan, ("asynchronous", staleness), assumed) if best else None
        yield ScalingPoint(num_gpus, FORMS[1], best, run)


def scaling_lines(points: Sequence[ScalingPoint], config: RunConfig) -> Iterator[str]:
    """A table of the points. Raises InputError if nothing fits at all."""
    best = max((point.per_gpu for point in points), default=0.0)
    if not best:
        raise InputError(
            f"on {', '.join(str(size) for size in sorted({point.num_gpus for point in points}))} GPUs no division "
            "between trainer and engines fits; give more GPUs, or set compute.recompute=full"
        )
    batch = config.batch
    yield (
        f"scaling with the batch of the file: {batch.groups_per_step} groups x {batch.group_size} responses a step on "
        "any number of GPUs; per GPU: steps per hour and GPU, relative to the best of the table"
    )
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|---" * len(_COLUMNS) + "|"
    for point in points:
        yield f"| {point.num_gpus} | {point.form} | {_cells(point, best)} |"


def _cells(point: ScalingPoint, best: float) -> str:
    if point.division is None or point.run is None:
        return "nothing fits" + " | " * (len(_COLUMNS) - 3)
    plan, run = point.division.plan, point.run
    placement, engine = plan.workload.placement, plan.engine
    parallel = placement.parallel
    trainer = "all" if engine.is_colocated else str(placement.world_size)
    return (
        f"{trainer} + {point.division.num_engines} of tensor {engine.tensor} | {run.steps_per_hour:.3g} | "
        f"{point.per_gpu / best:.0%} | {run.waiting_share:.0%} | {run.idle_share:.0%} | tensor {parallel.tensor}, "
        f"pipeline {parallel.pipeline}, context {parallel.context}, data {placement.data_size}: "
        f"{seconds(plan.time.total)} s"
    )


_MARKERS = ("o", "s")


def draw_scaling(points: Sequence[ScalingPoint], title: str, output: Path) -> None:
    """Write the PNG file `output`; numbers of GPUs on which nothing fits have no mark."""
    figure = empty_figure(11, 4.5)
    left, right = figure.subplots(1, 2)
    sizes = sorted({point.num_gpus for point in points})
    best = max(points, key=lambda point: point.per_gpu)
    left.plot(sizes, [best.per_gpu * size for size in sizes], color="grey", linestyle=":", label="as many more as GPUs")
    for form, marker in zip(FORMS, _MARKERS, strict=True):
        of_form = [point for point in points if point.form == form and point.run]
        counts = [point.num_gpus for point in of_form]
        left.plot(counts, [point.steps_per_hour for point in of_form], marker=marker, label=form)
        right.plot(counts, [100 * point.per_gpu / best.per_gpu for point in of_form], marker=marker, label=form)
    _label(left, sizes, "steps per hour")
    _label(right, sizes, "steps per hour and GPU, % of the best")
    left.legend()
    figure.suptitle(title)
    save_png(figure, output)


def _label(axes: "Axes", sizes: Sequence[int], name: str) -> None:
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel=name)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    if axes.get_ylim()[1] < 20 * axes.get_ylim()[0]:  # Hardly a power of ten is among the values.
        axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
    axes.tick_params(axis="x", labelrotation=45)
    axes.grid(visible=True, which="both", alpha=0.3)
