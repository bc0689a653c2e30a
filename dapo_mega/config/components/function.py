"""A reward function of the user's own."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from dapo_mega.config.components.base import ComponentConfig, CorrectnessOf
from dapo_mega.declared import FunctionPath


class FunctionComponent(ComponentConfig):
    """A function of your own in a file or an installed module. It says what it scores, and may say what is correct."""

    kind: Literal["function"] = "function"
    path: FunctionPath
    """As reward.function. A class is made once in each process, and then called."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, beside the records."""

    gives_correctness: ClassVar[CorrectnessOf] = "maybe"
    may_be_penalty: ClassVar[bool] = True
