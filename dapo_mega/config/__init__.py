"""One YAML file per run: frozen models, unknown keys refused, dotted overrides on the command line.

Every section is one part of the loop.
"""

from dapo_mega.config.base import Section, divisors
from dapo_mega.config.compute import ComputeConfig, Fp8Config, ModelConfig, MoeConfig, ParallelConfig
from dapo_mega.config.files import dump_config, load_config
from dapo_mega.config.fleet import FleetConfig, WeightSyncConfig
from dapo_mega.config.run import (
    PRESETS,
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    ColumnsConfig,
    DataConfig,
    DatasetConfig,
    EvaluationConfig,
    KlConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
    SftDataConfig,
)

__all__ = [
    "PRESETS",
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "ColumnsConfig",
    "ComputeConfig",
    "DataConfig",
    "DatasetConfig",
    "EvaluationConfig",
    "FleetConfig",
    "Fp8Config",
    "KlConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "SftConfig",
    "SftDataConfig",
    "WeightSyncConfig",
    "divisors",
    "dump_config",
    "load_config",
]
