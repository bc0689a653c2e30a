"""A reward function of the user's own."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from dapo_mega.config.base import beside_run_file
from dapo_mega.config.components.base import ComponentConfig, CorrectnessOf


def function_path(given: str, info: ValidationInfo) -> str:
    """`given` with the path that its file has from the working directory. Raises ValueError for another form."""
    place, colon, name = given.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ValueError(
            f"reward function {given!r} must be FILE.py:NAME or package.module:NAME, such as my_reward.py:score"
        )
    if place.endswith(".py"):
        return f"{beside_run_file(place, info)}:{name}"
    if "/" in place or not all(part.isidentifier() for part in place.split(".")):
        raise ValueError(
            f"reward function {given!r} names neither a file that ends in .py nor a module; give FILE.py:NAME or "
            f"package.module:NAME"
        )
    return given


class FunctionComponent(ComponentConfig):
    """A function of your own in a file or an installed module. It says what it scores, and may say what is correct."""

    kind: Literal["function"] = "function"
    path: str = Field(description="As reward.function.")

    gives_correctness: ClassVar[CorrectnessOf] = "maybe"
    may_be_penalty: ClassVar[bool] = True

    @field_validator("path")
    @classmethod
    def _check_path(cls, given: str, info: ValidationInfo) -> str:
        return function_path(given, info)
