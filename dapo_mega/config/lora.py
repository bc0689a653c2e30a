"""Low-rank adapters (LoRA)."""

from typing import Any, Literal

from pydantic import Field, field_validator

from dapo_mega.config.base import FREE, Section
from dapo_mega.config.paths import LocalPathOrNone

ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    """Trains, in place of the weights W of the policy and of a critic, matrices A and B beside them: W + alpha / rank B
    A (LoRA, arXiv 2106.09685); a critic's head learns too. The reference of a KL penalty is the policy without them."""

    rank: int = Field(default=32, ge=1)
    """Rows of A, columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """The product B A is scaled by alpha / rank."""
    targets: tuple[str, ...] = Field(default=(ALL_LINEAR,), min_length=1)
    """The layers that get adapters, by the ends of their Hugging Face names, as peft's target_modules: [q_proj,
    v_proj]. [all-linear]: all linear layers of attention, MLPs and experts; never embeddings, output layer and
    routers."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of A's inputs that are set to 0 while an update is computed."""
    path: LocalPathOrNone = Field(default=None, json_schema_extra=FREE)
    """Folder with an adapter of model.path that training starts from, in peft's format. rank, alpha and targets must be
    its own. null, and a critic always: A is random and B is 0."""

    send: Literal["merged", "adapters"] = Field(default="merged", json_schema_extra=FREE)
    """What engines of a fleet get. merged: all of W + alpha / rank B A at each update; adapters: W once, then A and B
    only, for engines started with --lora-rank. Engines inside the trainer get merged weights in either case."""

    @field_validator("targets", mode="before")
    @classmethod
    def _split(cls, targets: Any) -> Any:
        return tuple(targets.split(",")) if isinstance(targets, str) else targets
