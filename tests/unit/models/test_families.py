"""What a family's table reads from `config.json` is what transformers reads."""

import json
import sys

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dapo_mega import models
from dapo_mega.config import ComputeConfig, ModelConfig, ParallelConfig
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.settings import transformer_config
from dapo_mega.models import load_architecture
from dapo_mega.models.families import families, find_family
from dapo_mega.models.hf_checkpoint import HfCheckpoint, all_tensors, check_source
from dapo_mega.models.hf_shapes import hf_shape
from dapo_mega.models.layouts import ShardRule
from tests.distributed.tiny import FAMILY_MODELS

DENSE = ["llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"]
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "intermediate_size": 12,
    "num_attention_heads": 32,
    "vocab_size": 11,
}
OF_MIXTURES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
LONG = {"original_max_position_embeddings": 1024}


def write_config(folder, model_type, **keys):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **keys}))
    return folder


@pytest.mark.parametrize("model_type", [*DENSE, "qwen3_moe"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"tie_word_embeddings": True, "head_dim": 64, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
        {"attention_bias": True, "mlp_bias": True, "max_position_embeddings": 999, "rope_theta": 3e4},
        {"sliding_window": None, "use_sliding_window": False, "hidden_act": "silu"},
    ],
)
def test_keys_left_out_mean_what_they_mean_to_transformers(tmp_path, model_type, keys):
    extra = OF_MIXTURES if model_type == "qwen3_moe" else {}
    arch = load_architecture(write_config(tmp_path, model_type, **extra, **keys))[1]
    config = AutoConfig.from_pretrained(tmp_path)
    assert arch.num_query_groups == config.num_key_value_heads
    assert arch.head_dim == (getattr(config, "head_dim", None) or 128)
    assert arch.max_positions == config.max_position_embeddings
    assert arch.norm_epsilon == config.rms_norm_eps
    assert arch.tied_embeddings == config.tie_word_embeddings
    assert arch.rope_theta == config.rope_parameters["rope_theta"]
    assert arch.sliding_window == (None if model_type in ("llama", "smollm3") else config.sliding_window)
    rotates = getattr(config, "no_rope_layers", [1, 1])
    assert arch.unrotated_layers == {layer for layer in range(2) if not rotates[layer]}
    # Configuration classes keep keys that their models do not look at.
    is_biased = bool(keys.get("attention_bias")) and model_type in ("llama", "qwen3", "qwen3_moe", "smollm3")
    assert arch.output_bias == is_biased
    assert arch.qkv_bias == (is_biased or model_type == "qwen2")
    assert arch.mlp_bias == (bool(keys.get("mlp_bias")) and model_type in ("llama", "smollm3"))


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [16, 20, 128])
@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("linear", {"factor": 2.5}),
        ("llama3", LLAMA3),
        ("llama3", {**LLAMA3, "factor": 32.0, "low_freq_factor": 2.0}),
        ("yarn", YARN),
        ("yarn", {"factor": 16.0}),
        ("yarn", {**YARN, "attention_factor": 1.25, "beta_fast": 20, "beta_slow": 2}),
        ("yarn", {**YARN, "truncate": False, "mscale": 0.8, "mscale_all_dim": 0.6}),
        ("longrope", LONG),
        ("longrope", {**LONG, "factor": 16.0}),
        ("longrope", {**LONG, "attention_factor": 1.25}),
    ],
)
def test_scaled_frequencies_have_the_bits_of_transformers(tmp_path, theta, head_dim, kind, scaling):
    frequencies = []
    if kind == "longrope":
        factors = [1 + pair / 7 for pair in range(head_dim // 2)]
        scaling = {**scaling, "short_factor": factors, "long_factor": factors[::-1]}
    styles = [
        {"rope_theta": theta, "rope_scaling": {"type": kind, **scaling}},
        {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **scaling}},
        {"rope_parameters": {"rope_theta": theta, "rope_type": kind, **scaling}},
    ]
    for style in styles:
        arch = load_architecture(write_config(tmp_path, "llama", head_dim=head_dim, **style))[1]
        config = AutoConfig.from_pretrained(tmp_path)
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config)
        assert torch.equal(arch.inverse_frequencies, expected)
        assert arch.inverse_frequencies.dtype is torch.float32
        assert (arch.softmax_scale or head_dim**-0.5) == pytest.approx(head_dim**-0.5 * factor**2)
        frequencies.append(arch.inverse_frequencies)
    assert torch.equal(frequencies[0], frequencies[1])
    assert torch.equal(frequencies[0], frequencies[2])


