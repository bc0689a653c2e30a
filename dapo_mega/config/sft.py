"""A whole run of supervised fine-tuning."""

from typing import Self

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE
from dapo_mega.config.compute import check_precision
from dapo_mega.config.data import SftDataConfig
from dapo_mega.config.optimizer import OptimizerConfig
from dapo_mega.config.training import TrainingConfig


class SftConfig(TrainingConfig):
    """Supervised fine-tuning (R1's cold start) with the same policy code."""

    batch_samples: int = Field(default=256, ge=1)
    """Demonstrations per optimizer update."""
    tokens_per_microbatch: int = Field(default=8192, ge=1, json_schema_extra=FREE)
    """Tokens of a micro-batch at most; at least data.max_tokens. Lower it when out of memory, raise it for speed."""
    data: SftDataConfig
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_precision(self.model, self.compute)
        if self.tokens_per_microbatch < self.data.max_tokens:
            raise ValueError(
                f"tokens_per_microbatch={self.tokens_per_microbatch} is smaller than data.max_tokens="
                f"{self.data.max_tokens}; set it to at least that"
            )
        return self
