"""A reward function of the user's own."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dapo_mega.config.components.base import ComponentConfig, CorrectnessOf
from dapo_mega.declared import FunctionPath


class FunctionComponent(ComponentConfig):
    """A function of your own in a file or an installed module. It says what it scores, and may say what is correct."""

    kind: Literal["function"] = "function"
    path: FunctionPath = Field(description="As reward.function.")

    gives_correctness: ClassVar[CorrectnessOf] = "maybe"
    may_be_penalty: ClassVar[bool] = True