@pytest.mark.parametrize(
    ("model_type", "keys"), [("phi3", {"partial_rotary_factor": 0.75}), ("smollm3", {"no_rope_layers": [1, 0]})]
)
def test_megatron_finds_the_magnitude_of_a_rotation_that_leaves_something_out(tmp_path, model_type, keys):
    scaling = {"rope_type": "yarn", "attention_factor": 1.19, **YARN}
    arch = load_architecture(write_config(tmp_path, model_type, rope_scaling=scaling, **keys))[1]
    assert (arch.softmax_scale, arch.rotary_magnitude) == (None, 1.19)
    settings = (ModelConfig(path="m"), ParallelConfig(), ComputeConfig())
    assert _yarn_get_concentration_factor_from_config(transformer_config(arch, *settings)) == pytest.approx(1.19)


def test_longrope_serves_sequences_of_the_original_context_only(tmp_path):
    keys = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144}
    scaling = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    arch = load_architecture(write_config(tmp_path, "phi3", partial_rotary_factor=0.75, rope_scaling=scaling, **keys))[
        1
    ]
    assert (arch.max_positions, arch.sliding_window, arch.rotated_dim) == (4096, None, 96)


def test_a_context_length_outside_the_scaling_record_takes_precedence(tmp_path):
    keys = {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 2048}
    arch = load_architecture(write_config(tmp_path, "llama", **keys))[1]
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(tmp_path))
    assert torch.equal(arch.inverse_frequencies, expected)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True in config.json is not supported for qwen3"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types \['sliding_attention'\]"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling of type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "lacks the key 'short_factor'"),
        ({"rope_scaling": {"type": "su"}}, "rope scaling of type 'su' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "lacks the key 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"by kind of layer \(full_attention\)"),
    ],
)
def test_what_the_policy_does_not_compute_is_refused_by_name(tmp_path, keys, message):
    with pytest.raises(InputError, match=message):
        load_architecture(write_config(tmp_path, "qwen3", **keys))


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("gemma2", {}, "nearest is gemma3_text, which lacks capped logits"),
        ("qwen2x", {"use_gate": True}, "nearest is qwen2, whose config.json does not have the keys use_gate;"),
        ("xyz", {"num_experts": 4}, "nearest is qwen3_moe, .*the same keys: if it computes the same, set model_type"),
    ],
)
def test_an_unknown_model_is_told_the_nearest_family_and_what_differs(tmp_path, model_type, keys, message):
    with pytest.raises(InputError, match=f"'{model_type}' is not supported; {message}") as refused:
        load_architecture(write_config(tmp_path, model_type, **keys))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_that_every_checkpoint_states_are_not_guessed(tmp_path, size):
    config = json.loads((write_config(tmp_path, "llama") / "config.json").read_text())
    del config[size]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"lacks the key '{size}'"):
        load_architecture(tmp_path)


def test_families_are_found_by_their_files():
    assert set(families()) >= {*DENSE, "qwen3_moe"}
    assert all(find_family(name).model_type == name for name in families())


