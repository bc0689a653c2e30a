"""What all components of a reward have in common."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from dapo_mega.config.base import Section

CorrectnessOf = Literal["always", "maybe", "never"]
"""Whether a kind of reward says of a response that it is correct."""


class ComponentConfig(Section):
    """Keys of every component of `reward.components`."""

    kind: str
    weight: float = 1.0
    """What its value is multiplied by in the sum that is the reward; 0: it is only logged. A negative weight makes a
    penalty, of kinds function, judge and remote only."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]*$")
    """Its name in metrics (reward/part_<name>) and in reward.correct_from; null: its kind."""

    gives_correctness: ClassVar[CorrectnessOf] = "never"
    reads_answers: ClassVar[bool] = False
    """Whether it says which answer a response gave, so that answers can vote."""
    shapes_length: ClassVar[bool] = False
    """Whether it only shapes the lengths of responses, and so has no say in dynamic sampling."""
    is_local: ClassVar[bool] = True
    """Whether it works without a network, so that a dry run can try it."""

    may_be_penalty: ClassVar[bool] = False
    """Whether the run decides what its value means, and so whether it is wanted or not."""

    @model_validator(mode="after")
    def _check_weight(self) -> Self:
        if self.weight < 0 and not self.may_be_penalty:
            raise ValueError(
                f"weight={self.weight:g} would train against {self.kind}; give 0 or more (a negative weight is for "
                f"kinds function, judge and remote that measure what is unwanted)"
            )
        return self

    @property
    def label(self) -> str:
        """The name under which it is logged."""
        return self.name or self.kind
