"""What the policy acts in."""

import shlex
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from dapo_mega.algorithms.own import OwnCode
from dapo_mega.config.base import FREE, Section
from dapo_mega.config.paths import LocalPath
from dapo_mega.declared import FunctionPath, FunctionPathOrNone
from dapo_mega.errors import InputError


class SingleTurnEnvironment(Section):
    """One answer to each prompt."""

    kind: Literal["single_turn"] = "single_turn"


class InTurns(Section):
    """What an environment has in which the policy takes turns."""

    max_turns: int = Field(default=8, ge=1)
    """Turns of the policy in a trajectory at most."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Longest turn of the policy in tokens; null: what is left of the trajectory."""
    max_observation_tokens: int = Field(default=256, ge=1)
    """A longer observation in tokens is not added: it ends the trajectory."""
    dialogue: Literal["auto", "renderers"] = "auto"
    """How turns become tokens. auto: by the tokenizer's chat template where the data have chat_template=true, else as
    bare text; renderers: by the library renderers, which knows more models' calls."""
    retries: int = Field(default=2, ge=0, json_schema_extra=FREE)
    """How often the environment of a trajectory that failed is made again where it stopped, from its snapshot or by the
    turns so far. Then the group is dropped."""
    max_failed_share: float = Field(default=0.1, ge=0, le=1, json_schema_extra=FREE)
    """The run ends when more than this share of a step's trajectories failed by their environments."""

    @property
    def title(self) -> str:
        """What the environment is called in messages."""
        raise NotImplementedError

    def unusable(self, problem: object) -> InputError:
        """The error of an environment that cannot be used."""
        return InputError(f"environment: {self.title}: {problem}")


class OwnEnvironment(OwnCode, InTurns):
    """An environment of your own: what makes an object for every trajectory, with the methods `reset(task, seed)` and
    `step(action)`, both of which return an observation, and perhaps `close()`, `snapshot()` and `restore(state)`."""

    path: FunctionPath
    """FILE.py:NAME, relative to this file, or package.module:NAME, of a class or a function, which is called with the
    settings in a process of its own."""
    history: Literal["sampled", "template"] = "sampled"
    """What a turn sees of the turns before it. sampled: their tokens, with all that was thought; template: what the
    chat template writes of them. Where that is not what was sampled, as where it strips earlier thinking, the turn
    begins a new sample of the trajectory, with all of its prompt."""
    trajectory_limit_s: float | None = Field(default=None, gt=0, json_schema_extra=FREE)
    """A trajectory that is older than so many seconds ends with its turn; null: none does."""
    num_workers: int = Field(default=2, ge=1, json_schema_extra=FREE)
    """Processes that environments live in, many in each."""
    time_limit_s: float = Field(default=60.0, gt=0, json_schema_extra=FREE)
    """Longest call of an environment in seconds."""
    memory_limit_mib: int = Field(default=4096, ge=64, json_schema_extra=FREE)
    """MiB that a process may use beyond what it imports."""
    key: ClassVar[str] = "environment"

    @property
    def title(self) -> str:
        return self.path or self.kind

    @property
    def source(self) -> dict[str, Any]:
        """What the processes are told of what to make: `path` is called with the settings, and what `tools` names."""
        return {"path": self.path, "settings": self.settings, "tools": None}

    def try_out(self, group_size: int) -> None:
        """Nothing: it is tried in a process of its own, with a row of the data."""


class ToolsEnvironment(OwnEnvironment):
    """Tools that the policy calls, until it takes a turn without a call: functions of your own, the public methods of a
    class, and built-in ones."""

    kind: Literal["tools"] = "tools"  # type: ignore[assignment]
    """tools: functions that the policy calls."""
    path: FunctionPathOrNone = None  # type: ignore[assignment]
    """FILE.py:NAME, relative to this file, or package.module:NAME, of a function, a list of functions, or a class,
    which is made with the settings for every trajectory; null: built-in tools alone."""
    built_in: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Tools of the package with their settings: calculator, and python (time_limit_s, memory_limit_mib, modules), which
    runs programs in a sandbox."""
    max_unreadable: int = Field(default=3, ge=1)
    """Turns in a row of which no call could be read that end a trajectory."""
    max_result_characters: int = Field(default=4000, ge=100)
    """A longer result of a tool is cut in its middle."""

    @property
    def source(self) -> dict[str, Any]:
        settings = self.model_dump(include={"settings", "built_in", "max_unreadable", "max_result_characters"})
        return {"path": "dapo_mega.environments.tools:ToolEnvironment", "settings": settings, "tools": self.path}


class ProgramEnvironment(InTurns):
    """A program of your own for every trajectory, which asks the policy as it would ask OpenAI, at OPENAI_BASE_URL with
    OPENAI_API_KEY. DAPO_MEGA_TASK is its row as JSON, or a file with it, DAPO_MEGA_SEED the seed of its group, and what
    it posts to DAPO_MEGA_REWARD_URL its reward."""

    kind: Literal["program"] = "program"
    """program: agents that are programs."""
    command: str
    """The command, without a shell, such as python my_agent.py. It ends with exit status 0, or else the trajectory has
    failed."""
    folder: LocalPath = "."
    """Its working folder, relative to this file; else this file's."""
    max_observation_tokens: int = Field(default=4096, ge=1)
    """More tokens of messages than these behind a turn end the trajectory."""
    program_limit_s: float = Field(default=600.0, gt=0, json_schema_extra=FREE)
    """Seconds that a program may take, without those in which it waits for the policy."""
    memory_limit_mib: int | None = Field(default=4096, ge=64, json_schema_extra=FREE)
    """MiB of address space of each of its processes; null: no limit, as programs for Node.js need it."""
    max_programs: int = Field(default=64, ge=1, json_schema_extra=FREE)
    """Programs that run at a time at most."""
    retries: int = Field(default=2, ge=0, json_schema_extra=FREE)
    """How often one that failed is started anew, to go on where it was; then its group is dropped."""
    host: str = Field(default="127.0.0.1", json_schema_extra=FREE)
    """Address that the endpoint listens at. Who reaches it needs a key of a program that runs."""
    port: int = Field(default=0, ge=0, le=65535, json_schema_extra=FREE)
    """Port of the endpoint; 0: any free one."""

    key: ClassVar[str] = "environment"

    @field_validator("command")
    @classmethod
    def _can_be_split(cls, command: str) -> str:
        if not shlex.split(command):
            raise ValueError("it is empty; give a program and its arguments")
        return command

    @property
    def title(self) -> str:
        return self.command


EnvironmentChoice = SingleTurnEnvironment | OwnEnvironment | ToolsEnvironment | ProgramEnvironment
