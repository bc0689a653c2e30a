"""Tasks that come with everything: data, a model with random weights, and the cold start that all runs share.

Each is made by the commands that a user could type, as child processes; what is there already is left alone.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from dapo_mega.errors import InputError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RUN_FILE, TUNING_FILE = CONFIGS / "quickstart.yaml", CONFIGS / "quickstart_sft.yaml"

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
"""Of the children: the tasks are sized for CPU cores, so a GPU that happens to be there is left alone."""

_SIZES = ("--num-train", "4000", "--num-eval", "256", "--num-demonstrations", "30000")
MODEL = ("--hidden-size", "192", "--layers", "2", "--heads", "4", "--kv-heads", "4", "--intermediate-size", "512")


def dapo_mega(name: str, *arguments: str, processes: int = 1) -> list[str]:
    """`dapo-mega NAME ...` with this interpreter; training commands in so many processes of this machine."""
    several = ["--processes", str(processes)] if processes > 1 else []
    return [sys.executable, "-W", "ignore", "-m", "dapo_mega", name, *several, *arguments]


@dataclass(frozen=True)
class Task:
    """A task on top of the quickstart's files: arguments of `prepare arithmetic`, and overrides of the two files."""

    about: str
    problems: tuple[str, ...]
    tuning: tuple[str, ...] = ()
    training: tuple[str, ...] = ()

    def overrides(self, folder: Path) -> tuple[str, ...]:
        """Overrides of a run that starts from the cold start in this folder."""
        return (
            f"model.path={folder / 'sft' / 'hf'}",
            f"data.train.path={folder / 'data' / 'train.parquet'}",
            f"data.evaluation.path={folder / 'data' / 'eval.parquet'}",
            *self.training,
        )

    def commands(self, folder: Path, processes: int) -> list[list[str]]:
        """Command lines that make data, model and cold start in this folder; its seed is 0."""
        tuning = [
            f"output_dir={folder / 'sft'}",
            f"model.path={folder / 'initial'}",
            f"data.train.path={folder / 'data' / 'demonstrations.parquet'}",
            *self.tuning,
        ]
        return [
            dapo_mega("prepare", "arithmetic", "--output", str(folder / "data"), *self.problems),
            dapo_mega("prepare", "init-model", "--output", str(folder / "initial"), *MODEL),
            dapo_mega("sft", "--config", str(TUNING_FILE), *tuning, processes=processes),
        ]


# Five times the policy's learning rate, as critic.learning_rate's default is of the usual one.
_CRITIC = ("critic.learning_rate=5e-4", "critic.warmup_steps=5")
_MOSTLY_VERBOSE = ("--careful", "0.3", "--verbose", "0.45", "--careless", "0.25")

TASKS = {
    "quickstart": Task("sums of 3-digit numbers, at most 64 tokens", ("--min-digits", "3", *_SIZES), training=_CRITIC),
    "long": Task(
        "sums of 3- to 5-digit numbers, at most 96 tokens; nearly half of the cold start's answers work everything "
        "twice, which is right but long, and cut off for 5 digits",
        ("--min-digits", "3", "--max-digits", "5", *_SIZES, *_MOSTLY_VERBOSE),
        tuning=("data.max_tokens=160",),
        training=("rollout.max_response_tokens=96", "reward.overlong_cache_tokens=24", *_CRITIC),
    ),
}


def find_task(name: str) -> Task:
    """Raises InputError where the project's run files are not beside the package."""
    if not RUN_FILE.is_file():
        raise InputError(f"the task {name} needs {RUN_FILE}, which is in the project's folder; give --config instead")
    return TASKS[name]
