"""Plan a run: estimate GPU memory, communication and time of a configuration's layout, without a GPU.

dapo-mega plan configs/qwen2.5-32b-dapo-128gpu.yaml
dapo-mega plan configs/qwen2.5-32b-dapo-128gpu.yaml compute.recompute=full --engine-gpus 32 --engine-tensor 4
dapo-mega plan configs/qwen2.5-32b-dapo-128gpu.yaml --gpus 96 --propose
dapo-mega plan configs/qwen2.5-32b-dapo-128gpu.yaml --total-gpus 128
dapo-mega plan configs/qwen2.5-32b-dapo-128gpu.yaml --total-gpus 128 --simulate
dapo-mega plan configs/qwen2.5-32b-dapo-128gpu.yaml --simulate --kept-share 0.4
dapo-mega plan configs/qwen2.5-32b-dapo-128gpu.yaml --scaling 16:4096 --output scaling.png
dapo-mega plan configs/qwen2.5-32b-dapo-128gpu.yaml --simulate --calibrate runs/earlier --timelines simulated

Engines are planned where rollout.placement puts them: embedded in the trainer's processes, fleet on GPUs of their own
beside the trainer's, colocated on the trainer's, asleep while the policy trains.
The model's weights need not be here: model.architecture (a config.json) is enough.
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from dapo_mega.cli import print_once
from dapo_mega.config import ParallelConfig, RunConfig, load_config
from dapo_mega.errors import InputError
from dapo_mega.models import Architecture
from dapo_mega.planning.calibration import MeasuredRun, calibrate, read_run_config
from dapo_mega.planning.divisions import divide
from dapo_mega.planning.estimate import Assumptions, estimate
from dapo_mega.planning.memory import GIB
from dapo_mega.planning.plan import describe_run, find_architecture
from dapo_mega.planning.proposals import propose
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.report import division_lines, proposal_lines, report
from dapo_mega.planning.step_time import Machine
from dapo_mega.samples.files import file_of, samples_folder, stored_files
from dapo_mega.samples.reading import read_account
from dapo_mega.simulation.divisions import simulate_divisions, simulated_division_lines
from dapo_mega.simulation.scaling import doublings, draw_scaling, scale, scaling_lines
from dapo_mega.simulation.schedules import Assumed, simulated_lines


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_intermixed_args(argv)
    config = given = load_config(RunConfig, options.config, options.overrides)
    if options.gpus is not None:
        # The file's own number would refuse another one.
        parallel = config.parallel.model_copy(update={"world_size": None})
        config = config.model_copy(update={"parallel": parallel})
    world_size = options.gpus or config.parallel.world_size or 1
    arch, notes = find_architecture(config)
    if arch is None:
        raise InputError("; ".join(notes))
    assumptions, measured = assumptions_of(options, config), None
    if options.calibrate:
        measured = calibrate(options.calibrate, arch, assumptions, _gpus_of(options.calibrate))
        # The measured mean length unless another was given or the plan's responses are shorter.
        mean = options.mean_response_tokens or min(measured.mean_response, config.rollout.max_response_tokens)
        machine = replace(assumptions.machine, calibration=measured.calibration)
        assumptions = replace(assumptions, machine=machine, mean_response=mean)
        for line in measured.lines():
            print_once(line)
    assumed = _assumed(options, measured)
    lines: Iterable[str]
    if options.total_gpus is not None:
        divisions = divide(config, arch, options.total_gpus, assumptions, options.rounds)
        lines = division_lines(divisions, options.total_gpus, given, options.rounds)
        if options.simulate:
            found = simulate_divisions(divisions, given, assumed)
            lines = simulated_division_lines(found, options.total_gpus, given, assumed)
    elif options.scaling:
        lines = _scaling_lines(config, arch, options, assumptions, assumed)
    elif options.propose:
        proposals, num_valid = propose(config, RankLayout(arch, ParallelConfig(), world_size), assumptions)
        lines = proposal_lines(proposals, num_valid, world_size, assumptions, given)
    else:
        lines = describe_run(config, world_size)
        plan = estimate(config, RankLayout(arch, config.parallel, world_size), assumptions)
        if options.simulate:
            lines = simulated_lines(plan, assumed, options.timelines)
        else:
            lines = chain(lines, report(plan))
    for line in lines:
        print_once(line)


def _scaling_lines(
    config: RunConfig, arch: Architecture, options: argparse.Namespace, assumptions: Assumptions, assumed: Assumed
) -> Iterator[str]:
    """A line for each size as soon as it is simulated, and then the picture is drawn."""
    output: Path = options.output or Path("scaling.png")
    points = []
    for point in scale(config, arch, _scaled_sizes(options), assumptions, assumed):
        yield f"{point.num_gpus} GPUs, {point.form}: {point.steps_per_hour:.3g} steps/hour"
        points.append(point)
    yield from scaling_lines(points, config)
    draw_scaling(points, f"{options.config.stem}: {config.batch.groups_per_step} groups a step, simulated", output)
    yield f"picture: {output}"


def _scaled_sizes(options: argparse.Namespace) -> list[int]:
    match = re.fullmatch(r"(\d+):(\d+)", options.scaling)
    if not match:
        raise InputError(f"--scaling={options.scaling} must be FIRST:LAST, two numbers of GPUs, such as 16:4096")
    return doublings(int(match[1]), int(match[2]), options.gpus_per_node)


def _check_scaling(options: argparse.Namespace) -> None:
    """Refuse what --scaling decides itself, and a picture that cannot be written."""
    if options.scaling is None:
        if options.output:
            raise InputError("--output is the picture of --scaling; add --scaling FIRST:LAST, or leave it out")
        return
    for name in ("gpus", "engine_gpus", "propose", "total_gpus", "simulate"):
        if getattr(options, name):
            raise InputError(
                f"--scaling divides the GPUs and simulates by itself; leave --{name.replace('_', '-')} out"
            )
    _scaled_sizes(options)
    output: Path = options.output or Path("scaling.png")
    if output.suffix.lower() != ".png" or not output.absolute().parent.is_dir():
        raise InputError(f"--output {output} must be a file that ends in .png, in a folder that exists")


def _gpus_of(run_dir: Path) -> int:
    """How many GPUs trained a run: by its configuration, or by what it wrote of its responses."""
    if given := read_run_config(run_dir).parallel.world_size:
        return given
    folder = samples_folder(run_dir)
    steps = [file.step for file in stored_files(folder) if not file.is_evaluation]
    if not steps:
        raise InputError(
            f"--calibrate {run_dir}: neither parallel.world_size in its config.yaml nor its samples say how many GPUs "
            "trained it; calibrate with a run that has one of them"
        )
    return int(read_account(file_of(folder, "training", steps[-1]))["world_size"])


def _assumed(options: argparse.Namespace, measured: MeasuredRun | None) -> Assumed:
    """What was given, else what was measured, else what is usual."""
    spread, kept_share = (measured.spread, measured.kept_share) if measured else (0.9, 0.5)
    return Assumed(
        options.length_spread or spread,
        options.kept_share or kept_share,
        options.simulated_steps,
        options.engine_failures_per_hour or 0.0,
        options.engine_restart_s or Assumed.restart_s,
    )


def parser() -> argparse.ArgumentParser:
    """The options of this command."""
    made = argparse.ArgumentParser(
        description="Estimate memory, communication and time of a configuration's layout, without a GPU."
    )
    add = made.add_argument
    add("config", type=Path, help="YAML file of a run")
    add("overrides", nargs="*", metavar="section.key=value", help="overrides of the file")
    add("--propose", action="store_true", help="list layouts that fit instead, fastest first")
    add("--simulate", action="store_true", help="compare the schedules of rollout.schedule instead")
    add(
        "--scaling",
        metavar="FIRST:LAST",
        help="plan and simulate on FIRST GPUs in total, twice as many and so on until LAST instead, and draw a picture",
    )
    add("--output", type=Path, help="PNG file of --scaling (default: scaling.png)")
    add("--calibrate", type=Path, metavar="RUN", help="folder of a run of this model: plan with what its steps took")
    add(
        "--timelines",
        type=Path,
        metavar="FOLDER",
        help="write what trainer and engines do in each schedule of --simulate, for `dapo-mega plot --timeline`",
    )
    numbers: tuple[tuple[str, type, float | None, str], ...] = (
        ("--gpus", int, None, "GPUs of the trainer (default: parallel.world_size)"),
        ("--total-gpus", int, None, "divide so many GPUs between trainer and engines instead, fastest first"),
        ("--rounds", float, 1.0, "rounds of generation that fill a step, of --total-gpus"),
        ("--kept-share", float, None, "share of the groups that dynamic sampling keeps, of --simulate (default: 0.5)"),
        (
            "--length-spread",
            float,
            None,
            "standard deviation of the logarithms of response lengths, of --simulate (default: 0.9)",
        ),
        ("--engine-failures-per-hour", float, None, "how often each engine dies, of --simulate (default: never)"),
        ("--engine-restart-s", float, None, "until a dead engine answers again, of --simulate (default: 300)"),
        ("--simulated-steps", int, 6, "steps of each schedule that count, of --simulate"),
        ("--gpu-memory-gib", float, 80.0, "memory of a GPU"),
        ("--reserve-gib", float, 5.0, "memory of a GPU left to CUDA, NCCL and fragmentation"),
        ("--mean-prompt-tokens", float, None, "default: an eighth of data.max_prompt_tokens"),
        ("--mean-response-tokens", float, None, "default: a quarter of rollout.max_response_tokens"),
        ("--peak-tflops", float, 989.0, "dense bf16 rate of a GPU"),
        ("--flops-share", float, 0.5, "share of that rate that matrix products and attention reach"),
        ("--intra-node-gbps", float, 350.0, "GB/s of a GPU within a node, one way"),
        ("--inter-node-gbps", float, 45.0, "GB/s of a GPU between nodes, one way"),
        ("--gpus-per-node", int, 8, "GPUs of a node"),
        ("--memory-gbps", float, 3350.0, "GB/s of a GPU's memory"),
        ("--memory-share", float, 0.8, "share of that bandwidth that decoding and elementwise kernels reach"),
        ("--engine-gpus", int, None, "GPUs of a fleet's engines (default: from rollout.fleet)"),
        (
            "--engine-tensor",
            int,
            None,
            "GPUs of an engine (default: from rollout.fleet, else so many that its weights take half of each)",
        ),
    )
    for name, kind, default, text in numbers:
        add(name, type=kind, default=default, help=f"{text}" + (f" ({default:g})" if default else ""))
    return made


def assumptions_of(options: argparse.Namespace, config: RunConfig) -> Assumptions:
    """What the options of `parser` say. Raises InputError for what contradicts itself or the configuration."""
    for name, value in vars(options).items():
        if isinstance(value, float | int) and not isinstance(value, bool) and not value > 0:
            raise InputError(f"--{name.replace('_', '-')}={value:g} must be larger than 0")
    for name in ("flops_share", "memory_share"):
        if getattr(options, name) > 1:
            raise InputError(f"--{name.replace('_', '-')}={getattr(options, name):g} is a share; give at most 1")
    _check_scaling(options)
    _check_total(options)
    _check_simulated(options)
    _check_engines(options, config)
    mean_prompt = options.mean_prompt_tokens or config.data.max_prompt_tokens / 8
    mean_response = options.mean_response_tokens or config.rollout.max_response_tokens / 4
    for name, mean, largest in (
        ("prompt", mean_prompt, config.data.max_prompt_tokens),
        ("response", mean_response, config.rollout.max_response_tokens),
    ):
        if mean > largest:
            raise InputError(
                f"--mean-{name}-tokens={mean:g} is larger than the configuration's longest {name}, {largest}"
            )
    machine = Machine(
        flops=options.peak_tflops * 1e12,
        flops_share=options.flops_share,
        intra_node_bytes=options.intra_node_gbps * 1e9,
        inter_node_bytes=options.inter_node_gbps * 1e9,
        gpus_per_node=options.gpus_per_node,
        memory_bytes=options.gpu_memory_gib * GIB,
        memory_rate=options.memory_gbps * 1e9,
        memory_rate_share=options.memory_share,
    )
    return Assumptions(
        machine, mean_prompt, mean_response, options.engine_tensor, options.engine_gpus, options.reserve_gib * GIB
    )


def _check_total(options: argparse.Namespace) -> None:
    """Refuse what a division of all GPUs decides itself."""
    if options.total_gpus is None:
        return
    for name in ("gpus", "engine_gpus", "propose"):
        if getattr(options, name):
            raise InputError(
                f"--total-gpus divides the GPUs and proposes layouts itself; leave --{name.replace('_', '-')} out"
            )
    per_node = options.gpus_per_node
    if options.total_gpus > per_node and options.total_gpus % per_node:
        raise InputError(
            f"--total-gpus={options.total_gpus} is not a number of whole machines of {per_node} GPUs "
            "(--gpus-per-node), by which GPUs are divided; give a multiple"
        )


def _check_simulated(options: argparse.Namespace) -> None:
    if options.simulate and options.propose:
        raise InputError("--simulate is of one layout, or of the best divisions of --total-gpus; leave --propose out")
    if options.timelines and options.total_gpus is not None:
        raise InputError("--timelines writes the schedules of one layout; leave --total-gpus out")
    if options.timelines and not options.simulate:
        raise InputError("--timelines writes what --simulate finds; add --simulate, or leave it out")
    if options.timelines and options.timelines.exists() and not options.timelines.is_dir():
        raise InputError(f"--timelines {options.timelines} is no folder; give a folder or a new name")
    for name in ("engine_failures_per_hour", "engine_restart_s"):
        if getattr(options, name) and not (options.simulate or options.scaling):
            raise InputError(
                f"--{name.replace('_', '-')} is of --simulate and --scaling; add one of them, or leave it out"
            )
    if options.engine_restart_s and not options.engine_failures_per_hour:
        raise InputError("--engine-restart-s needs engines that die; add --engine-failures-per-hour, or leave it out")
    if options.kept_share and options.kept_share > 1:
        raise InputError(f"--kept-share={options.kept_share:g} is a share; give a number above 0 and up to 1")


def _check_engines(options: argparse.Namespace, config: RunConfig) -> None:
    """Refuse numbers of engines that contradict each other or `rollout.placement`."""
    placement, num_gpus, tensor = config.rollout.placement, options.engine_gpus, options.engine_tensor
    if placement == "embedded" and (num_gpus or tensor):
        raise InputError(
            "--engine-gpus and --engine-tensor are for engines of a fleet, and rollout.placement=embedded; add "
            "rollout.placement=fleet rollout.fleet.rendezvous=HOST:PORT, or leave them out"
        )
    if placement == "colocated" and num_gpus:
        raise InputError(
            "--engine-gpus is for GPUs of the engines' own, and rollout.placement=colocated uses the trainer's; leave "
            "it out, or add rollout.placement=fleet"
        )
    tensor = tensor or config.rollout.fleet.engine_tensor
    if num_gpus and num_gpus % (tensor or 1):
        raise InputError(f"--engine-gpus={num_gpus} must be a multiple of --engine-tensor={tensor}")