def test_parameters_are_listed_once_and_only_where_the_model_has_them(tmp_path):
    for keys, present in (({}, False), ({"attention_bias": True, "mlp_bias": True}, True)):
        family, arch = load_architecture(write_config(tmp_path, "llama", tie_word_embeddings=present, **keys))
        placed = list(family.tensors(arch, range(2), first_stage=True, last_stage=True))
        names = [name for tensor in placed for name in tensor.hf]
        assert len(names) == len(set(names))
        assert any(name.endswith(".bias") for name in names) == present
        assert ("lm_head.weight" in names) != present
        biases = [tensor for tensor in placed if tensor.hf[0].endswith(("o_proj.bias", "down_proj.bias"))]
        assert len(biases) == (4 if present else 0)
        # Added after the sum over the tensor-parallel processes.
        assert all(tensor.layout is ShardRule.REPLICATED for tensor in biases)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not a whole number from 1"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is not a whole number from 1 to 10000"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"head_dim": 1.5}, r"head_dim=1\.5"),
        ({"head_dim": 7}, "7 dimensions, not an even number"),
        ({"hidden_size": None}, "no llama model has"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5 does not divide num_attention_heads=32"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x' is not a number above 0 and below 1"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rope_theta": -5}, "rope_theta=-5 is not a number above 1"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"rope_theta": [1e4]}, r"rope_theta=\[10000\.0\]"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, r"rope_parameters\.rope_theta=nan"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' is no JSON object"),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": -2}}, r"rope_scaling\.factor=-2"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0, "2"]}}, "is no list of numbers above 0"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor has 1 numbers for 128 rotated"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "is not below high_freq_factor"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is neither true nor false"),
        ({"attention_bias": 1.0}, "attention_bias=1.0 is neither"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention' is no list"),
    ],
)
def test_values_that_no_model_has_are_refused_with_the_file(tmp_path, keys, message):
    with pytest.raises(InputError, match=rf"config\.json(: | ).*{message}.*correct"):
        load_architecture(write_config(tmp_path, "llama", **keys))


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("qwen3_moe", {"num_experts": 10**9}, "num_experts=1000000000"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than the 4 experts"),
        ("qwen3_moe", {"num_hidden_layers": 9000, "num_experts": 9000}, "with 9000 experts each"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ("deepseek_v3", {"n_routed_experts": 8, "n_group": 3}, "n_group=3 and topk_group=4 do not fit 8 experts"),
        ("deepseek_v3", {"n_routed_experts": 8, "n_group": 2}, "n_group=2 and topk_group=4 do not fit"),
        ("deepseek_v3", {"n_routed_experts": 8, "n_group": 8}, "num_experts_per_tok=8 is more than the experts of"),
        ("deepseek_v3", {"first_k_dense_replace": 10**9}, "first_k_dense_replace=1000000000"),
        ("deepseek_v3", {"routed_scaling_factor": -1}, "routed_scaling_factor=-1"),
        ("deepseek_v3", {"kv_lora_rank": "512"}, "kv_lora_rank='512'"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts=0 is not a whole number from 1"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 numbers for 2 layers; correct it"),
    ],
)
def test_values_that_no_model_of_a_family_has_are_refused(tmp_path, model_type, keys, message):
    extra = OF_MIXTURES if model_type == "qwen3_moe" else {}
    with pytest.raises(InputError, match=rf"config\.json: .*{message}"):
        load_architecture(write_config(tmp_path, model_type, **{**extra, **keys}))


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "[1]", "null", "{", "\ud800", ""])
def test_a_config_json_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match=r"config\.json (is not valid JSON|holds no JSON object)"):
        load_architecture(tmp_path)


def test_what_is_refused_is_not_to_be_copied_again(tmp_path):
    with pytest.raises(InputError, match=r"config\.json: hidden_act='gelu' is not supported") as refused:
        load_architecture(write_config(tmp_path, "llama", hidden_act="gelu"))
    assert "copy" not in str(refused.value)


def test_tensors_are_counted_as_they_are_listed(tmp_path):
    for name, make in FAMILY_MODELS.items():
        family, arch = load_architecture(make(tmp_path / name))
        listed = [hf for placed in all_tensors(family, arch) for hf in placed.hf]
        assert family.num_tensors(arch) == len(listed), name


