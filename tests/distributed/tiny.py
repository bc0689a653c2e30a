"""Tiny models and batches that several test modules share."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dapo_mega.batching.samples import Sample, single_turn

VOCAB_SIZE = 61  # no multiple of 2: tensor parallelism has to pad the vocabulary


_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_model(folder: Path, *, tied: bool, seed: int = 0, num_layers: int = 4, max_positions: int = 256) -> Path:
    """A random Qwen2 checkpoint in float32 with grouped-query attention and non-zero biases."""
    from transformers import Qwen2Config

    sizes = {**_SIZES, "num_hidden_layers": num_layers, "max_position_embeddings": max_positions}
    return save_random(Qwen2Config(**sizes, tie_word_embeddings=tied), folder, seed)


def make_qwen3_model(folder: Path, **changes: Any) -> Path:
    """Qwen3 with heads of another size than hidden_size / heads."""
    from transformers import Qwen3Config

    return save_random(Qwen3Config(**{**_SIZES, "head_dim": 20, **changes}), folder)


def make_llama_model(folder: Path, **changes: Any) -> Path:
    """Llama 3.1 with frequencies on both sides of its ramp and on it."""
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return save_random(LlamaConfig(**{**_SIZES, "rope_parameters": rope, **changes}), folder)


def make_mistral_model(folder: Path, **changes: Any) -> Path:
    """Mistral whose window is shorter than most sequences of `make_samples`."""
    from transformers import MistralConfig

    return save_random(MistralConfig(**{**_SIZES, "head_dim": 10, "sliding_window": 7, **changes}), folder)


def make_moe_model(
    folder: Path,
    *,
    seed: int = 0,
    num_layers: int = 4,
    normalised: bool = True,
    vocab_size: int = VOCAB_SIZE,
    biased: bool = False,
) -> Path:
    """A random Qwen3-MoE checkpoint in float32: four experts, two per token, norms on queries and keys."""
    from transformers import Qwen3MoeConfig

    sizes = {**_SIZES, "vocab_size": vocab_size, "num_hidden_layers": num_layers}
    config = Qwen3MoeConfig(
        **sizes,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=normalised,
        head_dim=16,
        attention_bias=biased,
        tie_word_embeddings=False,
    )
    return save_random(config, folder, seed, scale=0.08)


def make_qwen2_moe_model(folder: Path, **changes: Any) -> Path:
    """Qwen2-MoE: a gated shared expert beside four others, and a dense layer in between."""
    from transformers import Qwen2MoeConfig

    sizes = {
        **_SIZES,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    }
    return save_random(Qwen2MoeConfig(**{**sizes, **changes}), folder, scale=0.08)


_DEEPSEEK_SIZES = {
    **_SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}


def make_deepseek_v2_model(folder: Path, **changes: Any) -> Path:
    """DeepSeek-V2 without a latent vector of the queries: two shared experts, and eight others in four groups."""
    from transformers import DeepseekV2Config

    routing = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0, "n_shared_experts": 2}
    return save_random(DeepseekV2Config(**{**_DEEPSEEK_SIZES, "q_lora_rank": None, **routing, **changes}), folder)


def make_deepseek_v3_model(folder: Path, **changes: Any) -> Path:
    """DeepSeek-V3: a shared expert, and eight others in four groups, with routing biases."""
    from transformers import DeepseekV3Config

    sizes = {**_DEEPSEEK_SIZES, "q_lora_rank": 24, "n_shared_experts": 1, "num_mtp_layers": 0}
    return save_random(DeepseekV3Config(**{**sizes, **changes}), folder)


def make_glm4_moe_model(folder: Path, **changes: Any) -> Path:
    """GLM-4.5: half of each head rotated, biases on q, k, v, a shared expert beside eight others."""
    from transformers import Glm4MoeConfig

    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32, "num_experts_per_tok": 4}
    sizes = {**_SIZES, **experts, "head_dim": 20, "attention_bias": True, "num_mtp_layers": 0}
    return save_random(Glm4MoeConfig(**{**sizes, **changes}), folder)


def make_phi3_model(folder: Path, **changes: Any) -> Path:
    """Phi-4-mini: three quarters of each head rotated, LongRoPE, a sliding window beyond all sequences."""
    from transformers import Phi3Config

    rope = {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.2, 1.5],
        "long_factor": [2.0, 4.0, 8.0],
        "original_max_position_embeddings": 128,
    }
    sizes = {**_SIZES, "hidden_size": 32, "rope_parameters": rope, "sliding_window": 128, "tie_word_embeddings": True}
    positions = {"max_position_embeddings": 1024, "original_max_position_embeddings": 128}
    return save_random(Phi3Config(**{**sizes, **positions, **changes}), folder)


def make_smollm3_model(folder: Path, **changes: Any) -> Path:
    """SmolLM3 with rotation in two of four layers."""
    from transformers import SmolLM3Config

    return save_random(SmolLM3Config(**{**_SIZES, "no_rope_layers": [1, 0, 1, 0], **changes}), folder)


DELTA_SIZES = {
    **_SIZES,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def make_qwen3_next_model(folder: Path, **changes: Any) -> Path:
    """Qwen3-Next: three gated delta layers and one of gated attention, a shared expert beside four others."""
    from transformers import Qwen3NextConfig

    return save_random(Qwen3NextConfig(**{**DELTA_SIZES, **changes}), folder, scale=0.08)


def make_qwen3_5_model(folder: Path, **changes: Any) -> Path:
    """Qwen3.5: gated delta layers and attention in turn, a smaller part of each head rotated."""
    from transformers import Qwen3_5TextConfig

    kinds = ["linear_attention", "full_attention"] * 2
    return save_random(Qwen3_5TextConfig(**{**DELTA_SIZES, "layer_types": kinds, **changes}), folder, scale=0.08)


def make_qwen3_5_moe_model(folder: Path, **changes: Any) -> Path:
    """Qwen3.5's mixture of experts."""
    from transformers import Qwen3_5MoeTextConfig

    return save_random(Qwen3_5MoeTextConfig(**{**DELTA_SIZES, **changes}), folder, scale=0.08)


