"""Which policy to train."""

from typing import Literal

from pydantic import Field

from dapo_mega.config.base import FREE, Section
from dapo_mega.config.paths import LocalPath, LocalPathOrNone


class ModelConfig(Section):
    """Which policy to train."""

    path: LocalPath = Field(json_schema_extra=FREE)
    """Folder with a Hugging Face checkpoint: config.json, *.safetensors, tokenizer. Training starts from it."""
    architecture: LocalPathOrNone = Field(default=None, json_schema_extra=FREE)
    """A config.json with the model's sizes, for --dry-run and plan_run where model.path is not on this machine.
    Training does not read it."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Number format of weights and activations; the optimizer keeps fp32. fp32 for CPUs and comparisons."""
    train_mtp: bool = False
    """Train the checkpoint's layer of multi-token prediction beside the policy, which learns as it does without."""
    layer_implementation: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers of the policy. local: Megatron's in torch; transformer_engine: for GPUs; auto: Transformer Engine if it is
    installed and there is a GPU, else local."""
