"""Convert checkpoints between Hugging Face's format and Megatron's, at any layout; compare and inspect them.

dapo-mega convert hf-to-megatron HF_FOLDER NEW_FOLDER --tensor 8 --pipeline 4
dapo-mega convert megatron-to-hf RUN NEW_FOLDER [--critic]
dapo-mega convert reshard MEGATRON_FOLDER NEW_FOLDER --tensor 2 --expert 4
dapo-mega convert merge FOLDER NEW_FOLDER --others OTHER_FOLDER ... [--weights 1 1]
dapo-mega convert verify FOLDER OTHER_FOLDER
dapo-mega convert inspect FOLDER --tensors

Of a run's folder the newest checkpoint is taken; RUN/checkpoints/step_00000100 is one of it.

Needs memory for a few tensors and one shard, not for the model. Started again after an interruption, a conversion
continues. Under torchrun the processes share the files among them.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_mega.cli import print_once
from dapo_mega.commands._arguments import prepare_megatron
from dapo_mega.config import ParallelConfig
from dapo_mega.config.files import validated
from dapo_mega.distributed.processes import world_size_from_environment
from dapo_mega.errors import InputError

if TYPE_CHECKING:
    from dapo_mega.conversion.convert import Checkpoint
    from dapo_mega.models import Architecture

_GIB = 2**30
_LISTED = 20
_TAKE_CRITIC = ("megatron-to-hf", "verify", "inspect")
_SIZES = ("tensor", "pipeline", "virtual_pipeline", "expert")
EXIT_DIFFERENT = 1


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    prepare_megatron()
    if world_size_from_environment() > 1:
        if options.command in ("verify", "inspect"):
            raise InputError(f"{options.command} runs in one process; start it without torchrun")
        import torch.distributed as dist

        # The first process to be done waits for the last.
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    from dapo_mega.conversion.convert import open_checkpoint
    from dapo_mega.models.stored_model import CRITIC_CONFIG_FILE

    is_critic = options.command in _TAKE_CRITIC and options.critic
    source = _checkpoint_in(options.source, exported=options.command == "hf-to-megatron")
    checkpoint = open_checkpoint(source, options.model, is_critic=is_critic)
    if options.command == "inspect":
        from dapo_mega.conversion.inspection import describe

        for line in describe(checkpoint, options.tensors):
            print_once(line)
    elif options.command == "verify":
        found = _checkpoint_in(options.other)
        is_critic = options.critic and (found / CRITIC_CONFIG_FILE).is_file()
        other = open_checkpoint(found, options.model, is_critic=is_critic)
        _verify(checkpoint, other, options.tensors_only)
    elif options.command == "merge":
        from dapo_mega.conversion.merging import merge

        models = [checkpoint, *(open_checkpoint(_checkpoint_in(path), options.model) for path in options.others)]
        weights = options.weights or [1.0] * len(models)
        _say_written(merge(models, weights, options.target.absolute(), round(options.shard_gib * _GIB)), options.target)
    else:
        _convert(checkpoint, options)


def _checkpoint_in(path: Path, *, exported: bool = False) -> Path:
    """`path`, or of a run's folder its newest complete checkpoint, or else or if `exported` its export. Raises
    InputError for a run's folder that has none."""
    from dapo_mega.checkpoints.folders import CheckpointFolders

    roots = [root for root in (path / "checkpoints", path) if root.name == "checkpoints" and root.is_dir()]
    if not roots or (path / "config.json").exists():
        return path
    newest, export = CheckpointFolders(roots[0], 1).latest(), roots[0].with_name("hf")
    chosen = export if (exported or not newest) and export.is_dir() else newest
    if chosen is None:
        raise InputError(f"{path} is the folder of a run without a complete checkpoint; give a run that has saved one")
    print_once(f"of the run in {path} {chosen.name} is taken")
    return chosen


def _convert(checkpoint: "Checkpoint", options: argparse.Namespace) -> None:
    from dapo_mega.conversion.convert import require_format, reshard, to_hf, to_megatron

    require_format(checkpoint, megatron=options.command != "hf-to-megatron", command=options.command)
    shard_bytes = round(options.shard_gib * _GIB)
    target = options.target.absolute()
    if options.command == "megatron-to-hf":
        written = to_hf(checkpoint, target, shard_bytes)
    else:
        convert = to_megatron if options.command == "hf-to-megatron" else reshard
        written = convert(checkpoint, target, _layout(options, checkpoint.arch), shard_bytes)
    _say_written(written, options.target)