def make_gpt_oss_model(folder: Path, **changes: Any) -> Path:
    """gpt-oss: sinks, YaRN without rounding, two layers with windows, four experts that reach their limits."""
    from transformers import GptOssConfig

    sizes = {**_SIZES, "head_dim": 16, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    special = {"sliding_window": 7, "swiglu_limit": 1.5, "rope_parameters": {**_YARN, "truncate": False}}
    return save_random(GptOssConfig(**{**sizes, **special, **changes}), folder)


def make_olmo2_model(folder: Path, **changes: Any) -> Path:
    """OLMo-2: norms behind attention and MLP, and over all heads of q and k."""
    from transformers import Olmo2Config

    return save_random(Olmo2Config(**{**_SIZES, **changes}), folder)


def make_olmo3_model(folder: Path, **changes: Any) -> Path:
    """OLMo-3: three layers with a sliding window and one with YaRN."""
    from transformers import Olmo3Config

    rope = {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    return save_random(Olmo3Config(**{**_SIZES, "sliding_window": 7, "rope_parameters": rope, **changes}), folder)


def make_gemma3_model(folder: Path, **changes: Any) -> Path:
    """Gemma 3: norms around attention and MLP, one of four layers with full attention and frequencies of its own."""
    from transformers import Gemma3TextConfig

    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    special = {"head_dim": 20, "sliding_window": 7, "layer_types": kinds, "rope_parameters": rope}
    return save_random(Gemma3TextConfig(**{**_SIZES, **special, "query_pre_attn_scalar": 24, **changes}), folder)


_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
_MAGNITUDES = {"mscale": 0.8, "mscale_all_dim": 0.6}

FAMILY_MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen2": partial(make_model, tied=False),
    "qwen2, tied": partial(make_model, tied=True),
    "qwen3": make_qwen3_model,
    "qwen3, one key head, biases, tied, linear rope": partial(
        make_qwen3_model,
        num_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5},
    ),
    "llama": make_llama_model,
    "llama, all biases, tied": partial(
        make_llama_model, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=4
    ),
    "llama, biases in MLPs": partial(make_llama_model, mlp_bias=True, rope_parameters={"rope_theta": 1e5}),
    "mistral": make_mistral_model,
    "mistral, no window, yarn": partial(make_mistral_model, sliding_window=None, rope_parameters=_YARN),
    "qwen3_moe": partial(make_moe_model, biased=True),
    "qwen3_moe, unscaled weights": partial(make_moe_model, normalised=False),
    "qwen2_moe": make_qwen2_moe_model,
    "qwen2_moe, one key head, scaled weights, no biases, every other layer dense": partial(
        make_qwen2_moe_model,
        num_key_value_heads=1,
        norm_topk_prob=True,
        qkv_bias=False,
        mlp_only_layers=[],
        decoder_sparse_step=2,
    ),
    "deepseek_v2": make_deepseek_v2_model,
    "deepseek_v2, greedy, latent queries, yarn": partial(
        make_deepseek_v2_model, topk_method="greedy", q_lora_rank=24, rope_parameters={**_YARN, **_MAGNITUDES}
    ),
    "deepseek_v3": make_deepseek_v3_model,
    "deepseek_v3, no groups, yarn": partial(
        make_deepseek_v3_model, n_group=1, topk_group=1, rope_parameters={**_YARN, **_MAGNITUDES}
    ),
    "glm4_moe": make_glm4_moe_model,
    "glm4_moe, norms on q and k, no biases, less rotated, yarn": partial(
        make_glm4_moe_model,
        use_qk_norm=True,
        attention_bias=False,
        routed_scaling_factor=2.5,
        first_k_dense_replace=2,
        rope_parameters={**_YARN, "partial_rotary_factor": 0.4},
    ),
    "gpt_oss": make_gpt_oss_model,
    "gpt_oss, one key head, tied, windows at the end": partial(
        make_gpt_oss_model,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
    ),
    "olmo2": make_olmo2_model,
    "olmo2, all biases, tied, linear rope": partial(
        make_olmo2_model,
        attention_bias=True,
        tie_word_embeddings=True,
        num_key_value_heads=4,
        rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5},
    ),
    "olmo3": make_olmo3_model,
    "gemma3_text": make_gemma3_model,
    "gemma3_text, untied, unscaled rope": partial(
        make_gemma3_model,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "phi3": make_phi3_model,
    "phi3, whole heads, a window, untied, one key head": partial(
        make_phi3_model, rope_parameters=None, sliding_window=7, tie_word_embeddings=False, num_key_value_heads=1
    ),
    "smollm3": make_smollm3_model,
    "smollm3, all biases, untied, yarn": partial(
        make_smollm3_model,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        no_rope_layers=[0, 1, 1, 1],
        rope_parameters=_YARN,
    ),
}
"""Makers of checkpoints of all model families, and of each switch that changes what a family's model computes."""

