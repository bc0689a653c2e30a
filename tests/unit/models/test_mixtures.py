"""Families with experts: their tables list what transformers has, layer by layer, and refuse the rest by name."""

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from dapo_mega.errors import InputError
from dapo_mega.models import load_architecture
from dapo_mega.models.architecture import ExpertGroups
from dapo_mega.models.hf_checkpoint import HfCheckpoint, all_tensors, check_source
from dapo_mega.planning.parameters import num_parameters

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 11,
}
DEEPSEEK = {
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 7,
    "first_k_dense_replace": 1,
}
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 7,
    "head_dim": 8,
    "num_nextn_predict_layers": 0,
}
QWEN = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS = {
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 6},
    "qwen2_moe, two kinds of layers": {**QWEN, "mlp_only_layers": [0, 2], "shared_expert_intermediate_size": 6},
    "qwen2_moe, every other layer": {**QWEN, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 6},
    "qwen3_moe, two kinds of layers": {**QWEN, "mlp_only_layers": [3], "decoder_sparse_step": 2},
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v2, latent queries": {**DEEPSEEK, "q_lora_rank": 3, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 3, "num_nextn_predict_layers": 0},
    "deepseek_v3, no latent queries": {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 2},
    "glm4_moe": GLM,
    "glm4_moe, norms and biases": {**GLM, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2},
}


def write_config(folder, name, **changes):
    keys = {"model_type": name.split(",")[0], **SIZES, **MODELS[name], **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in keys.items() if v != "left out"}))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_tensors_and_sizes_are_those_of_transformers(tmp_path, name):
    family, arch = load_architecture(write_config(tmp_path, name))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path)
    names = [name for placed in all_tensors(family, arch) for name in placed.hf]
    assert len(names) == len(set(names))
    check_source(HfCheckpoint(tmp_path), family, arch)
    assert num_parameters(arch) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_keys_left_out_mean_what_they_mean_to_transformers(tmp_path, name):
    absent = {key: "left out" for key in MODELS[name] if name != "deepseek_v2" or key != "num_experts_per_tok"}
    heads = {"num_attention_heads": 16, "hidden_size": 64} if not name.startswith("deepseek") else {}
    arch = load_architecture(write_config(tmp_path, name, **absent, **heads, num_key_value_heads="left out"))[1]
    config = AutoConfig.from_pretrained(tmp_path)
    experts, latent = arch.experts, arch.latent_attention
    assert arch.num_query_groups == (2 if latent else config.num_key_value_heads)
    assert arch.partial_rotary_factor == config.rope_parameters.get("partial_rotary_factor", 1.0)
    assert arch.max_positions == config.max_position_embeddings
    assert experts.per_token == config.num_experts_per_tok
    assert experts.ffn_hidden_size == config.moe_intermediate_size
    assert experts.normalised == config.norm_topk_prob
    if name == "qwen2_moe":
        assert experts.number == config.num_experts
        assert experts.shared_ffn_hidden_size == config.shared_expert_intermediate_size
        return
    assert experts.number == config.n_routed_experts
    assert experts.shared_ffn_hidden_size == config.n_shared_experts * config.moe_intermediate_size
    assert experts.dense_layers == set(range(config.first_k_dense_replace))
    assert experts.scaling == config.routed_scaling_factor
    groups = ExpertGroups(config.n_group, config.topk_group, "sum") if (config.n_group or 1) > 1 else None
    assert experts.groups == groups
    if latent is None:
        assert (arch.qk_norm, arch.qkv_bias, arch.norm_epsilon) == (False, False, config.rms_norm_eps)
        return
    assert (latent.query_rank, latent.key_value_rank) == (config.q_lora_rank, config.kv_lora_rank)
    assert latent.unrotated_head_dim == config.qk_nope_head_dim
    assert latent.rotated_head_dim == config.qk_rope_head_dim
    assert latent.value_head_dim == config.v_head_dim


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config.*'fp8'.*take one of these",
        ),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=true"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 is not supported; only 1e-06 is"),
        ("deepseek_v3", {"v_head_dim": 7}, r"v_head_dim=7 .*at most"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=false"),
        ("deepseek_v3", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 and topk_group=2"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "only yarn with mscale"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": None}}, "only yarn with mscale"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "attention_factor": 1.1}}, "without attention_factor"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "truncate": False}}, "without attention_factor and truncate=false"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=true"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias=true"),
        ("glm4_moe", {"norm_topk_prob": False}, "glm4_moe with norm_topk_prob=false"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 .*at most 1.0"),
        ("glm4_moe", {"partial_rotary_factor": 0.1}, "has 0 dimensions, not an even number"),
    ],
)
def test_what_the_policy_does_not_compute_is_refused_by_name(tmp_path, name, changes, message):
    with pytest.raises(InputError, match=f"deepseek_v[23] with .*{message}|{message}"):
        load_architecture(write_config(tmp_path, name, **changes))


def test_multi_token_prediction_layers_are_kept_where_a_family_has_them(tmp_path, caplog):
    """Layer 3 of a checkpoint whose config.json counts three layers stands for such a layer."""
    caplog.set_level("INFO")
    for name in ("deepseek_v3", "glm4_moe", "deepseek_v2"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(write_config(tmp_path, name))).save_pretrained(
            tmp_path
        )
        family, arch = load_architecture(write_config(tmp_path, name, num_hidden_layers=3))
        if name != "deepseek_v2":
            caplog.clear()
            check_source(HfCheckpoint(tmp_path), family, arch)
            assert "tensors of multi-token prediction are kept, and not trained" in caplog.text
        else:
            with pytest.raises(InputError, match=r"additional.* model\.layers\.3\."):
                check_source(HfCheckpoint(tmp_path), family, arch)
