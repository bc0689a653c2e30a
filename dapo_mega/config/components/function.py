"""A reward function of the user's own."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from dapo_mega.config.components.base import ComponentConfig, CorrectnessOf
from dapo_mega.config.paths import FunctionPath


def checked_function(given: str | None) -> str | None:
    """`given`. Raises ValueError unless it names a function of a file or of a module."""
    if given is None:
        return None
    place, colon, name = given.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ValueError(
            f"reward function {given!r} must be FILE.py:NAME or package.module:NAME, such as my_reward.py:score"
        )
    if not place.endswith(".py") and ("/" in place or not all(part.isidentifier() for part in place.split("."))):
        raise ValueError(
            f"reward function {given!r} names neither a file that ends in .py nor a module; give FILE.py:NAME or "
            f"package.module:NAME"
        )
    return given


class FunctionComponent(ComponentConfig):
    """A function of your own in a file or an installed module. It says what it scores, and may say what is correct."""

    kind: Literal["function"] = "function"
    path: Annotated[FunctionPath, AfterValidator(checked_function)] = Field(description="As reward.function.")

    gives_correctness: ClassVar[CorrectnessOf] = "maybe"
    may_be_penalty: ClassVar[bool] = True