DELTA_MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3_next": make_qwen3_next_model,
    "qwen3_next, biases, a dense layer, unscaled weights": partial(
        make_qwen3_next_model, attention_bias=True, mlp_only_layers=[1], norm_topk_prob=False, num_key_value_heads=1
    ),
    "qwen3_5": make_qwen3_5_model,
    "qwen3_5, tied": partial(make_qwen3_5_model, tie_word_embeddings=True),
    "qwen3_5_moe": make_qwen3_5_moe_model,
}
"""The same of families with gated delta layers, among the others where Megatron-Core has these for packed sequences."""


_DELTA_FILES = "core/ssm/gated_delta_net*"


def has_delta() -> bool:
    """Whether this Megatron-Core has gated delta layers for packed sequences."""
    found = importlib.util.find_spec("megatron")
    assert found
    layers = [file for place in found.submodule_search_locations or () for file in Path(place).glob(_DELTA_FILES)]
    return any("cu_seqlens=None" in (file / "common.py" if file.is_dir() else file).read_text() for file in layers)


if has_delta():
    FAMILY_MODELS.update(DELTA_MODELS)

FAMILIES = tuple(name for name in FAMILY_MODELS if "," not in name)
"""One model of each family, for what a family's code decides and its models' switches do not."""


def add_mtp_layers(model: Path) -> dict[str, Tensor]:
    """Give a tiny DeepSeek-V3 or Qwen3-Next a layer of multi-token prediction as the published have it, in bf16, with
    values of any bits; returns it."""
    tensors = load_file(model / "model.safetensors")
    layer, prefix, own = "model.layers.4.", "model.layers.4.", {"enorm": 1, "hnorm": 1, "eh_proj": 2}
    if "model.layers.3.self_attn.kv_b_proj.weight" not in tensors:
        layer, prefix, own = "mtp.layers.0.", "mtp.", {"pre_fc_norm_embedding": 1, "norm": 1, "fc": 2}
    hidden = tensors["model.norm.weight"].numel()
    shapes = {f"{prefix}{name}.weight": (hidden, hidden * size)[2 - size :] for name, size in own.items()}
    last = "model.layers.3."
    shapes |= {layer + name.removeprefix(last): t.shape for name, t in tensors.items() if name.startswith(last)}
    if prefix == "mtp.":  # A stack of experts, as Qwen3.5 has them.
        shapes |= {f"{layer}mlp.experts.gate_up_proj": (2, 6, hidden)}
    rng = torch.Generator().manual_seed(7)
    added = {name: torch.randn(shape, generator=rng).bfloat16() for name, shape in shapes.items()}
    next(iter(added.values()))[:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    save_file(tensors | added, model / "model.safetensors", metadata={"format": "pt"})
    return added


def add_trainable_mtp_layer(model: Path, seed: int = 5) -> Path:
    """Give a tiny model a whole layer of multi-token prediction with values near those of its last layer."""
    config = json.loads((model / "config.json").read_text())
    config["num_mtp_layers" if "num_mtp_layers" in config else "num_nextn_predict_layers"] = 1
    (model / "config.json").write_text(json.dumps(config))
    tensors, number = load_file(model / "model.safetensors"), config["num_hidden_layers"]
    hidden, last, copies = tensors["model.norm.weight"].numel(), f"model.layers.{number - 1}.", {}
    if any("linear_attn" in name for name in tensors):
        layer, projection = "mtp.layers.0.", "mtp.fc"
        norms = ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
    else:
        layer = f"model.layers.{number}."
        norms, projection = [f"{layer}{name}" for name in ("enorm", "hnorm", "shared_head.norm")], f"{layer}eh_proj"
        copies = {f"{layer}embed_tokens.weight": "model.embed_tokens.weight"}
        copies |= {f"{layer}shared_head.head.weight": "lm_head.weight"} if "lm_head.weight" in tensors else {}
    rng = torch.Generator().manual_seed(seed)
    added = {layer + n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
    added = {name: t + 0.1 * t.std() * torch.randn(t.shape, generator=rng) for name, t in added.items()}
    ones = tensors["model.norm.weight"].mean().round()
    added |= {f"{name}.weight": ones + 0.1 * torch.randn(hidden, generator=rng) for name in norms}
    added[f"{projection}.weight"] = torch.randn(hidden, 2 * hidden, generator=rng) / hidden**0.5
    added |= {name: tensors[original].clone() for name, original in copies.items()}
    save_file(tensors | added, model / "model.safetensors", metadata={"format": "pt"})
    return model


def save_random(config: Any, folder: Path, seed: int = 0, scale: float = 0.15) -> Path:
    """A float32 checkpoint of `config` with logits that have some shape, and with norms and biases that matter."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        routing_biases = (pair for pair in model.named_buffers() if pair[0].endswith("e_score_correction_bias"))
        for name, parameter in chain(model.named_parameters(), routing_biases):
            # Routers with a clear opinion: near ties would be decided by rounding.
            is_router = ".gate." in name or ".router." in name
            kind = "norm" if "norm" in name else "router" if is_router else "bias" if parameter.ndim == 1 else ""
            parameter.add_(torch.randn_like(parameter) * {"norm": 0.2, "router": 0.5, "bias": 0.3, "": scale}[kind])
    model.save_pretrained(folder)
    return folder


def make_dense_experts_and_value(folder: Path) -> dict[str, Path]:
    """A dense model, a mixture of experts and a value model, by their names."""
    models = {name: folder / name for name in ("dense", "experts", "value")}
    make_model(models["dense"], tied=True)
    make_moe_model(models["experts"])
    make_model(models["value"], tied=False)
    make_value_model(models["value"])
    return models


def make_value_model(folder: Path, seed: int = 0) -> Path:
    """Makes the policy in the folder a value model with a random head, in transformers' format; returns the folder."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("lm_head.weight", None)
    hidden = tensors["model.embed_tokens.weight"].shape[1]
    tensors["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)) * 0.2
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kind = config["architectures"][0].replace("ForCausalLM", "ForTokenClassification")
    labels = {"id2label": {"0": "value"}, "label2id": {"value": 0}, "token_classification_bias": False}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [kind], **labels}))
    return folder