def _say_written(written: bool, target: Path) -> None:
    print_once(f"wrote {target}" if written else f"{target} is finished already: nothing to do")


def _verify(left: "Checkpoint", right: "Checkpoint", tensors_only: bool) -> None:
    """Exit status 1 if the checkpoints differ."""
    from dapo_mega.conversion.verification import compare_logprobs, different_fields, different_tensors

    lines = different_tensors(left, right)
    for line in lines[:_LISTED]:
        print_once(line)
    num_tensors = len({*left.names, *right.names})
    print_once(f"{len(lines)} of {num_tensors} tensors differ" if lines else f"all {num_tensors} tensors are equal")
    of_config = different_fields(left, right)
    for line in of_config:
        print_once(f"config.json, {line}")
    agrees = not (lines or of_config)
    if of_config:
        print_once("the models are of different architectures: log-probs are not compared")
    elif left.arch.has_value_head:
        print_once("value models have no log-probs to compare")
    elif not tensors_only:
        found = compare_logprobs(left, right)
        agrees = agrees and found.agrees
        print_once(found.sentence())
    if not agrees:
        sys.exit(EXIT_DIFFERENT)


def _layout(options: argparse.Namespace, arch: "Architecture") -> ParallelConfig:
    """Expert tensor parallelism defaults to --tensor unless experts are sharded over ranks."""
    expert_tensor = options.expert_tensor
    if expert_tensor is None:
        expert_tensor = options.tensor if arch.experts and options.expert == 1 else 1
    sizes = {name: getattr(options, name) for name in _SIZES}
    sizes["pipeline_layout"] = options.pipeline_layout
    return validated(ParallelConfig, {**sizes, "expert_tensor": expert_tensor, "sequence": options.tensor > 1})


def _shard_gib(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size * _GIB < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of GiB, not {text}")
    return size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Convert, compare and inspect checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    model = "folder with what a Megatron checkpoint lacks: config.json and tokenizer, multi-token prediction"
    for name, text in (
        ("hf-to-megatron", "write a Hugging Face checkpoint in Megatron's format"),
        ("megatron-to-hf", "write a Megatron checkpoint's weights in Hugging Face's format"),
        ("reshard", "rewrite a Megatron checkpoint for another layout, with optimizer, critic and loop state"),
        ("merge", "write the mean of several models' weights in Hugging Face's format"),
        ("verify", "compare two checkpoints: tensors, then log-probs of a few prompts"),
        ("inspect", "describe a checkpoint"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("source", type=Path)
        command.add_argument("--model", type=Path, help=model)
        if name in _TAKE_CRITIC:
            command.add_argument("--critic", action="store_true", help="the critic beside the policy of a checkpoint")
        if name == "verify":
            command.add_argument("other", type=Path)
            command.add_argument("--tensors-only", action="store_true", help="compare tensors only")
        elif name == "inspect":
            command.add_argument("--tensors", action="store_true", help="list every tensor")
        else:
            command.add_argument("target", type=Path, help="a folder that does not exist yet")
            command.add_argument("--shard-gib", type=_shard_gib, default=4.0, help="largest file (default 4)")
        if name == "merge":
            command.add_argument(
                "--others", type=Path, nargs="+", required=True, help="models of the same architecture"
            )
            command.add_argument(
                "--weights", type=float, nargs="+", help="of the first and the others (default: equal)"
            )
        if name in ("hf-to-megatron", "reshard"):
            for size in _SIZES:
                command.add_argument(
                    f"--{size.replace('_', '-')}", type=int, default=1, help="as parallel.* of a run (default 1)"
                )
            command.add_argument(
                "--pipeline-layout", help="layers of each chunk, such as 'Et*3|t*4|ttL' (default even)"
            )
            command.add_argument("--expert-tensor", type=int, help="default: 1 with expert parallelism, else --tensor")
    return parser
