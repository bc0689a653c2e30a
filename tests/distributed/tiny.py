"""Tiny models and batches that several test modules share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dapo_mega.types import Sample

VOCAB_SIZE = 61  # no multiple of 2: tensor parallelism has to pad the vocabulary


def make_model(folder: Path, *, tied: bool, seed: int = 0, num_layers: int = 4, max_positions: int = 256) -> Path:
    """A random Qwen2 checkpoint in float32 with grouped-query attention and non-zero biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Logits with some shape, and norms and biases that matter.
            scale = 0.3 if parameter.ndim == 1 else 0.15
            parameter.add_(torch.randn_like(parameter) * scale if "norm" not in name else 0.1)
    model.save_pretrained(folder)
    return folder


def make_moe_model(
    folder: Path, *, seed: int = 0, num_layers: int = 4, normalised: bool = True, vocab_size: int = VOCAB_SIZE
) -> Path:
    """A random Qwen3-MoE checkpoint in float32: four experts, two per token, norms on queries and keys."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=80,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=normalised,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Routers with a clear opinion: near ties would be decided by rounding.
            scale = 0.5 if ".gate." in name else 0.08
            parameter.add_(torch.randn_like(parameter) * scale if "norm" not in name else 0.1)
    model.save_pretrained(folder)
    return folder


def make_samples(num_samples: int, seed: int = 0) -> list[Sample]:
    """Responses of unequal lengths with advantages of both signs; some truncated ones are out of the loss."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(num_samples):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, 40))
        samples.append(
            Sample(
                token_ids=rng.integers(1, VOCAB_SIZE, prompt + response).astype(np.int32),
                prompt_length=prompt,
                advantage=float(rng.normal()),
                in_loss=i % 5 != 3,
                rollout_logprobs=-rng.exponential(3.0, response).astype(np.float32),
            )
        )
    return samples
