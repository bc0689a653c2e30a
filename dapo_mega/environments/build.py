"""Makes the run's environment and tries it out."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

from dapo_mega.algorithms.own_code import MisuseError
from dapo_mega.config import RunConfig
from dapo_mega.config.environment import OwnEnvironment, ProgramEnvironment
from dapo_mega.data.prompts import Render
from dapo_mega.data.templates import render_messages, with_template_arguments
from dapo_mega.data.tokenizer import decoder
from dapo_mega.distributed.event_loops import outer_loop_set_aside
from dapo_mega.environments.base import SINGLE_TURN, Environment
from dapo_mega.environments.dialogues import make_dialogue
from dapo_mega.environments.endpoint import Wording
from dapo_mega.environments.markup import ENDS
from dapo_mega.environments.observations import read_tools
from dapo_mega.environments.pool import EnvironmentPool
from dapo_mega.environments.programs import Programs, SharedPrograms, check_command
from dapo_mega.environments.turns import Turns, seed_of_group
from dapo_mega.errors import InputError
from dapo_mega.rewards.processes import CallError

logger = logging.getLogger(__name__)


def make_environment(config: RunConfig, tokenizer: Any) -> tuple[Environment, Render]:
    """The run's environment, and what makes the text of prompts for it. Raises InputError if it cannot be made."""
    own = config.environment
    if not isinstance(own, OwnEnvironment | ProgramEnvironment):
        return SINGLE_TURN, render_messages
    datasets = config.data.by_key
    (key, first), *others = datasets.items()
    for other, dataset in others:
        if (dataset.chat_template, dataset.template_arguments) != (first.chat_template, first.template_arguments):
            raise InputError(
                f"an environment needs one kind of prompts, but chat_template or template_arguments of {key} and "
                f"{other} are not the same; set them to the same"
            )
    tokenizer = with_template_arguments(tokenizer, first.template_arguments)
    usual = config.batch.groups_per_step * config.batch.group_size
    if isinstance(own, ProgramEnvironment):
        tokenizer = copy.deepcopy(tokenizer)  # Another thread encodes with it.
        dialogue = make_dialogue(own.dialogue, tokenizer, chat_template=first.chat_template, tools=())
        decode = decoder(tokenizer, [*ENDS, *ENDS.values()])
        wording = Wording(dialogue, decode, len(tokenizer))
        programs = Programs(own, SharedPrograms(own, wording), usual)
        return programs, partial(render_messages, add_generation_prompt=False)
    pool = EnvironmentPool(own)
    try:
        tools = _run(own, _tools(pool))
        dialogue = make_dialogue(own.dialogue, tokenizer, first.chat_template, tools, own.history)
        render = partial(render_messages, tools=tools, add_generation_prompt=False)
        return Turns(own, pool, dialogue, usual), render
    except BaseException:
        pool.close()
        raise


def try_environment(config: RunConfig, task: Mapping[str, Any]) -> None:
    """Begin two environments of a task and let both take a turn, in turns. Raises InputError for one that cannot be
    used, and warns of one that does not repeat itself."""
    own = config.environment
    if isinstance(own, ProgramEnvironment):
        check_command(own)
    if not isinstance(own, OwnEnvironment):
        return
    pool = EnvironmentPool(own.model_copy(update={"num_workers": 1}))
    try:
        _run(own, _trial(own, pool, task, seed_of_group(config.seed, 0)))
    finally:
        pool.close()


async def _tools(pool: EnvironmentPool) -> list[dict[str, Any]]:
    live = await pool.open()
    live.close()
    return read_tools(live.tools)


async def _trial(own: OwnEnvironment, pool: EnvironmentPool, task: Mapping[str, Any], seed: int) -> None:
    lives = [await pool.open(), await pool.open()]
    action = {"text": "2", "reasoning": "", "calls": [], "finish_reason": "stop", "turn": 0, "token_ids": [2]}
    for call in (("reset", task, seed), ("step", action)):
        (first, _, snapshot), (second, _, _) = [await live.observe(*call) for live in lives]
        if first != second and not snapshot:
            logger.warning(
                "environment: %s: its method %s returns %r and %r for the same task, seed and turns, so trajectories "
                "that fail or are interrupted begin anew; draw from a generator of its own that is made of the seed "
                "(no module's random numbers, which all environments of a process share), or give it the methods "
                "snapshot and restore",
                own.title,
                call[0],
                first,
                second,
            )
            return


def _run(own: OwnEnvironment, work: Coroutine[Any, Any, Any]) -> Any:
    """What the coroutine returns. Raises InputError where the environment fails."""
    try:
        with outer_loop_set_aside():
            return asyncio.run(work)
    except MisuseError as error:
        raise own.unusable(error) from None
    except CallError as error:
        if error.detail:
            logger.warning("%s", error.detail.rstrip())
        raise own.unusable(error) from None
