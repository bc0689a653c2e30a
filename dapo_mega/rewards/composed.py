"""The reward of a run: a weighted sum of components, one of which may decide correctness."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dapo_mega.rewards.budget import Budgeted
from dapo_mega.rewards.records import Reward, RewardRecord, Score, ScoringFailure


@dataclass(frozen=True)
class WeightedReward:
    """One component. `shapes_length`: it only shapes the lengths of responses, and has no say in dynamic sampling."""

    name: str
    weight: float
    reward: Reward
    shapes_length: bool = False


@dataclass(frozen=True)
class ComposedScore:
    """The reward of one response: `score` without and `reward` with the components that shape lengths.

    `parts` are the values of all components by name, before their weights, with the parts that they name themselves:
    as component.part where several components score what is said, or where a component has that name.
    """

    score: float
    reward: float
    correct: bool | None
    parts: Mapping[str, float]
    answer: str | None = None
    outcome: str = ""


class ComposedReward:
    """Scores responses with all components, at the same time where there are several. `close` closes them all.

    `deciding` names the component whose verdict is the response's; None: there is none. A response that one component
    could not score has no reward.
    """

    def __init__(self, components: Sequence[WeightedReward], deciding: str | None) -> None:
        self.components = tuple(components)
        self.deciding = deciding
        self._names = {component.name for component in self.components}
        self._has_one = sum(not component.shapes_length for component in self.components) == 1

    def begin_step(self) -> None:
        """What slow answers may cost in all is there again, for all calls of `score` up to the next step."""
        for component in self.components:
            if isinstance(component.reward, Budgeted):
                component.reward.budget.begin_step()

    def score(self, records: Sequence[RewardRecord]) -> list[ComposedScore | ScoringFailure]:
        """One result per record, in order. Raises what a component raises."""
        if len(self.components) == 1:
            by_component = [self.components[0].reward.score(records)]
        else:
            with ThreadPoolExecutor(len(self.components)) as threads:
                by_component = list(threads.map(lambda each: each.reward.score(records), self.components))
        return [self._sum(scores) for scores in zip(*by_component, strict=True)]

    def _sum(self, scores: Sequence[Score | ScoringFailure]) -> ComposedScore | ScoringFailure:
        total = shaping = 0.0
        verdict: Score | None = None
        parts: dict[str, float] = {}
        for component, score in zip(self.components, scores, strict=True):
            if isinstance(score, ScoringFailure):
                return ScoringFailure(f"{component.name}: {score.reason}", score.detail)
            value = component.weight * score.value
            if component.shapes_length:
                shaping += value
            else:
                total += value
            if component.name == self.deciding:
                verdict = score
            parts[component.name] = score.value
            for name, part in score.parts.items():
                stands_alone = self._has_one and name not in self._names
                parts[name if stands_alone else f"{component.name}.{name}"] = part
        if verdict is None:
            return ComposedScore(total, total + shaping, None, parts)
        return ComposedScore(total, total + shaping, verdict.correct, parts, verdict.answer, verdict.outcome)

    def close(self) -> None:
        for component in self.components:
            component.reward.close()
