"""The value model (critic) of PPO."""

from pydantic import Field

from dapo_mega.config.base import FREE, Section
from dapo_mega.config.paths import LocalPathOrNone


class CriticConfig(Section):
    """The value model, which only `algorithm.advantage=gae` has. It is laid out, packed and computed like the policy;
    what is not said here is as in `optimizer`. Learning rate and warm-up are those of Open-Reasoner-Zero (arXiv
    2503.24290)."""

    path: LocalPathOrNone = Field(default=None, json_schema_extra=FREE)
    """Folder with the value model that training starts from: a token classifier of transformers with one label, or a
    policy, which gets a value head of zeros. It must have the policy's tokens. null: model.path."""
    learning_rate: float = Field(default=5e-6, gt=0)
    """Learning rate after warm-up; five times the policy's suits models of 1B and more. Raise it if
    critic/explained_variance stays low, lower it if critic/grad_norm jumps."""
    warmup_steps: int = Field(default=50, ge=0)
    """Rollout steps over which the critic's learning rate rises linearly from 0."""
    pretraining_steps: int = Field(default=0, ge=0)
    """Rollout steps at the start in which only the critic learns, so that the policy's first advantages do not come
    from an untrained one."""
    value_clip: float | None = Field(default=None, gt=0)
    """The loss stops pushing a value further than this from its value at the step's start. null: no bound. Set it, to a
    fraction of the range of rewards, if values jump within a step."""
