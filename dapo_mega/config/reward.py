"""The reward of a response."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dapo_mega.config import components as kinds
from dapo_mega.config.base import FREE, Section
from dapo_mega.config.components.built_in import Extraction, check_phase_in, check_values
from dapo_mega.declared import FunctionPathOrNone


class RewardConfig(Section):
    """The reward: by default rule reward and overlong shaping (DAPO section 2.4, 3.4); a function of your own, or a
    weighted sum of components, takes the place of the rule."""

    function: FunctionPathOrNone = Field(default=None, json_schema_extra=FREE)
    """A reward function of your own in place of the rule: FILE.py:NAME or package.module:NAME. It takes a list of
    records and returns a score for each."""
    components: tuple[kinds.Component, ...] = ()
    """Rewards whose weighted sum takes the place of the rule: a list of {kind, weight, name, ...}; kinds and their keys
    are below."""
    correct_from: str | None = None
    """Name of the component that decides which responses are correct. null: the only one that always does (answer), or
    else the only one that can."""
    source: Literal["verifier", "random"] = "verifier"
    """What judges a response. verifier: compares its answer with the ground truth; random: a fair coin, a control that
    must not learn; set overlong_punishment=false, as the punished length would be. Without function and components
    only, as the next four."""
    extraction: Extraction = "dapo"
    r"""Where a response's answer is. dapo: last 'Answer: ...' of its last 300 characters; boxed: last \boxed{}; r1:
    last <answer></answer>; gsm8k: after the last ####; auto: whatever a response without a format states last; none:
    the whole response. It must be what data.*.template asks for."""
    numeric_tolerance: float = Field(default=0.0, ge=0, lt=1)
    """Numbers count as equal that differ from the right one by at most this share of it; 0: exactly. 0.01 is usual for
    science, where answers are rounded."""
    correct: float = 1.0
    """Reward of a right answer; larger than incorrect."""
    incorrect: float = -1.0
    """Reward of a wrong or missing answer."""
    overlong_punishment: bool = True
    """Take up to 1 off the reward of a response that comes close to rollout.max_response_tokens. Switch it off for
    plain GRPO. With function or components it is off unless given."""
    overlong_cache_tokens: int = Field(default=4096, ge=1)
    """The punishment grows from 0 to 1 over the last this many tokens before max_response_tokens, which it must not
    exceed. A fifth of max_response_tokens is usual."""
    overlong_filtering: bool = False
    """Leave truncated responses out of the loss. They still count in their group."""
    length_weight: float = Field(default=0.0, ge=0)
    """Weight of Kimi k1.5's length reward, which compares the responses of a group: up to half of it more for short
    right answers, up to half of it less for long ones. 0: off."""
    length_phase_in: tuple[int, int] = (0, 0)
    """[first, last]: the length reward's weight grows from 0 at the first of these steps to length_weight at the last.
    Right answers first, then short ones."""
    num_workers: int = Field(default=2, ge=1, json_schema_extra=FREE)
    """Processes that compare answers by computer algebra, and as many that call a reward function. Raise it if
    reward/num_timeout grows."""
    time_limit_s: float = Field(default=5.0, gt=0)
    """Processor time of one comparison in seconds; the answer counts as wrong after that. All of a step that exceed it
    may cost three such limits for each process."""
    call_time_limit_s: float = Field(default=60.0, gt=0, json_schema_extra=FREE)
    """Seconds one call of a reward function may take; its process is ended after that."""
    call_responses: int = Field(default=64, ge=1, json_schema_extra=FREE)
    """Responses that a reward function gets in one call, at most."""
    memory_limit_mib: int = Field(default=4096, ge=64, json_schema_extra=FREE)
    """MiB that a process of a reward function may take on top of what it has when the function is imported."""
    retries: int = Field(default=2, ge=0, json_schema_extra=FREE)
    """Further attempts at responses that a reward failed to score. A reward function is then called for each of them
    alone. A response that stays without a score drops its group."""
    max_failed_share: float = Field(default=0.1, ge=0, le=1, json_schema_extra=FREE)
    """The run ends when more than this share of a step's responses could not be scored."""

    @model_validator(mode="before")
    @classmethod
    def _keep_own_rewards_as_they_are(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and (raw.get("function") or raw.get("components")):
            return {"overlong_punishment": False, **raw}
        return raw

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_values(self.correct, self.incorrect)
        check_phase_in(self.length_phase_in)
        if self.function and self.components:
            raise ValueError(
                "reward.function and reward.components are both given; put the function into the list, as "
                f"{{kind: function, path: {self.function}}}"
            )
        if self.is_own:
            self._check_own()
        if self.deciding is None and any(isinstance(part, kinds.LengthKimiComponent) for part in self.parts):
            raise ValueError(
                "the length reward (reward.length_weight, kind length_kimi) needs to know which responses are correct, "
                "and no component decides that; add one, or leave the length reward out"
            )
        return self

    def _check_own(self) -> None:
        for key in ("source", "extraction", "numeric_tolerance", "correct", "incorrect"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"reward.{key}={getattr(self, key)} is not read with reward.function or reward.components; leave "
                    f"it out, or give a component of kind answer"
                )
        repeated = [name for name, count in Counter(part.label for part in self.parts).items() if count > 1]
        if repeated:
            raise ValueError(
                f"several components of the reward are called {repeated[0]!r}; give each a name of its own (name: ...),"
                f" and a length reward either as a component or by reward.overlong_punishment or reward.length_weight"
            )
        if all(part.shapes_length for part in self.parts):
            raise ValueError("reward.components has length rewards only; add a component that scores what is said")

    @property
    def is_own(self) -> bool:
        """Whether something else takes the place of the rule."""
        return bool(self.function or self.components)

    @property
    def parts(self) -> tuple[kinds.ComponentConfig, ...]:
        """All components of the reward, those that keys of this section stand for among them."""
        parts: list[kinds.ComponentConfig] = list(self.components)
        if self.function:
            parts = [kinds.FunctionComponent.model_construct(path=self.function)]
        elif not parts and self.source == "random":
            parts = [kinds.CoinComponent(name="answer", correct=self.correct, incorrect=self.incorrect)]
        elif not parts:
            rule = kinds.AnswerComponent(extraction=self.extraction, numeric_tolerance=self.numeric_tolerance)
            parts = [rule.model_copy(update={"correct": self.correct, "incorrect": self.incorrect})]
        if self.overlong_punishment:
            parts.append(kinds.LengthDapoComponent(cache_tokens=self.overlong_cache_tokens))
        if self.length_weight:
            parts.append(kinds.LengthKimiComponent(weight=self.length_weight, phase_in=self.length_phase_in))
        return tuple(parts)

    @property
    def answer_extraction(self) -> str | None:
        """Where the rule looks for the answer; None if the reward has no rule."""
        return next((part.extraction for part in self.parts if isinstance(part, kinds.AnswerComponent)), None)

    @property
    def deciding(self) -> str | None:
        """The name of the component that decides correctness, None if none can. Raises ValueError, for users, if it is
        not clear which."""
        always = [part.label for part in self.parts if part.gives_correctness == "always"]
        maybe = [part.label for part in self.parts if part.gives_correctness == "maybe"]
        if self.correct_from is not None:
            if self.correct_from not in always + maybe:
                can = f"choose one of {', '.join(always + maybe)}" if always + maybe else "none of them can"
                raise ValueError(
                    f"reward.correct_from={self.correct_from!r} names no component that can say which responses are "
                    f"correct; {can}"
                )
            return self.correct_from
        candidates = always or maybe
        if len(candidates) > 1:
            raise ValueError(
                f"{len(candidates)} components can say which responses are correct; set reward.correct_from to one of "
                f"{', '.join(candidates)}"
            )
        return candidates[0] if candidates else None

    def for_evaluation(self) -> Self:
        """The reward of held-out evaluations: the same, but with the verifier in place of the coin."""
        return self.model_copy(update={"source": "verifier"})
