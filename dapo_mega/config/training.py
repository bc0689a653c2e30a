"""The keys that every training run has, whatever its loss."""

from typing import Self

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE, Section
from dapo_mega.config.checkpoint import CheckpointConfig
from dapo_mega.config.compute import ComputeConfig
from dapo_mega.config.lora import LoraConfig
from dapo_mega.config.model import ModelConfig
from dapo_mega.config.optimizer import OptimizerConfig
from dapo_mega.config.parallel import ParallelConfig
from dapo_mega.config.paths import OutputPath
from dapo_mega.config.tracking import TrackingConfig


class TrainingConfig(Section):
    """What DAPO and supervised training share: where, how long, which model, and how it is spread over processes."""

    output_dir: OutputPath = Field(json_schema_extra=FREE)
    """Folder for checkpoints, metrics and the trained model. All machines of the trainer must see it."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all random numbers: data order and sampling."""
    num_steps: int = Field(ge=1, json_schema_extra=FREE)
    """Steps of the run. A step of DAPO generates, scores and updates; one of supervised training is an update. Raise it
    to train a finished run further (only with optimizer.schedule=constant)."""
    threads_per_process: int | None = Field(default=None, ge=1, json_schema_extra=FREE)
    """CPU threads of torch in each process; null: torch's choice. Set it where processes share few cores."""
    silence_limit_s: float = Field(default=60.0, ge=5, json_schema_extra=FREE)
    """Seconds without a sign of life after which another machine of the trainer, or its controller's, counts as gone
    and the others end, to be started again."""
    model: ModelConfig
    parallel: ParallelConfig = Field(default=ParallelConfig(), json_schema_extra=FREE)
    compute: ComputeConfig = ComputeConfig()
    lora: LoraConfig | None = None
    """Low-rank adapters, which are trained in place of the weights. null: none."""
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), json_schema_extra=FREE)
    tracking: TrackingConfig = Field(default=TrackingConfig(), json_schema_extra=FREE)

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora and self.model.train_mtp:
            raise ValueError("lora trains no layers of multi-token prediction; set model.train_mtp=false")
        if self.lora and self.compute.moe.router_bias_update_rate > 0:
            raise ValueError(
                "lora trains no routing bias, which compute.moe.router_bias_update_rate > 0 asks for; set it to 0"
            )
        return self
