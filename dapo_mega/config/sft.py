"""A whole run of supervised fine-tuning."""

from __future__ import annotations

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE, Section
from dapo_mega.config.checkpoint import CheckpointConfig
from dapo_mega.config.compute import ComputeConfig, check_precision
from dapo_mega.config.data import SftDataConfig
from dapo_mega.config.model import ModelConfig
from dapo_mega.config.optimizer import OptimizerConfig
from dapo_mega.config.parallel import ParallelConfig


class SftConfig(Section):
    """Supervised fine-tuning (R1's cold start) with the same policy code."""

    output_dir: str = Field(
        json_schema_extra=FREE,
        description="Folder for metrics, checkpoints and the trained model (hf). All machines of the trainer must see "
        "it.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the order of demonstrations.")
    num_steps: int = Field(json_schema_extra=FREE, ge=1, description="Optimizer updates of the run.")
    batch_samples: int = Field(default=256, ge=1, description="Demonstrations per optimizer update.")
    tokens_per_microbatch: int = Field(
        json_schema_extra=FREE,
        default=8192,
        ge=1,
        description="Tokens of a micro-batch at most; at least data.max_tokens. Lower it when out of memory, raise it "
        "for speed.",
    )
    threads_per_process: int | None = Field(
        json_schema_extra=FREE,
        default=None,
        ge=1,
        description="CPU threads of torch in each process; null: torch's choice. Set it where processes share few "
        "cores.",
    )
    model: ModelConfig
    data: SftDataConfig
    parallel: ParallelConfig = Field(default=ParallelConfig(), json_schema_extra=FREE)
    compute: ComputeConfig = ComputeConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    checkpoint: CheckpointConfig = Field(json_schema_extra=FREE, default=CheckpointConfig())

    @model_validator(mode="after")
    def _check(self) -> SftConfig:
        check_precision(self.model, self.compute)
        if self.tokens_per_microbatch < self.data.max_tokens:
            raise ValueError(
                f"tokens_per_microbatch={self.tokens_per_microbatch} is smaller than data.max_tokens="
                f"{self.data.max_tokens}; set it to at least that"
            )
        return self
