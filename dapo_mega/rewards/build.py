"""Makes the reward of a run from its configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_mega.algorithms.filters import OTHER_FILTERS
from dapo_mega.atomic_files import make_way
from dapo_mega.config import RewardConfig, RunConfig, components
from dapo_mega.rewards import built_in
from dapo_mega.rewards.code import CodeReward
from dapo_mega.rewards.composed import ComposedReward, WeightedReward
from dapo_mega.rewards.endpoints import EndpointSettings
from dapo_mega.rewards.function import FunctionReward
from dapo_mega.rewards.judge import JudgeReward
from dapo_mega.rewards.records import Reward
from dapo_mega.rewards.remote import RemoteReward
from dapo_mega.rewards.verifier import AnswerVerifier


@dataclass(frozen=True)
class Surroundings:
    """What a component may need of the run beside its own section."""

    reward: RewardConfig
    max_response_tokens: int
    seed: int


def _answer(component: components.AnswerComponent, run: Surroundings) -> Reward:
    verifier = AnswerVerifier(
        run.reward.num_workers,
        run.reward.time_limit_s,
        component.extraction,
        numeric_tolerance=component.numeric_tolerance,
    )
    return built_in.AnswerReward(verifier, component.correct, component.incorrect)


def _function(component: components.FunctionComponent, run: Surroundings) -> Reward:
    return FunctionReward(
        component.path,
        settings=component.model_dump(mode="json")["settings"],
        num_workers=run.reward.num_workers,
        time_limit_s=run.reward.call_time_limit_s,
        memory_limit_mib=run.reward.memory_limit_mib,
        max_responses=run.reward.call_responses,
        retries=run.reward.retries,
    )


_MAKERS: Mapping[type[components.ComponentConfig], Callable[[Any, Surroundings], Reward]] = {
    components.AnswerComponent: _answer,
    components.CoinComponent: lambda part, run: built_in.CoinReward(run.seed, part.correct, part.incorrect),
    components.EnvironmentComponent: lambda part, run: built_in.EnvironmentReward(),
    components.R1FormatComponent: lambda part, run: built_in.R1FormatReward(),
    components.LanguageComponent: lambda part, run: built_in.LanguageReward(part.language),
    components.RepetitionComponent: lambda part, run: built_in.RepetitionReward(part.ngram_tokens),
    components.LengthDapoComponent: lambda part, run: built_in.OverlongReward(
        run.max_response_tokens, part.cache_tokens
    ),
    components.FunctionComponent: _function,
    components.RemoteComponent: lambda part, run: RemoteReward(EndpointSettings.of(part), part.batch_size),
    components.JudgeComponent: lambda part, run: JudgeReward(part),
    components.CodeComponent: lambda part, run: CodeReward(part),
}


def load_functions(reward: ComposedReward) -> None:
    """Import the reward's functions. Raises InputError for one that is not there or takes something else."""
    for component in reward.components:
        if isinstance(component.reward, FunctionReward):
            component.reward.load()


def log_functions(reward: ComposedReward, path: Path) -> None:
    """Write what the reward's functions print into this file."""
    make_way(path)
    for component in reward.components:
        if isinstance(component.reward, FunctionReward):
            component.reward.log_to(path)


def needed_correctness(config: RunConfig) -> str:
    """What to do about a reward that does not say what is correct; empty where the run does not need it."""
    if not config.algorithm.filters_on_correctness:
        return ""
    return f"algorithm.dynamic_sampling_on=correctness needs that; {OTHER_FILTERS}"


def make_reward(config: RunConfig, *, for_evaluation: bool = False, only_local: bool = False) -> ComposedReward:
    """The run's reward, without length rewards that compare the responses of a group.

    `for_evaluation`: that of held-out evaluations. `only_local`: without components that need a network.
    """
    reward = config.reward.for_evaluation() if for_evaluation else config.reward
    run = Surroundings(reward, config.rollout.max_response_tokens, config.seed)
    made = [
        WeightedReward(part.label, part.weight, _MAKERS[type(part)](part, run), part.shapes_length)
        for part in reward.parts
        if not isinstance(part, components.LengthKimiComponent) and (part.is_local or not only_local)
    ]
    return ComposedReward(made, reward.deciding)
