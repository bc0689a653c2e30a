"""Published models, by what their configuration files say: their sizes, and a plan of each."""

import json
from pathlib import Path

import pytest
from transformers import DeepseekV3Config, Qwen3_5Config, Qwen3_5MoeConfig

from dapo_mega.commands import plan
from dapo_mega.models.families import find_family, language_config
from dapo_mega.planning.parameters import num_active_parameters, num_parameters

CONFIG = str(Path(__file__).resolve().parents[3] / "configs" / "qwen2.5-32b-dapo-128gpu.yaml")

GLM = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "topk_group": 1,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
GLM_LARGE = {
    **GLM,
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
GLM_AIR = {
    **GLM,
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_hidden_layers": 46,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
}
PHI4 = {
    "model_type": "phi3",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 250000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
PHI4_MINI = {
    **PHI4,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    # The published long factors are other numbers, for sequences that are refused.
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [32.0] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
SMOLLM3 = {
    "model_type": "smollm3",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
# huggingface.co/openai/gpt-oss-20b and gpt-oss-120b
GPT_OSS = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GPT_OSS_LARGE = {
    **GPT_OSS,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
# huggingface.co/allenai/OLMo-2-1124-7B, OLMo-2-0325-32B and Olmo-3-1025-7B
OLMO2 = {
    "model_type": "olmo2",
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
OLMO2_32B = {
    **OLMO2,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
}
OLMO3 = {
    **OLMO2,
    "model_type": "olmo3",
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "sliding_window": 4096,
    "vocab_size": 100278,
}
# huggingface.co/google/gemma-3-1b-it, and the language models of gemma-3-4b-it and gemma-3-27b-it
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
_OF_GEMMA3 = {
    "model_type": "gemma3_text",
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {**_OF_GEMMA3, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "vision_config": {"hidden_size": 1152},
}
GEMMA3_27B = {
    "model_type": "gemma3",
    "text_config": {
        **_OF_GEMMA3,
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
    "vision_config": {"hidden_size": 1152},
}
QWEN_VL = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vision_config": {"hidden_size": 1280},
    "vocab_size": 152064,
}
QWEN_NEXT = {
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
# With the billions of parameters of all and of those that a token meets, as the models' cards round them.
MODELS = {
    "GLM-4.5-Air": (GLM_AIR, 106, 12),
    "GLM-4.5": (GLM_LARGE, 355, 32),
    "GLM-4.6": ({**GLM_LARGE, "max_position_embeddings": 202752}, 355, 32),
    "Phi-4": (PHI4, 14.7, 14.7),
    "Phi-4-reasoning": ({**PHI4, "max_position_embeddings": 32768, "rope_theta": 500000}, 14.7, 14.7),
    "Phi-4-mini": (PHI4_MINI, 3.84, 3.84),
    "SmolLM3-3B": (SMOLLM3, 3.08, 3.08),
    # 3.6 and 5.1 with the output layer.
    "gpt-oss-20b": (GPT_OSS, 20.91, 3.03),
    "gpt-oss-120b": (GPT_OSS_LARGE, 116.83, 4.55),
    "OLMo-2-7B": (OLMO2, 7.3, 7.3),
    "OLMo-2-32B": (OLMO2_32B, 32.2, 32.2),
    "OLMo-3-7B": (OLMO3, 7.3, 7.3),
    "Gemma-3-1B": (GEMMA3_1B, 1.0, 1.0),
    "Gemma-3-4B": (GEMMA3_4B, 3.88, 3.88),
    "Gemma-3-27B": (GEMMA3_27B, 27.0, 27.0),
    "Qwen2.5-VL-7B": (QWEN_VL, 7.6, 7.6),
    # Cards of these round what a token meets to whole billions, so only all parameters are compared.
    "Qwen3-Next-80B-A3B": (QWEN_NEXT, 80),
    # As the defaults of transformers' configuration classes have it.
    "DeepSeek-V3": (DeepseekV3Config().to_dict(), 671),
    "Qwen3.5-9B": (Qwen3_5Config().to_dict(), 9),
    "Qwen3.5-35B-A3B": (Qwen3_5MoeConfig().to_dict(), 35),
}
RUN = [
    "rollout.fleet.engine_tensor=null",
    "parallel.tensor=2",
    "parallel.sequence=true",
    "parallel.pipeline=2",
    "parallel.virtual_pipeline=1",
    "parallel.context=1",
    "parallel.world_size=64",
    "data.max_prompt_tokens=1024",
    "rollout.max_response_tokens=3072",
    "reward.overlong_cache_tokens=512",
    "batch.tokens_per_microbatch=8192",
]


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_its_size_and_is_planned(tmp_path, capsys, name):
    config, *billions = MODELS[name]
    raw = language_config(config)
    arch = find_family(raw["model_type"]).read(raw)
    found = [num_parameters(arch) / 1e9, num_active_parameters(arch) / 1e9]
    (tmp_path / "config.json").write_text(json.dumps(config))
    experts = ["parallel.expert=16", "parallel.expert_tensor=1"] if arch.experts else []
    plan.main([CONFIG, f"model.architecture={tmp_path / 'config.json'}", *RUN, *experts])
    out = capsys.readouterr().out
    assert ("trains on local layers only" in out) == arch.model_type.startswith(("olmo", "gemma"))
    assert f"model: {arch.model_type}, {found[0] * 1000:,.1f} M parameters" in out
    assert " GiB on stage" in out
    if arch.experts:  # The cards of mixtures leave out the embeddings of what a token meets.
        found[1] -= 2 * arch.vocab_size * arch.hidden_size / 1e9
    assert found[: len(billions)] == pytest.approx(billions, rel=0.02)
