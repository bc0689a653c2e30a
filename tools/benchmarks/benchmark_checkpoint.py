"""Times saving a checkpoint: how long training stands still, with files written in the background and without.

python tools/benchmark.py checkpoint --hidden 768 --layers 14

One process holds a random model with its optimizer. The two ways take turns; medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmark_workload import add_model_options, lone_policy, num_parameters, prepare_workload

from dapo_mega.config import ComputeConfig, ParallelConfig
from dapo_mega.megatron.core.repairs import cpu_accelerator


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    parser.set_defaults(hidden=768, layers=14, heads=12, kv_heads=4, longest=512)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--rounds", type=int, default=3)
    print("\n".join(run(parser.parse_args(argv))))


def run(options: argparse.Namespace) -> list[str]:
    """The report's lines."""
    cpu_accelerator.install()
    from dapo_mega.checkpoints.store import CheckpointStore, LoopState
    from dapo_mega.megatron.processes import start_processes, stop_processes

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        model = prepare_workload(folder, options)
        policy = lone_policy(model, options.dtype, start_processes(ParallelConfig(), 0), ComputeConfig())
        stores = {
            "background": CheckpointStore(folder / "background", keep_last=1, asynchronous=True),
            "training waits": CheckpointStore(folder / "waiting", keep_last=1),
        }
        blocked: dict[str, list[float]] = {way: [] for way in stores}
        total: dict[str, list[float]] = {way: [] for way in stores}
        for step in range(options.rounds):
            for way, store in stores.items():
                started = time.perf_counter()
                store.save(policy, LoopState(0, {}, {}), step)
                blocked[way].append(time.perf_counter() - started)
                store.finish(policy)
                total[way].append(time.perf_counter() - started)
        newest = stores["background"].latest()
        assert newest
        num_bytes = sum(file.stat().st_size for file in newest.iterdir())
        lines = [
            f"{num_parameters(model) / 1e6:.0f} M parameters in {options.dtype} with optimizer, "
            f"{num_bytes / 1e6:.0f} MB",
            "",
            "| files are written | training stands still, s | checkpoint complete after, s |",
            "|---|---|---|",
        ]
        for way in stores:
            lines.append(f"| {way} | {statistics.median(blocked[way]):.2f} | {statistics.median(total[way]):.2f} |")
    stop_processes()
    return lines


if __name__ == "__main__":
    main()
