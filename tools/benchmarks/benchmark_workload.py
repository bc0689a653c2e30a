"""What the benchmarks compute on: a random Qwen2-shaped model, prompts of the arithmetic task, response lengths.

Everything is made in a folder of its own by tools/prepare_data.py, so that a benchmark repeats from a clone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dapo_mega.commands import prepare
from dapo_mega.config import RunConfig
from dapo_mega.training.build import TrainingRun, build_run
from dapo_mega.training.run import close

_SIGMA = 0.7
"""Spread of the log-normal lengths: with it the longest of some hundred is about five times the mean."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The shape of the random model, or a checkpoint to use instead."""
    parser.add_argument("--model", type=Path, help="a checkpoint folder with tokenizer (default: random weights)")
    parser.add_argument(
        "--hidden", type=int, default=128, help="hidden size of the random model (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=4, help="its layers (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="its attention heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=2, help="its key/value heads (default: %(default)s)")
    parser.add_argument("--ffn", type=int, help="its MLP size (default: 3 x hidden size)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and lengths (default: %(default)s)")


def add_length_options(parser: argparse.ArgumentParser, mean: int, longest: int) -> None:
    """How many tokens responses have."""
    parser.add_argument("--mean", type=float, default=mean, help="mean response tokens (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=longest, help="most response tokens (default: %(default)s)")
    parser.add_argument("--equal", action="store_true", help="every response has --longest tokens")


def update_parser(name: str, description: str | None, *, responses: int) -> argparse.ArgumentParser:
    """The options of a benchmark of updates: model, lengths, batch, and how often it is measured."""
    parser = argparse.ArgumentParser(
        prog=f"benchmark.py {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    add_length_options(parser, mean=100, longest=512)
    parser.add_argument("--responses", type=int, default=responses, help="in all (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="responses per prompt (default: %(default)s)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--microbatch-tokens", type=int, default=2048, help="ours (default: %(default)s)")
    add_round_options(parser)
    return parser


def update_batch(options: argparse.Namespace, *, num_updates: int) -> dict[str, int]:
    """The section `batch` of a run whose steps have so many updates; `options` are those of `update_parser`."""
    num_groups = -(-options.responses // options.group_size)
    return {
        "groups_per_step": num_groups,
        "mini_batch_groups": num_groups // num_updates,
        "group_size": options.group_size,
        "tokens_per_microbatch": max(options.microbatch_tokens, options.longest + 32),
    }


def add_round_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=180, help="start no round after this (default: %(default)s)")


@contextlib.contextmanager
def built_run(config: RunConfig) -> Iterator[TrainingRun]:
    """The run's parts, in one process, until the block ends."""
    training_run = build_run(config, 0)
    try:
        yield training_run
    finally:
        close(training_run)


def lone_policy(folder: Path, dtype: Any, processes: Any, compute: Any) -> Any:
    """The policy of the checkpoint in `folder`, in one process without a run around it."""
    from dapo_mega.config import ModelConfig, OptimizerConfig, ParallelConfig
    from dapo_mega.megatron.megatron_policy import MegatronPolicy

    return MegatronPolicy(
        ModelConfig(path=str(folder), dtype=dtype),
        ParallelConfig(),
        OptimizerConfig(warmup_steps=0),
        processes,
        temperature=1.0,
        updates_per_step=1,
        num_steps=1,
        compute=compute,
    )


def response_lengths(options: argparse.Namespace, num_responses: int, seed: int) -> npt.NDArray[np.int64]:
    """[num_responses] tokens per response: log-normal, cut off at the longest as a response limit does."""
    if options.equal:
        return np.full(num_responses, options.longest, dtype=np.int64)
    rng = np.random.default_rng(seed)
    # E[exp(mu + sigma z)] = exp(mu + sigma^2 / 2)
    drawn = rng.lognormal(np.log(options.mean) - _SIGMA**2 / 2, _SIGMA, num_responses)
    lengths = np.clip(np.rint(drawn), 1, options.longest).astype(np.int64)
    # Rows of a padded batch pay for the longest, so it must not depend on the draw.
    lengths[lengths.argmax()] = options.longest
    return lengths


def prepare_workload(folder: Path, options: argparse.Namespace) -> Path:
    """Write prompts and, unless one is given, the model into `folder`; returns the model's folder."""
    seed = ["--seed", str(options.seed)]
    data = ["arithmetic", "--output", str(folder / "data"), "--num-demonstrations", "100", *seed]
    _run_preparation([*data, "--num-train", "1000", "--num-eval", "100"])
    if options.model:
        model: Path = options.model
        return model
    shape = {
        "hidden-size": options.hidden,
        "layers": options.layers,
        "heads": options.heads,
        "kv-heads": options.kv_heads,
        "intermediate-size": options.ffn or 3 * options.hidden,
        "max-positions": max(512, options.longest + 64),
    }
    sizes = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
    _run_preparation(["init-model", "--output", str(folder / "model"), *sizes, *seed])
    return folder / "model"


def write_word_problems(folder: Path, num_prompts: int) -> dict[str, dict[str, Any]]:
    """Write so many problems of the recipe `real_model`, each step's prompts; returns the run's section `data`."""
    recipe = runpy.run_path(str(Path(__file__).parents[2] / "configs" / "recipes" / "real_model" / "problems.py"))
    kinds = (recipe[name] for name in ("TRAIN", "NAMES", "THINGS"))
    rows = recipe["word_problems"](*kinds, num_prompts, random.Random(0))
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "problem", "ground_truth": "answer"}
    train = {"path": str(file), "columns": columns, "template": "bare", "chat_template": True}
    return {"data": {"max_prompt_tokens": 128, "train": train}}


def _run_preparation(arguments: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        prepare.main(arguments)


def run_config(folder: Path, model: Path, options: argparse.Namespace, **sections: Any) -> RunConfig:
    """A run of one process on the workload; `sections` replace keys of the sections below."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": options.dtype},
        "data": {
            "max_prompt_tokens": 32,
            "train": {"path": str(folder / "data" / "train.parquet"), "template": "bare"},
        },
        "rollout": {"max_response_tokens": options.longest},
        "reward": {"overlong_punishment": False, "overlong_cache_tokens": 1},
        "algorithm": {"preset": "dapo", "dynamic_sampling": False},
        "optimizer": {"learning_rate": 1e-5, "warmup_steps": 0},
        "checkpoint": {"every": 0, "save_hf_at_end": False},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    return RunConfig.model_validate(
        {
            "output_dir": str(folder / "run"),
            "seed": options.seed,
            "num_steps": 10_000,
            "threads_per_process": options.threads,
            **settings,
        }
    )


def num_parameters(model: Path) -> int:
    """Parameters of a safetensors checkpoint in one file, from its header."""
    with (model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(int(np.prod(tensor["shape"])) for name, tensor in header.items() if name != "__metadata__")
