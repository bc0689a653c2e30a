"""What the policy acts in."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from dapo_mega.algorithms.own import OwnCode
from dapo_mega.config.base import Section

EARNED: tuple[str, ...] = ("reward", "correct")
"""What an environment may say of a turn, beside its named parts."""


class SingleTurnEnvironment(Section):
    """One answer to each prompt."""

    kind: Literal["single_turn"] = "single_turn"


class OwnEnvironment(OwnCode):
    """An environment of your own: a class that is made once for every trajectory, with the methods `reset(task, seed)`
    and `step(action)`, both of which return an observation, and perhaps `close()`."""

    max_turns: int = Field(default=8, ge=1, description="Turns of the policy in a trajectory at most.")
    max_turn_tokens: int | None = Field(
        default=None, ge=1, description="Longest turn of the policy in tokens; null: what is left of the trajectory."
    )
    max_observation_tokens: int = Field(
        default=256, ge=1, description="A longer observation in tokens is not added: it ends the trajectory."
    )

    key: ClassVar[str] = "environment"

    def make(self) -> Any:
        """A new environment. Raises InputError if there is none of this name, or if it cannot be made."""
        return self.call()

    def try_out(self, group_size: int) -> None:
        """Make one, begin it and take one turn. Raises InputError if that cannot be done."""
        environment = self.make()
        task = {"prompt": "1 + 1 =", "messages": (), "ground_truth": "2", "data_source": "", "fields": {}}
        self.observed(environment, "reset", task, 0)
        self.observed(environment, "step", {"text": "2", "finish_reason": "stop", "turn": 0, "token_ids": [2]})
        self.closed(environment)

    def observed(self, environment: Any, method: str, *arguments: Any) -> dict[str, Any]:
        """What the method returns as an observation, with all its keys: text, done, reward, correct and parts. Raises
        InputError if it raises, or returns something else."""
        where = f"its method {method}"
        try:
            given = getattr(environment, method)(*arguments)
        except Exception as error:
            raise self.raised(where, error) from error
        given = {} if given is None else given
        usual = {"text": "", "done": False, "reward": None, "correct": None, "parts": {}}
        if not isinstance(given, dict) or (unknown := given.keys() - usual.keys()):
            raise self.unusable(
                f"{where} returned {given!r:.200}; give a dict with any of {', '.join(usual)}"
                + (f", not {sorted(map(str, unknown))[0]!r}" if isinstance(given, dict) else "")
            )
        found = {**usual, **given}
        numbers = [*found["parts"].values()] if isinstance(found["parts"], dict) else [None]
        numbers += [] if found["reward"] is None else [found["reward"]]
        is_right = isinstance(found["text"], str) and isinstance(found["done"], bool)
        if not is_right or found["correct"] not in (None, True, False) or not all(map(_is_number, numbers)):
            raise self.unusable(
                f"{where} returned {given!r:.200}; text is a str, done a bool, reward a finite number or None, correct "
                f"a bool or None, and parts a dict of finite numbers by names"
            )
        if clashing := found["parts"].keys() & {*EARNED}:
            raise self.unusable(f"{where} returned a part called {sorted(clashing)[0]!r}; give it another name")
        return found

    def closed(self, environment: Any) -> None:
        """Close it, if it can be closed. Raises InputError if that raises."""
        close = getattr(environment, "close", None)
        if close is not None:
            try:
                close()
            except Exception as error:
                raise self.raised("its method close", error) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e30  # Neither NaN nor infinite.


EnvironmentChoice = SingleTurnEnvironment | OwnEnvironment
