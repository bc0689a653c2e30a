"""Which policy to train."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dapo_mega.config.base import FREE, Section


class ModelConfig(Section):
    """Which policy to train."""

    path: str = Field(
        json_schema_extra=FREE,
        description="Folder with a Hugging Face checkpoint: config.json, *.safetensors, tokenizer.",
    )
    architecture: str | None = Field(
        json_schema_extra=FREE,
        default=None,
        description="A config.json to check sizes with if model.path is not on this machine (--dry-run).",
    )
    dtype: Literal["fp32", "bf16"] = "bf16"
    layer_implementation: Literal["auto", "local", "transformer_engine"] = Field(
        default="auto", description="auto: Transformer Engine if it is installed and there is a GPU, else local layers."
    )
