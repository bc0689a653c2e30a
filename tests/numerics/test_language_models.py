"""The language model in a vision model's folder computes what the vision model does of text, and is exported alone."""

import logging
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
)

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.config import ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.engines.sglang.engine_model import model_difference
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.models import load_architecture
from tests.distributed.tiny import DELTA_SIZES, VOCAB_SIZE, has_delta, make_samples, prompt_length
from tests.numerics.closeness import assert_alike

TEXT = {
    "vocab_size": VOCAB_SIZE + 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = {"image_token_id": 61, "video_token_id": 62, "vision_start_token_id": 63, "vision_end_token_id": 63}
MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]}
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48}


def qwen2_5():
    vision = {**VISION, "fullatt_block_indexes": [0], "window_size": 112}
    text = {**TEXT, "rope_parameters": MROPE, "tie_word_embeddings": True}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **TOKENS)


def qwen3():
    vision = {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = {**TEXT, "head_dim": 12, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **TOKENS)


def mistral():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14, **sizes}
    text = {**TEXT, "model_type": "mistral", "head_dim": 12, "sliding_window": None, "tie_word_embeddings": False}
    return Mistral3Config(text_config=text, vision_config=vision, image_token_index=61, tie_word_embeddings=False)


def qwen3_5(config=Qwen3_5Config):
    sizes = {name: size for name, size in DELTA_SIZES.items() if name not in TEXT}
    rope = {**MROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    text = {**TEXT, **sizes, "rope_parameters": rope, "layer_types": ["full_attention", "linear_attention"]}
    return config(text_config=text, vision_config={**VISION, "num_position_embeddings": 16}, **TOKENS)


CONFIGS = {"qwen2": qwen2_5, "qwen3": qwen3, "mistral": mistral}
if has_delta():
    CONFIGS |= {"qwen3_5_text": qwen3_5, "qwen3_5_moe_text": partial(qwen3_5, Qwen3_5MoeConfig)}


@pytest.fixture(scope="module")
def processes():
    yield start_processes(ParallelConfig(), 0)
    stop_processes()


def logprobs_of(model, samples):
    parts = []
    for sample in samples:
        tokens = sample.token_ids.long()[None]
        steps = torch.arange(prompt_length(sample) - 1, len(sample.token_ids) - 1)
        with torch.no_grad():
            logprobs = model(input_ids=tokens).logits[0].log_softmax(-1)
        parts.append(logprobs[steps, tokens[0, steps + 1]])
    return torch.cat(parts)


def rename_language_model(folder, prefix):
    """The layers' names begin with `prefix`, as versions of transformers differ in it."""
    tensors = load_file(folder / "model.safetensors")
    projection = "layers.0.self_attn.o_proj.weight"
    used = next(name for name in tensors if name.endswith(projection) and "vis" not in name).removesuffix(projection)
    renamed = {prefix + name.removeprefix(used): tensor for name, tensor in tensors.items() if name.startswith(used)}
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(used)}
    save_file({**renamed, **others}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("family", CONFIGS)
def test_text_is_scored_as_by_the_vision_model_and_exported_alone(tmp_path, caplog, processes, family, prefix):
    torch.manual_seed(0)
    config = CONFIGS[family]()
    whole = AutoModelForImageTextToText.from_config(config).float()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    whole.save_pretrained(tmp_path / "vision")
    rename_language_model(tmp_path / "vision", prefix)
    samples = make_samples(6)
    with caplog.at_level(logging.WARNING):
        policy = MegatronPolicy(
            ModelConfig(path=str(tmp_path / "vision"), dtype="fp32"),
            ParallelConfig(),
            OptimizerConfig(learning_rate=1e-2),
            processes,
            temperature=1.0,
            updates_per_step=1,
            num_steps=1,
        )
    assert "beside its language model are left out, also of what is exported" in caplog.text
    assert policy.arch.model_type == family
    expected = logprobs_of(whole, samples)
    assert_alike(policy.score([pack(flatten(samples), max_response_tokens=64)])[0].logprobs, expected)
    EmbeddedEngine(tmp_path / "vision").load_weights(policy.weights(1 << 14), 0)
    save_hf_checkpoint(policy, tmp_path / "export")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert type(alone).__name__ == f"{policy.family.class_name}ForCausalLM"
    assert_alike(logprobs_of(alone, samples), expected)
    assert load_architecture(tmp_path / "export")[1] == policy.arch
    assert "start it with --model FOLDER, an export" in model_difference(config.to_dict(), policy.arch)