INVENTED = """
from dapo_mega.models import llama
from dapo_mega.models.families import ModelFamily, TensorRule
from dapo_mega.models.layouts import ShardRule
from tests.distributed.tiny import FAMILY_MODELS

FAMILY = ModelFamily(
    model_type="invented",
    read=llama.FAMILY.read,
    before_layers=(*llama.FAMILY.before_layers, TensorRule(("scale",), ("model.embed_scale",), ShardRule.REPLICATED)),
    per_layer=llama.FAMILY.per_layer,
    after_layers=llama.FAMILY.after_layers,
    shapes=lambda arch: {"embed_scale": (arch.hidden_size,)},
)
"""


def test_a_family_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "invented.py").write_text(INVENTED)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    families.cache_clear()
    try:
        family, arch = load_architecture(write_config(tmp_path, "invented"))
        tensors = {
            name: torch.zeros(hf_shape(name, arch)) for placed in all_tensors(family, arch) for name in placed.hf
        }
        assert tensors["model.embed_scale"].shape == (SIZES["hidden_size"],)
        save_file(tensors, tmp_path / "model.safetensors")
        check_source(HfCheckpoint(tmp_path), family, arch)
        tensors["model.embed_scale"] = torch.zeros(3)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(InputError, match=r"model\.embed_scale"):
            check_source(HfCheckpoint(tmp_path), family, arch)
    finally:
        families.cache_clear()
        sys.modules.pop("dapo_mega.models.invented", None)


ROPES = {"full_attention": {"rope_type": "default", "rope_theta": 3e4}, "sliding_attention": {"rope_theta": 2e4}}


@pytest.mark.parametrize("model_type", ["olmo2", "olmo3", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("keys", [{}, {"num_key_value_heads": 2, "rms_norm_eps": 1e-4}, {"rope_parameters": ROPES}])
def test_layers_of_several_kinds_are_those_of_transformers(tmp_path, model_type, keys):
    if "rope_parameters" in keys and model_type in ("olmo2", "gpt_oss"):
        pytest.skip("has one rotation for all layers")
    arch = load_architecture(write_config(tmp_path, model_type, **{"num_hidden_layers": 7, **keys}))[1]
    config = AutoConfig.from_pretrained(tmp_path)
    kinds = getattr(config, "layer_types", ["full_attention"] * 7)
    windowed = {layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
    assert set(range(7)) - arch.full_attention_layers == (windowed or set(range(7)))
    assert arch.sliding_window == (config.sliding_window if windowed else None)
    assert arch.num_query_groups == config.num_key_value_heads
    assert arch.norm_epsilon == config.rms_norm_eps
    assert arch.tied_embeddings == config.tie_word_embeddings
    assert arch.max_positions == config.max_position_embeddings
    rope = config.rope_parameters
    if arch.windowed_rope_theta is not None:
        assert arch.windowed_rope_theta == rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    assert arch.rope_theta == rope["rope_theta"]


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
        ("gemma3_text", {"hidden_activation": "silu"}, "'silu' is not supported for gemma3_text; only 'gelu_pytorch"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("olmo3", {"sliding_window": None}, "layers of kind sliding_attention need a sliding_window"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope scaling of type 'linear' in layers of sliding_attention",
        ),
        ("olmo3", {"rope_parameters": {"full_attention": {"rope_theta": 0.5}}}, r"full_attention\.rope_theta=0.5"),
    ],
)
def test_kinds_of_layers_that_are_not_computed_are_refused(tmp_path, model_type, keys, message):
    with pytest.raises(InputError, match=message):
        load_architecture(write_config(tmp_path, model_type, **keys))


def test_keys_that_are_normed_together_are_not_shared_by_processes(tmp_path):
    arch = load_architecture(write_config(tmp_path, "olmo2", num_key_value_heads=2))[1]
    arch.check_layout(ParallelConfig(tensor=2))
    with pytest.raises(InputError, match=r"parallel\.tensor=4 is more than num_key_value_heads=2: olmo2 has norms"):
        arch.check_layout(ParallelConfig(tensor=4))
