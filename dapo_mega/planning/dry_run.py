"""`--dry-run`: everything that can be checked without starting the run."""

import difflib
import os
import tempfile
from pathlib import Path

from dapo_mega.algorithms.own import try_own_code
from dapo_mega.cli import print_once
from dapo_mega.config import DatasetConfig, RunConfig, SftConfig, dump_config
from dapo_mega.config.fleet import require_api_key
from dapo_mega.config.paths import PathKind, paths_in
from dapo_mega.data import check_dataset, first_record, load_tokenizer
from dapo_mega.data.preview import preview_run
from dapo_mega.data.prompts import Render
from dapo_mega.data.templates import render_messages
from dapo_mega.distributed.processes import world_size_from_environment
from dapo_mega.environments.build import make_environment, try_environment
from dapo_mega.environments.turns import task_of
from dapo_mega.errors import InputError
from dapo_mega.metrics.trackers import missing_packages
from dapo_mega.planning.plan import describe_fine_tuning, describe_run
from dapo_mega.rewards.build import load_functions, make_reward, needed_correctness
from dapo_mega.rewards.trial import try_reward


def print_dry_run(config: RunConfig | SftConfig, *, elsewhere: bool = False, everything: bool = False) -> None:
    """Print the layout, the batch arithmetic, notes on what is not on this machine, a prompt of each dataset where the
    model's folder is here, and the resolved configuration if `everything` is wanted.

    Raises InputError, in one line, for errors that would end the run at its start. The run may be for `elsewhere`:
    then a path that looks misspelt here is only noted.
    """
    if not elsewhere and (problems := [problem for path in paths_in(config) if (problem := _path_problem(*path))]):
        raise InputError(f"{'; '.join(problems)}; correct it, or add --elsewhere if the run is for another machine")
    world_size = world_size_from_environment()
    if isinstance(config, SftConfig):
        lines = describe_fine_tuning(config, world_size)
    else:
        lines = describe_run(config, world_size) + _key_notes(config)
    for key, dataset in config.data.by_key.items():
        _check(key, dataset, has_responses=isinstance(config, SftConfig))
    if isinstance(config, RunConfig):
        lines += _reward_lines(config) + _code_notes(config)
    if missing := missing_packages(config.tracking.backends):
        lines.append(f"note: {missing}")
    # What the datasets that are here look like to the policy, if its tokenizer is here, too.
    preview = ""
    if Path(config.model.path).is_dir():
        tokenizer = load_tokenizer(config.model.path)
        render: Render = render_messages
        if isinstance(config, RunConfig) and not _missing_code(config):
            environment, render = make_environment(config, tokenizer)
            environment.close()
        preview = preview_run(config, tokenizer, only_local=True, render=render)
    print_once("\n".join(lines))
    if preview:
        print_once(preview)
    if everything:
        print_once(f"the whole configuration:\n{dump_config(config)}")
    num_notes = sum(line.startswith("note: ") for line in lines)
    notes = "note" if num_notes == 1 else f"{num_notes} notes"
    exceptions = f", apart from what the {notes} above could not check here" if num_notes else ""
    print_once(f"dry run: the configuration is valid{exceptions}; nothing was started")


def _path_problem(key: str, kind: PathKind, path: str) -> str | None:
    """What would not work with a path here, None for one whose folder is not here either, as it may be elsewhere."""
    place = Path(path.rpartition(":")[0] if kind == "function" else path)
    here = place
    while not os.path.lexists(here) and not os.path.lexists(here.parent):
        here = here.parent
    try:
        if kind == "output":
            folder = here if os.path.lexists(here) else here.parent
            with tempfile.TemporaryFile(dir=folder):
                return None
        if place.exists():
            return None
        near = difflib.get_close_matches(here.name, os.listdir(here.parent), n=1, cutoff=0.75)
    except OSError as error:
        return f"{key}={path} cannot be used: {error.strerror}"
    if near:
        return f"{key}={path} does not exist; did you mean {here.parent / near[0] / place.relative_to(here)}?"
    return f"{key}={path} does not exist" if here == place and place.is_absolute() else None


def _check(name: str, dataset: DatasetConfig, has_responses: bool = False) -> None:
    try:
        check_dataset(dataset, has_responses=has_responses)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _reward_lines(config: RunConfig) -> list[str]:
    """What an own or composed reward says of one record. Raises InputError if it cannot be used."""
    if not config.reward.is_own:
        return []
    name, dataset = next(iter(config.data.training.items()))
    record = first_record(dataset)
    notes = [
        f"note: the reward {part.label} was not tried, as it needs a network"
        for part in config.reward.parts
        if not part.is_local
    ]
    reward = make_reward(config, only_local=True)
    try:
        if record is None:
            load_functions(reward)
            key = config.data.key_of(name)
            return [f"note: the reward was not tried, as {key}.path is not on this machine", *notes]
        tried = try_reward(reward, record, needs_correctness=needed_correctness(config))
        return [*(f"reward of a made-up response to the first prompt: {line}" for line in tried), *notes]
    finally:
        reward.close()


def _code_notes(config: RunConfig) -> list[str]:
    """Notes about own code that is not here; what is all here is tried. Raises InputError if it cannot be used."""
    own, missing = config.own_code, _missing_code(config)
    if not missing:
        try_own_code(own.values(), config.batch.group_size)
    record = first_record(next(iter(config.data.training.values())))
    if ("environment" in own.keys() - {*missing} or config.environment.kind == "program") and record:
        try_environment(config, task_of(record))
    return [f"note: {key} was not tried, as {place} is not on this machine" for key, place in missing.items()]


def _missing_code(config: RunConfig) -> dict[str, Path]:
    places = {key: Path(code.path.rpartition(":")[0]) for key, code in config.own_code.items() if code.path}
    return {key: place for key, place in places.items() if place.suffix == ".py" and not place.exists()}


def _key_notes(config: RunConfig) -> list[str]:
    """A note where the engines' API key is not set, as on the machine that only checks a file. Raises InputError for
    one that cannot be used."""
    if config.rollout.placement == "embedded":
        return []
    name = config.rollout.fleet.api_key_env
    if not os.environ.get(name):
        return [
            f"note: the environment variable {name} is not set here; before the run starts, set it to the same secret "
            f'for the trainer and all engines: export {name}=$(python3 -c "import secrets; '
            f'print(secrets.token_hex(32))")'
        ]
    require_api_key(name)
    return []
