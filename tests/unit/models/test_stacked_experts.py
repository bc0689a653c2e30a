"""Experts in one tensor, also in MXFP4: read and written with transformers' bits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dapo_mega.config import ParallelConfig
from dapo_mega.conversion.convert import open_checkpoint, to_hf, to_megatron
from dapo_mega.engines.sglang.engine_model import model_difference
from dapo_mega.errors import InputError
from dapo_mega.models import load_architecture
from dapo_mega.models.families import find_family
from dapo_mega.models.layouts import from_mxfp4
from tests.distributed.tiny import make_gpt_oss_model

GIB = 1 << 30


def test_every_byte_and_every_scale_becomes_what_it_is_in_transformers():
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1).expand(1, 256, 16)
    expected = convert_moe_packed_tensors(blocks, scales)[0]
    found = from_mxfp4(blocks[0], scales[0])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.contiguous().view(torch.int16), expected.view(torch.int16))


def in_mxfp4(folder):
    """The model in the folder as the originals are, in two files; returns its tensors as transformers reads them."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)
    stored, expected = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = expected[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    (folder / "model.safetensors").unlink()
    files = {"scales.safetensors": lambda name: name.endswith("_scales"), "rest.safetensors": lambda name: True}
    weight_map = {}
    for file, belongs in files.items():
        part = {name: tensor for name, tensor in stored.items() if belongs(name) and name not in weight_map}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.fixture
def original(tmp_path):
    folder = make_gpt_oss_model(tmp_path / "original", hidden_size=64)
    return folder, in_mxfp4(folder)


def test_an_original_is_exported_in_bf16_with_the_bits_of_transformers(tmp_path, original):
    folder, expected = original
    to_megatron(open_checkpoint(folder), tmp_path / "megatron", ParallelConfig(expert=2, pipeline=2), GIB)
    to_hf(open_checkpoint(tmp_path / "megatron"), tmp_path / "back", GIB)
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.int16), tensor.contiguous().view(torch.int16)), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"


def test_an_original_without_its_scales_is_refused_by_name(original):
    folder, _ = original
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    kept = {name: file for name, file in listed.items() if not name.endswith("_scales")}
    index.write_text(json.dumps({"weight_map": kept}))
    with pytest.raises(InputError, match=r"lacks the tensors model\.layers\.0\.mlp\.experts\.0\.down_proj,"):
        open_checkpoint(folder)


def test_an_engine_of_the_original_is_refused_because_updates_do_not_reach_it(original):
    folder, _ = original
    described = json.loads((folder / "config.json").read_text())
    arch = load_architecture(folder)[1]
    assert "its weights are in MXFP4" in model_difference(described, arch)
    del described["quantization_config"]
    assert model_difference(described, arch) == ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_bias": False}, "attention_bias=false"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha other than 1\.702"),
        ({"layer_types": ["full_attention"] * 3}, r"3 entries of \['full_attention'\] for num_hidden_layers=4"),
        ({"layer_types": ["chunked_attention"] * 4}, "must be full_attention or sliding_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "only weights in bf16"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, keys, message):
    folder = make_gpt_oss_model(tmp_path / "model")
    config = {**json.loads((folder / "config.json").read_text()), **keys}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        load_architecture(folder)


def test_experts_with_biases_are_not_cut(tmp_path):
    raw = json.loads((make_gpt_oss_model(tmp_path / "model") / "config.json").read_text())
    arch = find_family("gpt_oss").read(raw)
    with pytest.raises(InputError, match=r"parallel\.expert_tensor=2 is not supported for gpt_oss"):
        arch.check_layout(ParallelConfig(tensor=2, sequence=True, expert_tensor=2))
    arch.check_layout(ParallelConfig(tensor=2, sequence=True, expert=2))
