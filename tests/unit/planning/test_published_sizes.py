"""Published models, by what their configuration files say: their sizes, and a plan of each."""

import json
from pathlib import Path

import pytest
from transformers import Qwen3_5Config, Qwen3_5MoeConfig

from dapo_mega.commands import plan
from dapo_mega.models.families import find_family, language_config
from dapo_mega.planning.parameters import num_active_parameters, num_parameters

CONFIG = str(Path(__file__).resolve().parents[3] / "configs" / "qwen2.5-32b-dapo.yaml")

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
    "Qwen2.5-VL-7B": (QWEN_VL, 7.6, 7.6),
    # Cards of these round what a token meets to whole billions, so only all parameters are compared.
    "Qwen3-Next-80B-A3B": (QWEN_NEXT, 80),
    # As the defaults of transformers' configuration classes have it.
    "Qwen3.5-9B": (Qwen3_5Config().to_dict(), 9),
    "Qwen3.5-35B-A3B": (Qwen3_5MoeConfig().to_dict(), 35),
}
RUN = [
    "parallel.tensor=2",
    "parallel.sequence=true",
    "parallel.pipeline=2",
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
    assert f"model: {arch.model_type}, {found[0] * 1000:,.1f} M parameters" in out
    assert " GiB on stage" in out
    if arch.experts:  # The cards of mixtures leave out the embeddings of what a token meets.
        found[1] -= 2 * arch.vocab_size * arch.hidden_size / 1e9
    assert found[: len(billions)] == pytest.approx(billions, rel=0.02)
