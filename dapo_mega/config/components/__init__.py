"""The kinds of reward that `reward.components` combines, one section each, told apart by `kind`.

A new kind: a section with a `kind` of its own here, a line in `Component`, and its maker in `dapo_mega.rewards.build`.
"""

from typing import Annotated, get_args

from pydantic import Field

from dapo_mega.config.components.base import ComponentConfig, CorrectnessOf
from dapo_mega.config.components.built_in import (
    AnswerComponent,
    CoinComponent,
    EnvironmentComponent,
    LanguageComponent,
    LengthDapoComponent,
    LengthKimiComponent,
    R1FormatComponent,
    RepetitionComponent,
)
from dapo_mega.config.components.code import CodeComponent, FunctionComponent
from dapo_mega.config.components.servers import JudgeComponent, RemoteComponent, ServerComponent

Component = Annotated[
    AnswerComponent | R1FormatComponent | LanguageComponent | RepetitionComponent | LengthDapoComponent
    | LengthKimiComponent | FunctionComponent | EnvironmentComponent | JudgeComponent | RemoteComponent | CodeComponent,
    Field(discriminator="kind"),
]  # fmt: skip
"""One component of a reward, of any kind."""

KINDS: dict[str, type[ComponentConfig]] = {
    kind.model_fields["kind"].default: kind for kind in get_args(get_args(Component)[0])
}
"""Every section of a component by its kind."""
