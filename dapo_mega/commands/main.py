"""`dapo-mega NAME ...`, also `python -m dapo_mega NAME ...`: lists the commands and starts one of them."""

import importlib
import os
import sys

from dapo_mega import __version__
from dapo_mega.cli import run_command
from dapo_mega.errors import InputError

COMMANDS = {
    "prepare": "make a task and a random model to try things with; inspect a dataset",
    "plan": "see what a configuration's layout costs, and which others fit",
    "rehearse": "run a step as every rank of a run of any size, on this CPU",
    "serve": "start this machine's SGLang rollout engines",
    "control": "command a run from a process of its own, for trainers that may die and come back",
    "rejection-sample": "keep a model's own correct responses, to fine-tune on",
    "sft": "fine-tune a model on demonstrations",
    "train": "train a policy with DAPO",
    "ablate": "repeat the paper's Table 1 and compare all methods",
    "plot": "draw the curves of runs",
    "show-samples": "make a page of what the model said",
    "replay-step": "train on a recorded step again and say what differs",
    "evaluate": "measure a model on benchmarks: avg@k, pass@k and maj@k",
    "regrade": "score saved responses again by another reward",
    "convert": "convert, reshard, verify and inspect checkpoints",
    "explain": "what a configuration key, a metric or a method means",
    "compare": "what training changed: evaluations side by side",
}
_STARTS_PROCESSES = ("train", "sft", "replay-step")


def main() -> None:
    """Start the command that the first argument names."""
    run_command(_main)


def usage() -> str:
    listed = "\n".join(f"  {name:17s}{text}" for name, text in COMMANDS.items())
    return (
        f"usage: dapo-mega COMMAND ...\n\n{listed}\n\n"
        "dapo-mega COMMAND --help lists a command's arguments. train, sft and replay-step run in one process, with\n"
        "--processes N as their first argument in N processes of this machine, on several machines under torchrun:\n"
        "  torchrun --nnodes M --nproc-per-node N --node-rank R --master-addr A --master-port P \\\n"
        "    -m dapo_mega train ...\n"
    )


def _main() -> None:
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("-h", "--help"):
        print(usage(), end="")
        return
    if name == "--version":
        print(f"dapo_mega {__version__}")
        return
    if name not in COMMANDS:
        raise InputError(f"dapo-mega has no command {name!r}; it has {', '.join(COMMANDS)}")
    if name in _STARTS_PROCESSES and arguments[:1] == ["--processes"]:
        _start_processes(name, arguments[1:])
        return
    sys.argv = [f"dapo-mega {name}", *arguments]
    importlib.import_module(f"dapo_mega.commands.{name.replace('-', '_')}").main()


def _start_processes(name: str, arguments: list[str]) -> None:
    """Run the command in processes of this machine: torchrun, without its advice about threads and its report."""
    if not arguments or not arguments[0].isdecimal() or int(arguments[0]) < 1:
        given = repr(arguments[0]) if arguments else "nothing"
        raise InputError(f"--processes takes the number of processes, 1 or more, got {given}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun = ["-m", "dapo_mega.commands._processes", "--nproc-per-node", arguments[0]]
    torchrun += ["--rdzv-backend", "bound", "--rdzv-endpoint", "127.0.0.1:0"]  # No port of other interfaces.
    os.execv(sys.executable, [sys.executable, "-W", "ignore", *torchrun, "-m", "dapo_mega", name, *arguments[1:]])
