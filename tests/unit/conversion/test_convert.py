"""Conversions move every bit, write only what is whole, and continue where they stopped."""

import contextlib
import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from dapo_mega.checkpoints.folders import write_manifest
from dapo_mega.config import ParallelConfig
from dapo_mega.conversion import convert as conversion
from dapo_mega.conversion import resumable_folder
from dapo_mega.conversion.convert import open_checkpoint, reshard, to_hf, to_megatron
from dapo_mega.conversion.inspection import describe
from dapo_mega.conversion.merging import merge
from dapo_mega.conversion.verification import (
    compare_distributions,
    compare_logprobs,
    different_fields,
    different_tensors,
)
from dapo_mega.errors import InputError
from dapo_mega.models.hf_checkpoint import HfCheckpoint
from dapo_mega.models.megatron_format.writing import Block, write_blocks
from tests.distributed.tiny import DELTA_MODELS, FAMILIES, FAMILY_MODELS, add_mtp_layers, make_model

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


@contextlib.contextmanager
def interrupted_at(monkeypatch, module, name):
    """What is done inside ends when it comes to call this function."""

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


def set_vocab_size(folder, value):
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": value}))


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_is_exact_for_every_family(tmp_path, name):
    model = FAMILY_MODELS[name](tmp_path / "model")
    checkpoint = open_checkpoint(model)
    layouts = [TP2, {**TP2, "pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}]
    if checkpoint.arch.experts:
        cut = "expert" if checkpoint.arch.experts.has_biases else "expert_tensor"
        layouts = [{**TP2, cut: 2}, {**TP2, "pipeline": 2, "expert": 2}, {"expert": 4}]
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


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_layers_of_multi_token_prediction_come_back_bit_by_bit(tmp_path, name):
    model = {**FAMILY_MODELS, **DELTA_MODELS}[name](tmp_path / "model", num_nextn_predict_layers=1)
    added = add_mtp_layers(model)
    to_megatron(open_checkpoint(model), tmp_path / "whole", ParallelConfig(), 2**30)
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(**TP2, expert_tensor=2), SMALL)
    reshard(open_checkpoint(tmp_path / "megatron"), tmp_path / "resharded", ParallelConfig(pipeline=2), SMALL)
    for source in ("whole", "resharded"):
        to_hf(open_checkpoint(tmp_path / source), tmp_path / f"{source} back", SMALL)
        assert_same_weights(tmp_path / f"{source} back", model)
    assert added.keys() < HfCheckpoint(tmp_path / "whole back").names()
    assert json.loads((tmp_path / "whole back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    for file in (tmp_path / "megatron").glob("mtp-*1-of-*"):
        file.unlink()
    with pytest.raises(InputError, match=r"megatron has only some of the files mtp-\*\.safetensors: .*; copy it again"):
        open_checkpoint(tmp_path / "megatron")


def test_layers_of_multi_token_prediction_in_megatrons_names_are_left_out(tmp_path, caplog):
    """As Megatron-LM writes a model that it trained with them; a folder with config.json alone has none to give."""
    model = FAMILY_MODELS["deepseek_v3"](tmp_path / "model")
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(), SMALL)
    metadata = FileSystemReader(tmp_path / "megatron").read_metadata()
    stored = metadata.state_dict_metadata
    stored["mtp.layers.0.eh_proj.weight"] = stored["decoder.final_layernorm.weight"]
    (tmp_path / "megatron" / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "bare").mkdir()
    (tmp_path / "megatron" / "config.json").rename(tmp_path / "bare" / "config.json")
    to_hf(open_checkpoint(tmp_path / "megatron", tmp_path / "bare"), tmp_path / "back", 1 << 30)
    assert_same_weights(tmp_path / "back", model)
    assert "its 1 tensors of multi-token prediction are left out" in caplog.text


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

    writer = "_write_shard" if command == "to_hf" else "write_blocks"
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


def move_into_sub_folder(model):
    """The only shard goes to a folder of its own, which an index lists."""
    (model / "shards").mkdir()
    names = dict.fromkeys(load_file(model / "model.safetensors"), "shards/one.safetensors")
    (model / "model.safetensors").rename(model / "shards" / "one.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_a_source_whose_sub_folder_changed_is_not_continued_from(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    move_into_sub_folder(model)
    with interrupted_at(monkeypatch, conversion, "write_metadata"):
        to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    shard = model / "shards" / "one.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, metadata={"format": "pt"})
    to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    assert different_tensors(open_checkpoint(model), open_checkpoint(tmp_path / "target")) == []


def test_weights_that_are_nan_or_infinite_are_named_once(tmp_path, caplog):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    in_bf16(model)
    tensors = weights(model)
    for layer, value in enumerate((float("nan"), float("-inf"))):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(**TP2), SMALL)
    reshard(open_checkpoint(tmp_path / "megatron"), tmp_path / "again", ParallelConfig(), SMALL)
    to_hf(open_checkpoint(tmp_path / "again"), tmp_path / "back", SMALL)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 3
    for warning in warnings:
        assert "3 tensors hold NaN or infinite values" in warning
        for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"):
            assert name in warning
    left, right = open_checkpoint(model), open_checkpoint(tmp_path / "again")
    assert different_tensors(left, right) == []
    found = compare_logprobs(left, right)
    assert found.agrees
    assert found.sentence().startswith(
        "log-probs are NaN at 58 of 58 positions of the first model and at 58 of the sec"
    )


def test_log_probs_that_are_nan_on_one_side_differ():
    sound = torch.tensor([[0.7, 0.3], [0.5, 0.5]]).log()
    broken = sound.clone()
    broken[1, 0] = float("nan")
    found = compare_distributions(sound, broken)
    assert not found.agrees
    assert "NaN at 0 of 2 positions of the first model and at 1 of the second" in found.sentence()
    assert found.sentence().endswith("the models differ")
    assert compare_distributions(broken, broken).agrees
    assert not compare_distributions(broken, broken + torch.tensor([[0.0, 1.0], [0.0, 0.0]])).agrees
    certain = torch.tensor([[1.0, 0.0]]).log()
    assert compare_distributions(certain, certain).max_difference == 0.0


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_of_new_files(tmp_path, umask):
    before = os.umask(umask)
    try:
        model = make_model(tmp_path / "model", tied=True, num_layers=2)
        to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(), SMALL)
        to_hf(open_checkpoint(tmp_path / "megatron"), tmp_path / "back", SMALL)
    finally:
        os.umask(before)
    modes = {
        file.name: file.stat().st_mode & 0o777 for name in ("megatron", "back") for file in (tmp_path / name).iterdir()
    }
    assert set(modes.values()) == {0o666 & ~umask}


def test_a_target_that_is_a_dangling_link_is_refused_before_the_work(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    (tmp_path / "target").symlink_to("gone")
    monkeypatch.setattr(resumable_folder._Writers, "write", lambda *_: pytest.fail("worked"))
    with pytest.raises(InputError, match=r"target is a link to a folder that does not exist"):
        to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "target"}


@pytest.mark.parametrize(
    "content", ['{"made_from": 1, "files": 3}', "[1]", "null", "3", "[" * 100_000, "", '{"files": {}}']
)
def test_records_of_another_shape_are_no_finished_conversion(tmp_path, content):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    (tmp_path / "target" / "conversion.json").write_text(content)
    with pytest.raises(InputError, match=r"target exists already"):
        to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    with pytest.raises(InputError, match=r"conversion\.json (is not valid JSON|holds no)"):
        list(describe(open_checkpoint(tmp_path / "target"), False))


def test_records_of_another_shape_are_written_again(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    with interrupted_at(monkeypatch, conversion, "write_metadata"):
        to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    records = sorted((tmp_path / ".target.partial" / "records").iterdir())
    for record, content in zip(records, ("[1]", "null", "[" * 100_000, "3"), strict=False):
        record.write_text(content)
    to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    assert different_tensors(open_checkpoint(model), open_checkpoint(tmp_path / "target")) == []


def test_more_layers_than_a_megatron_checkpoint_holds_are_refused_at_once(tmp_path):
    model = FAMILY_MODELS["qwen3_moe"](tmp_path / "model")
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(), SMALL)
    config = tmp_path / "megatron" / "config.json"
    sizes = {"num_hidden_layers": 10_000, "num_local_experts": 100, "num_experts": 100}
    config.write_text(json.dumps({**json.loads(config.read_text()), **sizes}))
    with pytest.raises(InputError, match=r"tensors where config\.json \(num_hidden_layers=10000, 100 experts"):
        open_checkpoint(tmp_path / "megatron")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "vocabulary.json", "loop.json"])
