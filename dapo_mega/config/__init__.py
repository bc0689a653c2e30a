"""The configuration of a run: one YAML file with frozen sections; unknown keys are errors.

What can be chosen by kind stands with its code in `algorithms/`. Nothing here imports torch or reads any other file.
"""

from dapo_mega.config.algorithm import AlgorithmConfig, KlConfig
from dapo_mega.config.base import Section, divisors
from dapo_mega.config.batch import BatchConfig
from dapo_mega.config.checkpoint import CheckpointConfig
from dapo_mega.config.compute import ComputeConfig, Fp8Config, MoeConfig
from dapo_mega.config.data import (
    ColumnsConfig,
    DataConfig,
    DatasetConfig,
    MixedDatasetConfig,
    PromptSamplingConfig,
    SftDataConfig,
    SourceConfig,
)
from dapo_mega.config.distillation import DistillationConfig, TeacherConfig
from dapo_mega.config.evaluation import EvaluationConfig
from dapo_mega.config.files import dump_config, load_config
from dapo_mega.config.fleet import FleetConfig
from dapo_mega.config.lora import LoraConfig
from dapo_mega.config.model import ModelConfig
from dapo_mega.config.optimizer import OptimizerConfig
from dapo_mega.config.parallel import ParallelConfig
from dapo_mega.config.preparation import PreparationConfig
from dapo_mega.config.presets import PRESETS
from dapo_mega.config.reward import RewardConfig
from dapo_mega.config.rollout import RolloutConfig
from dapo_mega.config.run import CriticConfig, RunConfig, SamplesConfig
from dapo_mega.config.sft import DpoConfig, SftConfig
from dapo_mega.config.tracking import TrackingConfig
from dapo_mega.config.training import TrainingConfig
from dapo_mega.config.weight_sync import WeightSyncConfig
