"""A checkpoint is used only when it is exactly the model that its config.json describes; what is wrong is named."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo_mega.config import ParallelConfig
from dapo_mega.conversion.convert import open_checkpoint, to_hf, to_megatron
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.errors import InputError
from dapo_mega.models import load_architecture
from dapo_mega.models.hf_checkpoint import INDEX_FILE, HfCheckpoint, check_source
from dapo_mega.weight_sync.fp8 import quantise
from tests.distributed.tiny import FAMILY_MODELS, VOCAB_SIZE, make_model


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model", tied=True, num_layers=2)


def check(path):
    check_source(HfCheckpoint(path), *load_architecture(path))


def change(path, **tensors):
    """Replace tensors of the only file, or remove those that are None; `__` in names stands for a dot."""
    held = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        held[name.replace("__", ".")] = tensor
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, path / "model.safetensors")


def set_config(path, **values):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_the_shapes_of_every_family_are_those_that_transformers_writes(tmp_path, name):
    check(FAMILY_MODELS[name](tmp_path / "model"))


def test_experts_that_are_stored_together_are_read_as_single_ones(tmp_path):
    model = FAMILY_MODELS["qwen3_moe"](tmp_path / "model")
    single = load_file(model / "model.safetensors")
    fused, prefix = {k: v for k, v in single.items() if ".experts." not in k}, "model.layers.{}.mlp.experts."
    for layer in map(prefix.format, range(4)):
        of_all = [[single[f"{layer}{e}.{part}_proj.weight"] for e in range(4)] for part in ("gate", "up", "down")]
        gate, up, down = map(torch.stack, of_all)
        fused |= {f"{layer}gate_up_proj": torch.cat([gate, up], 1), f"{layer}down_proj": down}
    save_file(fused, model / "model.safetensors")
    checkpoint = HfCheckpoint(model)
    check_source(checkpoint, *load_architecture(model))
    assert checkpoint.names() == single.keys()
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in single.items())
    alone = "model.layers.0.mlp.experts.1.up_proj.weight"
    save_file({**fused, alone: single[alone].clone()}, model / "model.safetensors")
    with pytest.raises(InputError, match=rf"stores {alone} alone and in a stack of experts; remove one"):
        HfCheckpoint(model)
    save_file({**fused, "model.layers.0.mlp.experts.down_proj": torch.zeros(())}, model / "model.safetensors")
    with pytest.raises(InputError, match=r"lacks the tensors model\.layers\.0\.mlp\.experts\.0\.down_proj"):
        check_source(HfCheckpoint(model), *load_architecture(model))


def test_of_a_vision_model_multi_token_prediction_is_kept_too(model):
    before = HfCheckpoint(model).names()
    change(model, mtp__fc__weight=torch.zeros(1), model__visual__norm__weight=torch.zeros(1))
    assert HfCheckpoint(model).names() == before | {"mtp.fc.weight"}


def test_a_missing_and_an_additional_tensor_are_named_together(model):
    change(model, model__norm__weight=None, model__extra__weight=torch.zeros(3))
    with pytest.raises(InputError, match=r"lacks the tensors model\.norm\.weight; .*additional.*model\.extra\.weight"):
        check(model)


def test_a_language_model_under_two_names_is_refused(model):
    change(model, model__language_model__norm__weight=torch.zeros(48))
    with pytest.raises(
        InputError, match=r"stores model\.norm\.weight twice, as model\.[a-z_.]+ and model\.[a-z_.]+; rem"
    ):
        check(model)


def test_at_most_eight_tensors_are_named(model):
    change(model, **{f"extra__{i}": torch.zeros(1) for i in range(11)})
    with pytest.raises(InputError, match=r"extra\.6 and 3 more"):
        check(model)


def test_a_wrong_shape_is_named_with_the_right_one(model):
    change(model, model__layers__1__self_attn__k_proj__weight=torch.zeros(48, 48))
    with pytest.raises(InputError, match=r"layers\.1\.self_attn\.k_proj\.weight \(48, 48\) instead of \(24, 48\)"):
        check(model)


def test_another_vocabulary_size_is_named(model):
    set_config(model, vocab_size=VOCAB_SIZE + 3)
    with pytest.raises(InputError, match=rf"embed_tokens\.weight \({VOCAB_SIZE}, 48\) instead of \({VOCAB_SIZE + 3}"):
        check(model)


def test_integers_are_no_weights(model):
    change(model, model__norm__weight=torch.zeros(48, dtype=torch.int8))
    with pytest.raises(InputError, match=r"unsupported dtypes model\.norm\.weight torch\.int8"):
        check(model)


def test_quantised_and_wide_weights_are_told_from_those_of_another_model(model):
    name = "model.layers.1.self_attn.k_proj.weight"
    held = load_file(model / "model.safetensors")
    for quantised, message in (
        ({name: held[name].to(torch.float8_e5m2)}, r"k_proj\.weight torch\.float8_e5m2: .*convert .* to bfloat16"),
        ({name: held[name].to(torch.float8_e4m3fn)}, r"lacks .*k_proj\.weight_scale_inv, the scales of FP8 weights"),
        (
            {name: held[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1)},
            r"scales \(1,\) for the FP8 weight .*k_proj\.weight \(24, 48\); only one for each block of 128 x 128",
        ),
    ):
        save_file({**held, **quantised}, model / "model.safetensors")
        with pytest.raises(InputError, match=message) as refused:
            check(model)
        assert "different models" not in str(refused.value)
    save_file({name: tensor.double() for name, tensor in held.items()}, model / "model.safetensors")
    with pytest.raises(InputError, match=r"float64 and \d+ more: save the model in float32, float16 or bfloat16"):
        check(model)


def test_weights_in_fp8_blocks_are_read_converted_and_served_as_the_bf16_that_they_stand_for(tmp_path):
    original = FAMILY_MODELS["deepseek_v3"](tmp_path / "fp8", hidden_size=160, intermediate_size=272)
    stored, expected = {}, {}
    for name, tensor in load_file(original / "model.safetensors").items():
        stored[name] = expected[name] = tensor if name.endswith("bias") else tensor.bfloat16()
        if "_proj" not in name or name.endswith("norm.weight"):
            continue
        stored[name], stored[f"{name}_scale_inv"] = quantise(tensor)
        expected[name] = torch.empty_like(tensor, dtype=torch.bfloat16)
        for row, scales in zip(range(0, tensor.shape[0], 128), stored[f"{name}_scale_inv"], strict=True):
            for column, scale in zip(range(0, tensor.shape[1], 128), scales, strict=True):
                block = (slice(row, row + 128), slice(column, column + 128))
                expected[name][block] = (stored[name][block].float() * scale).bfloat16()
    save_file(stored, original / "model.safetensors")
    set_config(original, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    check(original)
    engine = EmbeddedEngine(original, torch.bfloat16)
    engine.load_weights([[(name, HfCheckpoint(original).tensor(name)) for name in expected]], version=0)
    to_megatron(open_checkpoint(original), tmp_path / "megatron", ParallelConfig(), 1 << 30)
    to_hf(open_checkpoint(tmp_path / "megatron"), tmp_path / "back", 1 << 30)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(back[name], tensor)] == []
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"


def test_more_layers_and_experts_than_could_be_listed_are_refused_at_once(tmp_path):
    model = FAMILY_MODELS["qwen3_moe"](tmp_path / "model")
    set_config(model, num_hidden_layers=10_000, num_local_experts=100, num_experts=100)
    with pytest.raises(
        InputError, match=r"holds \d+ tensors where .*num_hidden_layers=10000, 100 experts.* demands 3,"
    ):
        check(model)


def test_a_tied_output_layer_may_be_stored_if_it_is_the_embedding(model):
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    change(model, lm_head__weight=embedding.clone(), model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(6))
    check(model)
    embedding[5, 3] = float("nan")
    change(model, lm_head__weight=embedding.clone(), model__embed_tokens__weight=embedding)
    check(model)
    change(model, lm_head__weight=embedding + 1)
    with pytest.raises(InputError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        check(model)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:20] + b"\xff" * 8 + data[28:]])
def test_a_cut_off_or_damaged_file_is_named(model, damage):
    file = model / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read as safetensors"):
        check(model)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "", ".", "a/../../b", "a\0b"])
def test_files_outside_of_the_folder_are_refused_by_name(model, name):
    names = dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")
    (model / "model.safetensors").rename(model.parent / "outside.safetensors")
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {**names, "model.norm.weight": name}}))
    with pytest.raises(InputError, match=r"index\.json lists files outside of its folder: ") as refused:
        check(model)
    assert name in str(refused.value)


def test_files_in_sub_folders_and_links_of_a_cache_are_read(model):
    names = dict.fromkeys(load_file(model / "model.safetensors"), "shards/one.safetensors")
    (model / "shards").mkdir()
    (model / "model.safetensors").rename(model.parent / "blob")
    (model / "shards" / "one.safetensors").symlink_to("../../blob")
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    check(model)
    assert HfCheckpoint(model).weight_files() == {"shards/one.safetensors"}


@pytest.mark.parametrize("name", ["model.safetensors", INDEX_FILE, "config.json", "tokenizer.json"])
def test_a_fifo_is_refused_and_never_waited_for(model, name):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(InputError, match=rf"{name} is a FIFO, not a file"):
        check(model)


def test_what_a_shard_is_instead_of_a_shard_is_said(model):
    shard = model / "model.safetensors"
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(InputError, match=r"model\.safetensors is a git-lfs pointer, .*git lfs pull"):
        check(model)
    shard.unlink()
    shard.symlink_to("gone")
    with pytest.raises(InputError, match=r"model\.safetensors is a link to a file that does not exist"):
        check(model)
    shard.unlink()
    shard.mkdir()
    with pytest.raises(InputError, match=r"model\.safetensors is a folder"):
        check(model)


def test_a_shard_that_may_not_be_read_is_not_called_missing(model, monkeypatch):
    """Files of mode 0 are readable to root, whom tests may run as."""

    def refuse(file, *_, **__):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"model\.safetensors .*\(Permission denied\); correct its permissions"):
        HfCheckpoint(model)


def test_an_index_that_does_not_fit_its_files_is_refused(model):
    names = dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {**names, "model.ghost": "model.safetensors"}}))
    with pytest.raises(InputError, match=r"index\.json lists model\.ghost"):
        check(model)
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {**names, "model.ghost": "gone.safetensors"}}))
    with pytest.raises(InputError, match=r"gone\.safetensors is missing"):
        check(model)
    (model / INDEX_FILE).write_text('{"weight_map": ')
    with pytest.raises(InputError, match=r"index\.json is not valid JSON"):
        check(model)
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {**names, "model.norm.weight": 3}}))
    with pytest.raises(InputError, match=r"index\.json lists model\.norm\.weight with no name of a file"):
        check(model)


def test_a_dtype_that_torch_weights_cannot_have_is_named_with_its_file(model):
    change(model, model__norm__weight=torch.zeros(48, dtype=torch.complex64))
    with pytest.raises(InputError, match=r"model\.safetensors has the unsupported dtypes model\.norm\.weight C64"):
        check(model)


def test_pickled_weights_are_refused_with_the_way_to_safetensors(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"only safetensors are read; .* save_pretrained"):
        check(model)


def test_only_the_tensors_in_use_keep_their_file_mapped(model):
    file = model / "model.safetensors"
    checkpoint = HfCheckpoint(model)

    def is_mapped():
        return str(file) in Path("/proc/self/maps").read_text()

    assert not is_mapped()
    tensor = checkpoint.tensor("model.norm.weight")
    assert is_mapped()
    del tensor
    assert not is_mapped()
