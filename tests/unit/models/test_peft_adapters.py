"""What adapters are of, and one line for those that a model cannot have."""

import json
from pathlib import Path

import pytest

from dapo_mega.config import LoraConfig
from dapo_mega.errors import InputError
from dapo_mega.models import load_architecture
from dapo_mega.models.hf_checkpoint import all_tensors
from dapo_mega.models.peft_adapters import adapted, check_lora, trained_names
from tests.distributed.test_lora import make_adapter
from tests.distributed.tiny import (
    make_deepseek_v3_model,
    make_gpt_oss_model,
    make_moe_model,
    make_phi3_model,
    make_qwen3_5_model,
    make_qwen3_model,
)

SOME = ("q_proj", "down_proj")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return make_qwen3_model(tmp_path_factory.mktemp("dense"))


def check(model, **lora):
    check_lora(LoraConfig(**{"rank": 4, "alpha": 8.0, **lora}), *load_architecture(model))


def test_all_linear_layers_are_those_of_attention_mlps_and_experts(dense, tmp_path):
    experts, fused = make_moe_model(tmp_path / "experts"), make_phi3_model(tmp_path / "fused")
    stacked = make_gpt_oss_model(tmp_path / "stacked")
    for model, count in ((dense, 4 * 7), (experts, 4 * (4 + 4 * 3)), (fused, 4 * 4), (stacked, 4 * (4 + 4 * 2))):
        names = trained_names(*load_architecture(model), ("all-linear",))
        assert len(names) == 2 * count
        out = ("norm", "embed", "lm_head", "mlp.gate.", "router", "bias")
        assert not any(part in name for name in names for part in out)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"targets": "q_proj,qproj"}, "lora.targets: 'qproj' is no linear layer of qwen3.*q_proj"),
        ({"targets": ("embed_tokens",)}, "'embed_tokens' is no linear layer"),
        ({"targets": ("lm_head",)}, "'lm_head' is no linear layer"),
        ({"rank": 49}, "lora.rank=49 is larger than .*, which is 40 x 48; set it to at most 40"),
    ],
)
def test_adapters_that_the_model_cannot_have_are_refused(dense, given, said):
    with pytest.raises(InputError, match=said) as found:
        check(dense, **given)
    assert "\n" not in str(found.value)


def test_adapters_that_engines_cannot_take_are_not_sent(dense, tmp_path):
    experts = make_moe_model(tmp_path)
    check(dense, send="adapters")
    check(dense, send="adapters", targets=("o_proj", "gate_proj", "up_proj"))
    for model, targets, said in (
        (dense, ("q_proj", "v_proj"), "q_proj, k_proj, v_proj are one layer, of which .* leaves a part out"),
        (experts, ("all-linear",), "adapters of experts is not supported yet; set lora.send=merged"),
    ):
        with pytest.raises(InputError, match=said):
            check(model, send="adapters", targets=targets)


def test_the_layers_of_latent_attention_and_delta_rules_are_targets_and_are_not_sent(tmp_path):
    latent, delta = make_deepseek_v3_model(tmp_path / "latent"), make_qwen3_5_model(tmp_path / "delta")
    shared = {"o_proj", "gate_proj", "up_proj", "down_proj"}
    for model, own in (
        (latent, {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}),
        (delta, {f"in_proj_{part}" for part in ("qkv", "z", "b", "a")} | {"out_proj", "q_proj", "k_proj", "v_proj"}),
    ):
        check(model)
        names = trained_names(*load_architecture(model), ("all-linear",))
        assert {name.split(".")[-3] for name in names} == own | shared
        with pytest.raises(InputError, match=r"layers.0.* is not supported yet; set lora.send=merged"):
            check(model, send="adapters")
    check(delta, rank=16)
    check(delta, send="adapters", targets=("q_proj", "k_proj", "v_proj"))


