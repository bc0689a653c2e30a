"""Conversions move every bit, write only what is whole, and continue where they stopped."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from dapo_mega.config import ParallelConfig
from dapo_mega.errors import InputError
from dapo_mega.policy import conversion
from dapo_mega.policy.conversion import open_checkpoint, reshard, to_hf, to_megatron
from dapo_mega.policy.verification import compare_logprobs, different_tensors
from tests.distributed.tiny import FAMILY_MODELS, make_model

TP2 = {"tensor": 2, "sequence": True}
SMALL = 40_000  # bytes of a file: several files of several tensors


def weights(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_weights(found, expected):
    found, expected = weights(found), weights(expected)
    assert list(found)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def in_bf16(folder):
    """Weights of any bits, NaN and -0 among them."""
    tensors = {name: tensor.bfloat16() for name, tensor in weights(folder).items()}
    tensors["model.norm.weight"][:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "conversion.json"}


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_there_and_back_is_exact_for_every_family(tmp_path, name):
    model = FAMILY_MODELS[name](tmp_path / "model")
    checkpoint = open_checkpoint(model)
    layouts = [TP2, {**TP2, "pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}]
    if checkpoint.arch.experts:
        layouts = [{**TP2, "expert_tensor": 2}, {**TP2, "pipeline": 2, "expert": 2}, {"expert": 4}]
    source = checkpoint
    for number, layout in enumerate(layouts):
        target = tmp_path / f"megatron {number}"
        write = reshard if number else to_megatron
        assert write(source, target, ParallelConfig(**layout), SMALL)
        source = open_checkpoint(target)
    to_hf(source, tmp_path / "back", SMALL)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert_same_weights(tmp_path / "back", model)
    assert not list(tmp_path.glob(".*"))


def test_bf16_bits_and_companions_survive(tmp_path):
    model = make_model(tmp_path / "model", tied=False, num_layers=2)
    in_bf16(model)
    (model / "tokenizer.json").write_text("{}")
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(**TP2), SMALL)
    to_hf(open_checkpoint(tmp_path / "megatron"), tmp_path / "back", 1 << 30)
    assert_same_weights(tmp_path / "back", model)
    names = {file.name for file in (tmp_path / "back").iterdir()}
    assert names == {file.name for file in model.iterdir()} | {"conversion.json"}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert different_tensors(open_checkpoint(model), open_checkpoint(tmp_path / "back")) == []


@pytest.mark.parametrize("command", ["to_megatron", "to_hf", "reshard"])
def test_an_interrupted_conversion_continues_and_ends_bit_equal(tmp_path, monkeypatch, command):
    model = make_model(tmp_path / "model", tied=True)
    layout = (ParallelConfig(**TP2),)
    source = model
    if command != "to_megatron":
        source = tmp_path / "megatron"
        to_megatron(open_checkpoint(model), source, *layout, SMALL)
    arguments = () if command == "to_hf" else layout
    convert = getattr(conversion, command)
    convert(open_checkpoint(source), tmp_path / "at once", *arguments, SMALL)

    writer = "_write_shard" if command == "to_hf" else "_write_run"
    original, written = getattr(conversion, writer), []

    def fails_at_the_third(*arguments):
        if len(written) == 2:
            arguments[-2].write_bytes(b"half a file")
            raise KeyboardInterrupt
        written.append(arguments[-2].name)
        return original(*arguments)

    monkeypatch.setattr(conversion, writer, fails_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        convert(open_checkpoint(source), tmp_path / "target", *arguments, SMALL)
    assert not (tmp_path / "target").exists()
    again = []
    monkeypatch.setattr(conversion, writer, lambda *a: (again.append(a[-2].name), original(*a))[1])
    assert convert(open_checkpoint(source), tmp_path / "target", *arguments, SMALL)
    assert again
    assert not set(again) & set(written)
    assert files_of(tmp_path / "target") == files_of(tmp_path / "at once")
    assert not convert(open_checkpoint(source), tmp_path / "target", *arguments, SMALL)


def test_a_partial_result_of_other_options_is_not_continued(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_metadata", interrupted)
        with pytest.raises(KeyboardInterrupt):
            to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(**TP2), SMALL)
    to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    to_megatron(open_checkpoint(model), tmp_path / "expected", ParallelConfig(), SMALL)
    assert files_of(tmp_path / "target") == files_of(tmp_path / "expected")


def test_a_target_that_exists_is_refused_unless_it_is_the_finished_result(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(InputError, match=r"target exists already; give another folder"):
        to_megatron(open_checkpoint(model), target, ParallelConfig(), SMALL)
    target.rmdir()
    to_megatron(open_checkpoint(model), target, ParallelConfig(), SMALL)
    with pytest.raises(InputError, match=r"made from another source or with other options"):
        to_megatron(open_checkpoint(model), target, ParallelConfig(**TP2), SMALL)
    file = next(target.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"exists already and was damaged"):
        to_megatron(open_checkpoint(model), target, ParallelConfig(), SMALL)


def test_a_source_that_is_refused_leaves_nothing_behind(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    with pytest.raises(InputError, match=r"parallel\.tensor=3 does not divide"):
        to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(tensor=3), SMALL)
    tensors = weights(model)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].half()
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(InputError, match=r"up_proj\.weight is torch\.float16, but Megatron stores it"):
        to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_damaged_megatron_checkpoint_is_refused_by_file(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(**TP2), SMALL)
    for name in ("__1_0.distcp", ".metadata"):
        damaged = shutil.copytree(tmp_path / "megatron", tmp_path / f"without {name}")
        (damaged / name).write_bytes((damaged / name).read_bytes()[:-9])
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            open_checkpoint(damaged)
    flipped = tmp_path / "megatron" / "__1_0.distcp"
    data = bytearray(flipped.read_bytes())
    for position in range(2000, len(data), 500):
        data[position] ^= 0xFF
    flipped.write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"cannot be read from .*__1_0\.distcp \("):
        to_hf(open_checkpoint(tmp_path / "megatron"), tmp_path / "target", SMALL)
    assert not (tmp_path / "target").exists()


def test_missing_additional_and_misshapen_tensors_of_a_megatron_checkpoint_are_named(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(), SMALL)
    metadata = FileSystemReader(tmp_path / "megatron").read_metadata()
    stored = metadata.state_dict_metadata
    stored["decoder.extra"] = stored.pop("decoder.final_layernorm.weight")
    (tmp_path / "megatron" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match=r"lacks the tensors model\.norm\.weight; .*decoder\.extra"):
        open_checkpoint(tmp_path / "megatron")
    config = tmp_path / "megatron" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 59}))
    with pytest.raises(InputError, match=r"embed_tokens\.weight \(61, 48\) instead of \(59, 48\)"):
        open_checkpoint(tmp_path / "megatron")


def test_permuted_queries_are_named_and_change_what_the_model_says(tmp_path):
    model = make_model(tmp_path / "model", tied=False, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(**TP2), SMALL)
    left, right = open_checkpoint(model), open_checkpoint(tmp_path / "megatron")
    assert different_tensors(left, right) == []
    equal = compare_logprobs(left, right)
    assert equal.max_difference < 1e-4
    assert equal.argmax_agreement == 1.0
    permuted = shutil.copytree(model, tmp_path / "permuted")
    tensors = weights(model)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, permuted / "model.safetensors", metadata={"format": "pt"})
    assert different_tensors(open_checkpoint(permuted), right) == [f"{name}: other values"]
    assert compare_logprobs(open_checkpoint(permuted), right).max_difference > 1e-2
