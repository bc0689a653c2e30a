"""Makes the reward of a run from its configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_mega.algorithms.filters import OTHER_FILTERS
from dapo_mega.atomic_files import make_way
from dapo_mega.config import RewardConfig, RunConfig
from dapo_mega.config.components import (
    AnswerComponent,
    CodeComponent,
    CoinComponent,
    ComponentConfig,
    EnvironmentComponent,
    FunctionComponent,
    JudgeComponent,
    LanguageComponent,
    LengthDapoComponent,
    LengthKimiComponent,
    R1FormatComponent,
    RemoteComponent,
    RepetitionComponent,
)
from dapo_mega.rewards.built_in import (
    AnswerReward,
    CoinReward,
    EnvironmentReward,
    LanguageReward,
    OverlongReward,
    R1FormatReward,
    RepetitionReward,
)
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


def _answer(component: AnswerComponent, run: Surroundings) -> Reward:
    verifier = AnswerVerifier(
        run.reward.num_workers,
        run.reward.time_limit_s,
        component.extraction,
        numeric_tolerance=component.numeric_tolerance,
    )
    return AnswerReward(verifier, component.correct, component.incorrect)


def _function(component: FunctionComponent, run: Surroundings) -> Reward:
    return FunctionReward(
        component.path,
        settings=component.model_dump(mode="json")["settings"],
        num_workers=run.reward.num_workers,
        time_limit_s=run.reward.call_time_limit_s,
        memory_limit_mib=run.reward.memory_limit_mib,
        max_responses=run.reward.call_responses,
        retries=run.reward.retries,
    )


_MAKERS: Mapping[type[ComponentConfig], Callable[[Any, Surroundings], Reward]] = {
    AnswerComponent: _answer,
    CoinComponent: lambda component, run: CoinReward(run.seed, component.correct, component.incorrect),
    EnvironmentComponent: lambda component, run: EnvironmentReward(),
    R1FormatComponent: lambda component, run: R1FormatReward(),
    LanguageComponent: lambda component, run: LanguageReward(component.language),
    RepetitionComponent: lambda component, run: RepetitionReward(component.ngram_tokens),
    LengthDapoComponent: lambda component, run: OverlongReward(run.max_response_tokens, component.cache_tokens),
    FunctionComponent: _function,
    RemoteComponent: lambda component, run: RemoteReward(EndpointSettings.of(component), component.batch_size),
    JudgeComponent: lambda component, run: JudgeReward(component),
    CodeComponent: lambda component, run: CodeReward(component),
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
    components = [
        WeightedReward(part.label, part.weight, _MAKERS[type(part)](part, run), part.shapes_length)
        for part in reward.parts
        if not isinstance(part, LengthKimiComponent) and (part.is_local or not only_local)
    ]
    return ComposedReward(components, reward.deciding)