def test_experts_in_one_parameter_are_targets_by_its_name(tmp_path):
    model, lora = make_gpt_oss_model(tmp_path / "model"), {"rank": 4, "alpha": 8.0, "dropout": 0.1}
    given = {**lora, "targets": ("q_proj", "mlp.experts.down_proj")}
    adapter = make_adapter(tmp_path / "adapter", model, LoraConfig(**given))
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj"]
    assert config["target_parameters"] == ["mlp.experts.down_proj"]
    assert config["lora_dropout"] == 0, "peft refuses it beside such parameters"
    check(model, **given, path=str(adapter))
    for targets, said in (
        (("down_proj_bias",), "'down_proj_bias' is no linear layer of gpt_oss .* among down_proj, gate_up_proj, k_"),
        (("q_proj",), r"has .*experts.lora_A.* unlike .* \['q_proj'\] and target_parameters, \['mlp.experts.down"),
        (("q_proj", "gate_up_proj"), r"experts.lora_A.weight is \[16, 32\], and for this model it would be \[16, 48\]"),
    ):
        with pytest.raises(InputError, match=said):
            check(model, **{**given, "targets": targets}, path=str(adapter))
    with pytest.raises(InputError, match=r"adapters of experts is not supported yet"):
        check(model, send="adapters")


def changed(folder: Path, **config):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))


def of_another_size(folder, model):
    other = make_qwen3_model(folder.parent / "other", intermediate_size=96)
    adapter = make_adapter(folder.parent / "other_adapter", other, LoraConfig(rank=4, alpha=8.0, targets=SOME))
    return {"path": str(adapter)}


def with_more_layers(folder, model):
    other = make_qwen3_model(folder.parent / "deeper", num_hidden_layers=5)
    return {
        "path": str(make_adapter(folder.parent / "deeper_adapter", other, LoraConfig(rank=4, alpha=8.0, targets=SOME)))
    }


def damaged(folder, model):
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    return {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder, model: {"rank": 2}, "lora.rank=2 but the adapter in .* has r=4; set lora.rank=4"),
        (lambda folder, model: {"alpha": 4.0}, "lora.alpha=4.0 but the adapter in .* has lora_alpha=8.0"),
        (
            lambda folder, model: {"targets": ("q_proj",)},
            r"adapter_model.safetensors has .*down_proj.*set lora.targets",
        ),
        (of_another_size, r"down_proj.lora_A.weight is \[4, 96\], and for this model it would be \[4, 80\]"),
        (with_more_layers, "has base_model.model.model.layers.4.* and 3 more"),
        (lambda folder, model: changed(folder, use_dora=True), "has use_dora=True, which is not supported"),
        (lambda folder, model: changed(folder, modules_to_save=["lm_head"]), "has modules_to_save="),
        (lambda folder, model: changed(folder, target_parameters=["mlp.experts.x"]), "has target_parameters="),
        (damaged, "cannot be read as safetensors"),
        (lambda folder, model: {"path": str(folder.parent / "none")}, "adapter_config.json is missing; give a folder"),
    ],
)
def test_an_adapter_of_something_else_is_refused(dense, tmp_path, change, said):
    adapter = make_adapter(tmp_path / "adapter", dense, LoraConfig(rank=4, alpha=8.0, targets=SOME))
    given = {"path": str(adapter), "targets": SOME}
    check(dense, **given)
    with pytest.raises(InputError, match=said) as found:
        check(dense, **{**given, **(change(adapter, dense) or {})})
    assert "\n" not in str(found.value)


def test_targets_within_fused_layers_are_told_apart(dense):
    weights = adapted(all_tensors(*load_architecture(dense)), ("v_proj", "up_proj"))
    assert {(weight.placed.hf[0].split(".")[-2], weight.parts) for weight in weights} == {
        ("q_proj", (2,)),
        ("gate_proj", (1,)),
    }
    names = [factor.hf[-1].removeprefix("base_model.model.model.layers.0.") for factor in weights[0].factors()]
    assert names == ["self_attn.v_proj.lora_A.weight", "self_attn.v_proj.lora_B.weight"]
