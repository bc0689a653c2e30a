"""On-policy distillation: a teacher scores the tokens that the policy sampled, or says what it would have sampled."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE, Section
from dapo_mega.config.components.servers import ServerKeys
from dapo_mega.config.paths import LocalPathOrNone

DEFAULT_TEACHER = "default"


class TeacherConfig(ServerKeys):
    """A frozen model with the policy's tokens: a folder (`path`), which the trainer loads beside the policy, or SGLang
    servers (`urls`)."""

    path: LocalPathOrNone = None
    """Folder with the model, of any supported family and size. It is laid out, packed and computed like the policy."""
    urls: tuple[str, ...] = Field(default=(), json_schema_extra=FREE)
    """Equal SGLang servers of the teacher that also serve text (launch/serve_rollouts.py --with-text). A request goes
    to the one with least to do, and to another one if it fails."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.path) == bool(self.urls):
            raise ValueError("a teacher has either path, a folder, or urls, SGLang servers; give one of them")
        return self


class DistillationConfig(Section):
    """On-policy distillation: each token's advantage is reward_weight x that of algorithm.advantage + coefficient x
    (log p_teacher - log p_policy), with the weights that the step starts from. Its gradient is that of the reverse KL
    KL(policy || teacher) of each token, given those before it
    ([Thinking Machines, 2025](https://thinkingmachines.ai/blog/on-policy-distillation/)). With top_k the loss has that
    KL itself, over the teacher's most probable tokens."""

    teachers: dict[str, TeacherConfig] = Field(min_length=1)
    """Teachers by the data_source of prompts; the one called default is for all other prompts. Several may be the same
    model."""
    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the teacher: what 1 nat is worth in units of advantage."""
    top_k: int = Field(default=0, ge=0)
    """The teacher's most probable tokens that each response token's KL is taken over, with all others as one; at most
    the vocabulary. 0: the sampled token stands for all."""
    reward_weight: float = Field(default=0.0, ge=0)
    """Weight of the reward's advantage. 0: the teacher alone decides; then algorithm.dynamic_sampling is false and
    algorithm.advantage is reward, unless the file says otherwise."""

    @property
    def listed(self) -> tuple[TeacherConfig, ...]:
        """Each teacher once, in the order of the file; samples name them by their number."""
        return tuple({teacher.model_dump_json(): teacher for teacher in self.teachers.values()}.values())

    def number_of(self, data_source: str) -> int:
        """The number in `listed` of the teacher of a prompt's source; -1 if it has none."""
        found = self.teachers.get(data_source, self.teachers.get(DEFAULT_TEACHER))
        return -1 if found is None else self.listed.index(found)


def without_reward(raw: Mapping[str, Any]) -> bool:
    """Whether the values of a run, as a file gives them, let the teacher alone decide."""
    given = raw.get("distillation")
    return isinstance(given, Mapping) and not given.get("reward_weight")