def make_samples(
    num_samples: int, seed: int = 0, *, all_in_loss: bool = False, vocab_size: int = VOCAB_SIZE
) -> list[Sample]:
    """Responses of unequal lengths with advantages of both signs; some truncated ones are out of the loss, unless
    `all_in_loss`."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(num_samples):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, 40))
        token_ids = rng.integers(1, vocab_size, prompt + response).astype(np.int32)
        advantage = float(rng.normal())
        samples.append(
            single_turn(
                token_ids[:prompt],
                token_ids[prompt:],
                -rng.exponential(3.0, response).astype(np.float32),
                advantage=advantage,
                in_loss=all_in_loss or i % 5 != 3,
            )
        )
    return samples


def with_routes(samples: list[Sample], layers: int, experts: int, per_token: int, seed: int = 0) -> list[Sample]:
    """The samples with experts drawn for all tokens, and for a fifth of the tokens none."""
    rng = np.random.default_rng(seed)
    routed = []
    for sample in samples:
        routes = rng.random((len(sample), layers, experts)).argsort(-1)[:, :, :per_token].astype(np.int16)
        routes[rng.random(len(sample)) < 0.2] = -1
        routed.append(replace(sample, routes=torch.from_numpy(routes)))
    return routed


def disturbed_choices() -> Any:
    """Within this context routers of transformers choose experts at random, and weigh them as ever."""
    choose, rng = torch.topk, torch.Generator().manual_seed(0)

    def disturbed(scores: torch.Tensor, *settings: Any, **named: Any) -> Any:
        noise = torch.randn(scores.shape, generator=rng) * scores.std()
        indices = choose(scores + noise, *settings, **named).indices
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    return patch("torch.topk", disturbed)


def prompt_length(sample: Sample) -> int:
    """Tokens before the first that the policy sampled."""
    return int(sample.response_mask.int().argmax())
