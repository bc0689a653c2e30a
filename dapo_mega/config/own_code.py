"""Code of the user's own where the configuration offers a choice: `{kind: function, path: my_loss.py:tanh}`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from dapo_mega.config.base import Section
from dapo_mega.config.paths import FunctionPath

NAME_TAG, CODE_TAG = "<name>", "<function>"
"""What pydantic puts into the place of an error, which no file has as a key."""


def checked_function(given: str | None) -> str | None:
    """`given`. Raises ValueError unless it names a function of a file or of a module."""
    if given is None:
        return None
    place, colon, name = given.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ValueError(f"function {given!r} must be FILE.py:NAME or package.module:NAME, such as my_code.py:score")
    if not place.endswith(".py") and ("/" in place or not all(part.isidentifier() for part in place.split("."))):
        raise ValueError(
            f"function {given!r} names neither a file that ends in .py nor a module; give FILE.py:NAME or "
            f"package.module:NAME"
        )
    return given


class OwnCode(Section):
    """A function of your own in place of a built-in choice."""

    kind: Literal["function"] = Field(default="function", description="function: code of your own.")
    path: Annotated[FunctionPath, AfterValidator(checked_function)] = Field(
        description="FILE.py:NAME, relative to this file, or package.module:NAME. Every trainer process loads it."
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the function, beside what it is given."
    )


class OwnLoss(OwnCode):
    """A policy loss of your own, with these keys besides those of `algorithm.advantage`. It is given `LossInputs` and
    returns the loss of every token [T]."""

    whole_responses: bool = Field(
        default=False,
        description="Also give it sums of log-ratios over whole responses (tokens.of_responses).",
    )
    depends_on_split: bool = Field(
        default=False,
        description="A token's loss may depend on which other tokens are in its micro-batch. false: such a loss is "
        "refused, because its gradient would change with the layout and with batch.tokens_per_microbatch.",
    )


def shown(choice: str | OwnCode) -> str:
    """A choice in a message: its name, or what stands for it."""
    return choice.path if isinstance(choice, OwnCode) else choice


def _tag(given: Any) -> str:
    return NAME_TAG if isinstance(given, str) else CODE_TAG


BY_NAME_OR_CODE = Discriminator(_tag)
ByName = Tag(NAME_TAG)
ByCode = Tag(CODE_TAG)