def test_special_files_are_refused_and_never_waited_for(tmp_path, name):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(), SMALL)
    (tmp_path / "megatron" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "megatron" / name)
    with pytest.raises(InputError, match=rf"{name} is a FIFO"):
        open_checkpoint(tmp_path / "megatron")


def test_a_deleted_block_file_is_missing_not_empty(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(), SMALL)
    (tmp_path / "megatron" / "__0_1.distcp").unlink()
    with pytest.raises(InputError, match=r"__0_1\.distcp is missing; copy the checkpoint again"):
        open_checkpoint(tmp_path / "megatron")


def test_a_partial_result_of_other_options_is_not_continued(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    with interrupted_at(monkeypatch, conversion, "write_metadata"):
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
    for name, positions in {
        "all": range(2000, 20_000, 500),
        "data": [middle_of_a_block(tmp_path / "megatron")],
    }.items():
        damaged = shutil.copytree(tmp_path / "megatron", tmp_path / f"with {name} flipped")
        data = bytearray((damaged / "__1_0.distcp").read_bytes())
        for position in positions:
            data[position] ^= 0xFF
        (damaged / "__1_0.distcp").write_bytes(bytes(data))
        with pytest.raises(InputError, match=r"'\S+' cannot be read from .*__1_0\.distcp \("):
            to_hf(open_checkpoint(damaged), tmp_path / "target", SMALL)
        assert not (tmp_path / "target").exists()


def middle_of_a_block(folder):
    """Position in the file of a byte of a weight."""
    places = FileSystemReader(folder).read_metadata().storage_data
    place = next(place for index, place in places.items() if "linear_fc1.weight" in index.fqn
                 and place.relative_path == "__1_0.distcp")  # fmt: skip
    return place.offset + place.length // 2


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", b"\x80\x04\x95", b"\x80\x04(.", b"\x80\x04X\x01\x00\x00\x00\xff.", b"N."]
)
def test_metadata_that_is_no_pickle_of_a_checkpoint_is_refused_by_file(tmp_path, content):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    (model / ".metadata").write_bytes(content)
    with pytest.raises(InputError, match=r"\.metadata cannot be read"):
        open_checkpoint(model)


def test_blocks_without_metadata_are_refused_as_incomplete(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(), SMALL)
    (tmp_path / "megatron" / ".metadata").unlink()
    with pytest.raises(InputError, match=r"\.distcp files but no \.metadata"):
        open_checkpoint(tmp_path / "megatron")


def test_a_full_disk_is_named_with_the_file():
    with pytest.raises(InputError, match=r"cannot write /dev/full \(.*No space left on device\)"):
        write_blocks([], {"object": b"bytes"}, Path("/dev/full"), lambda _: None)


def test_a_block_that_does_not_fit_is_named_with_the_file_and_the_reason(tmp_path):
    size = 1 << 20
    block = Block("key", (size,), torch.uint8, (0,), (size,), lambda: torch.zeros(size, dtype=torch.uint8))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        with pytest.raises(InputError, match=r"cannot write .*block \(.*File too large\); free space"):
            write_blocks([block], {}, tmp_path / "block", lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("vocab_size", [60, 62])
def test_another_vocabulary_size_is_refused_even_if_padding_hides_it(tmp_path, vocab_size):
    """61 rows are stored as 62, half of them on each of two processes."""
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "there", ParallelConfig(**TP2), SMALL)
    reshard(open_checkpoint(tmp_path / "there"), tmp_path / "again", ParallelConfig(**TP2), SMALL)
    for folder in ("there", "again"):
        set_vocab_size(tmp_path / folder, vocab_size)
        with pytest.raises(InputError, match=rf"embed_tokens\.weight \(61, 48\) instead of \({vocab_size}, 48\)"):
            open_checkpoint(tmp_path / folder)


def test_trained_rows_are_padding_only_if_the_folder_says_so(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    tensors = weights(model)
    name = "model.embed_tokens.weight"
    tensors[name] = torch.randn(128, 48)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    set_vocab_size(model, 128)
    folder = tmp_path / "megatron"
    to_megatron(open_checkpoint(model), folder, ParallelConfig(), SMALL)
    (folder / "vocabulary.json").unlink()
    set_vocab_size(folder, 100)
    with pytest.raises(InputError, match=r"word_embeddings\.weight' has 128 rows, .*beyond vocab_size=100 .*not zero"):
        open_checkpoint(folder)
    (folder / "vocabulary.json").write_text('{"vocab_size": 100}')
    assert torch.equal(open_checkpoint(folder).source.tensor(name), tensors[name][:100])
    (folder / "vocabulary.json").write_text("100")
    with pytest.raises(InputError, match=r"vocabulary\.json holds no JSON object"):
        open_checkpoint(folder)


def test_rows_of_zeros_are_padding_in_a_folder_of_another_writer(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(**TP2), SMALL)
    (tmp_path / "megatron" / "vocabulary.json").unlink()
    assert different_tensors(open_checkpoint(model), open_checkpoint(tmp_path / "megatron")) == []


def test_wrong_tensors_of_a_megatron_checkpoint_are_named(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(), SMALL)
    metadata = FileSystemReader(tmp_path / "megatron").read_metadata()
    stored = metadata.state_dict_metadata
    stored["decoder.extra"] = stored.pop("decoder.final_layernorm.weight")
    (tmp_path / "megatron" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match=r"lacks the tensors model\.norm\.weight; .*decoder\.extra"):
        open_checkpoint(tmp_path / "megatron")
    set_vocab_size(tmp_path / "megatron", 59)
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


def test_models_that_config_json_tells_apart_are_told_apart(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    other = shutil.copytree(model, tmp_path / "other")
    assert different_fields(open_checkpoint(model), open_checkpoint(other)) == []
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (other / "config.json").write_text(json.dumps(config))
    found = different_fields(open_checkpoint(model), open_checkpoint(other))
    assert found == ["rope_theta: 10000.0 and 500.0"]


def test_checkpoints_without_config_json_take_the_given_models(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(), SMALL)
    bare = shutil.copytree(model, tmp_path / "bare")
    for folder in (bare, tmp_path / "megatron"):
        (folder / "config.json").unlink()
    found = compare_logprobs(open_checkpoint(bare, model), open_checkpoint(tmp_path / "megatron", model))
    assert found.agrees
    assert not (bare / "config.json").exists()


def test_the_best_token_must_agree_where_it_leads_beyond_tolerance():
    left = torch.tensor([[0.7, 0.2, 0.1], [0.4001, 0.4, 0.2]]).log()
    assert compare_distributions(left, left[:, [1, 0, 2]]).argmax_agreement == 0.5
    tied = compare_distributions(left[1:], left[1:, [1, 0, 2]])
    assert tied.agrees
    just_apart = torch.tensor([[0.4003, 0.4, 0.1997], [0.4, 0.4005, 0.1995]]).log()
    found = compare_distributions(just_apart[:1], just_apart[1:])
    assert found.argmax_agreement == 0.0
    assert not found.agrees


def test_reshard_refuses_a_damaged_training_checkpoint(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    whole = tmp_path / "megatron"
    to_megatron(open_checkpoint(model), whole, ParallelConfig(), SMALL)
    for name in ("loop.json", "loop.npz"):
        (whole / name).write_text('{"step": 3}')
    write_manifest(whole)
    damages = {
        "manifest.json is missing": lambda folder: (folder / "manifest.json").unlink(),
        "loop.npz is missing": lambda folder: (folder / "loop.npz").unlink(),
        "loop.json is missing": lambda folder: (folder / "loop.json").unlink(),
        "loop.json has 2 of 11 bytes": lambda folder: (folder / "loop.json").write_text("{}"),
    }
    for problem, damage in damages.items():
        damage(damaged := shutil.copytree(whole, tmp_path / problem))
        with pytest.raises(InputError, match=rf"is damaged \({problem}\); take another checkpoint"):
            reshard(open_checkpoint(damaged), tmp_path / "target", ParallelConfig(), SMALL)
    with pytest.raises(InputError, match=r"common\.pt lacks the optimizer's settings"):
        reshard(open_checkpoint(whole), tmp_path / "target", ParallelConfig(), SMALL)
    assert not list(tmp_path.glob("*target*"))


def test_damaged_small_files_of_a_checkpoint_are_named_before_work(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    megatron = tmp_path / "megatron"
    to_megatron(open_checkpoint(model), megatron, ParallelConfig(), SMALL)
    common = (megatron / "common.pt").read_bytes()
    for content in (b"", b"text", common[:-40]):
        (megatron / "common.pt").write_bytes(content)
        with pytest.raises(InputError, match=r"common\.pt cannot be read"):
            reshard(open_checkpoint(megatron), tmp_path / "target", ParallelConfig(), SMALL)
    for file, contents in (("conversion.json", ("", "{}", "[]")), ("loop.json", ("", "{}")), ("loop.npz", ("", "x"))):
        sound = megatron / file
        before = sound.read_bytes() if sound.exists() else b'{"step": 3}'
        for content in contents:
            sound.write_text(content)
            with pytest.raises(InputError, match=rf"{file} (cannot be read|is not valid JSON|holds no)"):
                list(describe(open_checkpoint(megatron), False))
        sound.write_bytes(before)
    assert not list(tmp_path.glob("*target*"))


def test_a_full_disk_is_an_error_of_one_sentence(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(), SMALL)

    def full(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(conversion, "save_shard", full)
    with pytest.raises(InputError, match=r"cannot write .*model-00001.* \(.*No space left.*\); free space and start"):
        to_hf(open_checkpoint(tmp_path / "megatron"), tmp_path / "target", SMALL)


def test_what_no_conversion_wrote_is_never_replaced(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    partial = tmp_path / ".target.partial"
    for name in ("notes.txt", "content/weights.bin", "conversion.json"):
        (partial / name).parent.mkdir(parents=True)
        (partial / name).write_text("mine")
        with pytest.raises(InputError, match=rf"\.target\.partial holds {name.split('/')[-1]}, which no conversion"):
            to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
        assert (partial / name).read_text() == "mine"
        shutil.rmtree(partial)
    # What a crash leaves before the record is there.
    (partial / "records").mkdir(parents=True)
    (partial / "conversion.json.tmp").write_text("{")
    assert to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    with pytest.raises(InputError, match=r"^/ cannot be written"):
        to_megatron(open_checkpoint(model), Path("/"), ParallelConfig(), SMALL)


def test_a_finished_conversions_rest_is_removed_by_the_next_start(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    with interrupted_at(monkeypatch, resumable_folder, "_discard"):
        to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    assert (tmp_path / ".target.partial").is_dir()
    assert not to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "target"}


def test_a_second_conversion_to_the_same_target_is_refused_while_one_runs(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", tied=True, num_layers=2)
    original, refused = conversion.write_metadata, []

    def starts_another(*arguments):
        with pytest.raises(
            InputError, match=r"target is being written by another command; wait until it ends"
        ) as error:
            to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
        refused.append(error)
        return original(*arguments)

    monkeypatch.setattr(conversion, "write_metadata", starts_another)
    assert to_megatron(open_checkpoint(model), tmp_path / "target", ParallelConfig(), SMALL)
    assert len(refused) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"model", "target"}


def test_a_merged_model_is_the_weighted_mean(tmp_path):
    """Of either format; with all weight on one it is that one to the bit."""
    names = ("first", "second", "third")
    made = [make_model(tmp_path / name, tied=False, seed=seed) for seed, name in enumerate(names)]
    to_megatron(open_checkpoint(made[2]), tmp_path / "megatron", ParallelConfig(**TP2), SMALL)
    models = [open_checkpoint(path) for path in (*made[:2], tmp_path / "megatron")]
    assert merge(models, [3.0, 1.0, 4.0], tmp_path / "mean", SMALL)
    held = [weights(path) for path in made]
    for name, tensor in weights(tmp_path / "mean").items():
        mean = sum(share * each[name].double() for share, each in zip((0.375, 0.125, 0.5), held, strict=True))
        assert torch.allclose(tensor.double(), mean, rtol=1e-6, atol=1e-7), name
    assert not merge(models, [3.0, 1.0, 4.0], tmp_path / "mean", SMALL), "finished already"
    merge(models, [0.0, 2.0, 0.0], tmp_path / "one", SMALL)
    assert_same_weights(tmp_path / "one", made[1])
    with pytest.raises(InputError, match="was made from another source"):
        merge(models, [1.0, 1.0, 1.0], tmp_path / "mean", SMALL)


def test_models_that_do_not_fit_are_not_merged(tmp_path):
    model = open_checkpoint(make_model(tmp_path / "model", tied=False))
    tied = open_checkpoint(make_model(tmp_path / "tied", tied=True))
    with pytest.raises(InputError, match="cannot be merged: tied_embeddings: False and True"):
        merge([model, tied], [1.0, 1.0], tmp_path / "mean", SMALL)
    for given in ([1.0], [1.0, -0.5], [0.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(InputError, match="2 models need as many weights of 0 or more that are not all 0"):
            merge([model, model], given, tmp_path / "mean", SMALL)
    assert not (tmp_path / "mean").exists()
