"""Rehearse a run: a step of its real code as every rank that differs, of any number of GPUs, on a CPU.

dapo-mega rehearse configs/qwen2.5-32b-dapo-128gpu.yaml
dapo-mega rehearse configs/qwen2.5-32b-dapo-128gpu.yaml parallel.tensor=8 parallel.pipeline=4
dapo-mega rehearse run.yaml --gpus 16

Nothing is allocated and nothing computed: shapes, memory, operations and communications are those of the real code. The
model's weights need not be here: model.architecture (a config.json) is enough; of a model that is here, names and
shapes of its tensors are checked.
"""

import argparse
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from dapo_mega.cli import loading, print_once
from dapo_mega.commands._arguments import prepare_megatron
from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import InputError


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dapo-mega rehearse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the file")
    parser.add_argument("--gpus", type=int, help="GPUs of the trainer (default: parallel.world_size)")
    parser.add_argument("--gpu-memory-gib", type=float, default=80.0, help="memory of a GPU (80)")
    parser.add_argument("--reserve-gib", type=float, default=5.0, help="of it left to CUDA, NCCL and fragmentation (5)")
    options = parser.parse_intermixed_args(argv)
    config = load_config(RunConfig, options.config, options.overrides)
    world_size = options.gpus or config.parallel.world_size or 1
    parallel = config.parallel.model_copy(update={"world_size": world_size})
    config = config.model_copy(update={"parallel": parallel})
    prepare_megatron()
    warnings.simplefilter("ignore")
    with loading():
        from dapo_mega.commands.plan import assumptions_of
        from dapo_mega.commands.plan import parser as plan_parser
        from dapo_mega.planning.estimate import estimate
        from dapo_mega.planning.plan import describe_run
        from dapo_mega.planning.report import time_lines
        from dapo_mega.rehearsal.report import report
        from dapo_mega.rehearsal.run import rehearse_run

    for line in describe_run(config, world_size):
        print_once(line)
    sizes = [f"--gpu-memory-gib={options.gpu_memory_gib}", f"--reserve-gib={options.reserve_gib}"]
    assumptions = assumptions_of(plan_parser().parse_args([str(options.config), *sizes]), config)
    available = assumptions.machine.memory_bytes - assumptions.reserved_bytes
    rehearsal = rehearse_run(config, world_size, available)
    for line in chain(report(rehearsal), time_lines(estimate(config, rehearsal.workload.placement, assumptions))):
        print_once(line)
    if found := rehearsal.disagreements():
        raise InputError("the run's ranks do not meet: " + "; ".join(found))
    print_once("ranks agree: every collective meets in its group, and every send has its receive")
