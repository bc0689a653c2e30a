"""Policies in one process whose models have sizes that a device's kernels take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_mega.config import ComputeConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.megatron_policy import MegatronPolicy

DEVICE_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""Head size 64, and multiples of 16: what configurations of transformers call the sizes of a model."""


def device_policy(
    folder: Path,
    processes: Processes,
    implementation: str = "auto",
    *,
    dtype: str = "bf16",
    learning_rate: float = 1e-4,
    lora: LoraConfig | None = None,
    **compute: Any,
) -> MegatronPolicy:
    """A policy of the checkpoint in `folder`, with `compute` as in that section of the configuration."""
    return MegatronPolicy(
        ModelConfig(path=str(folder), dtype=dtype, layer_implementation=implementation),
        ParallelConfig(),
        OptimizerConfig(learning_rate=learning_rate, warmup_steps=0),
        processes,
        temperature=1.0,
        updates_per_step=1,
        num_steps=2,
        compute=ComputeConfig(**compute),
        lora=lora,
    )
