"""tools/convert_checkpoint.py as a program: memory, kill -9, torchrun, exit statuses, and the trainer on its result."""

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from dapo_mega.checkpoints.folders import write_manifest
from dapo_mega.models.hf_checkpoint import HfCheckpoint
from dapo_mega.models.hf_writer import shard_files, write_index
from tests.distributed.launching import REPOSITORY, kill, run_script, start_script, start_workers, wait_for
from tests.distributed.tiny import make_model, make_moe_model

pytestmark = pytest.mark.integration

TOOL = REPOSITORY / "tools" / "convert_checkpoint.py"
MIB, GIB = 2**20, 2**30


def finished(*arguments, status=0):
    ended, output = run_script(TOOL, arguments)
    assert ended == status, output
    assert "Traceback" not in output, output
    return output


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "conversion.json"}


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "a model", tied=True)


def test_every_command_works_on_paths_with_spaces(tmp_path, model):
    converted, back = tmp_path / "in megatron's format", tmp_path / "and back"
    layout = ("--tensor", 2, "--pipeline", 2, "--virtual-pipeline", 2)
    assert "wrote" in finished("hf-to-megatron", model, converted, *layout)
    assert "nothing to do" in finished("hf-to-megatron", model, converted, *layout)
    finished("reshard", converted, tmp_path / "resharded", "--tensor", 1)
    finished("megatron-to-hf", tmp_path / "resharded", back)
    said = finished("verify", model, tmp_path / "resharded")
    assert "all 50 tensors are equal" in said
    assert "100.0% of positions" in said
    said = finished("inspect", converted, "--tensors")
    assert "tensor=2, pipeline=2, virtual_pipeline=2" in said
    assert "model.layers.3.self_attn.q_proj.weight  [48, 48]  float32" in said
    loaded, original = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (back, model))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in original.items())


def test_of_a_runs_folder_the_newest_complete_checkpoint_is_taken(tmp_path, model):
    run, made = tmp_path / "run", tmp_path / "made"
    finished("hf-to-megatron", model, run / "checkpoints" / "step_00000003")
    write_manifest(run / "checkpoints" / "step_00000003")
    (run / "checkpoints" / "step_00000004").mkdir()
    assert f"of the run in {run} step_00000003 is taken\nwrote {made}" in finished("megatron-to-hf", run, made)
    assert "all 50 tensors are equal" in finished("verify", run / "checkpoints", made, "--tensors-only")
    shutil.copytree(model, run / "hf")
    assert f"of the run in {run} hf is taken\nwrote" in finished("hf-to-megatron", run, tmp_path / "again")
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    said = finished("megatron-to-hf", tmp_path / "new", tmp_path / "x", status=2)
    assert "is the folder of a run without a complete checkpoint" in said


def test_differences_and_bad_input_have_their_exit_statuses(tmp_path, model):
    other = shutil.copytree(model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    key, value = (f"model.layers.2.self_attn.{part}_proj.weight" for part in "kv")
    tensors[key], tensors[value] = tensors[value], tensors[key]
    save_file(tensors, other / "model.safetensors")
    said = finished("verify", model, other, "--tensors-only", status=1)
    assert said.splitlines() == [f"{key}: other values", f"{value}: other values", "2 of 50 tensors differ"]
    turned = shutil.copytree(model, tmp_path / "turned")
    config = json.loads((turned / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (turned / "config.json").write_text(json.dumps(config))
    said = finished("verify", model, turned, status=1)
    assert "config.json, rope_theta: 10000.0 and 500.0" in said
    shutil.rmtree(turned)
    for size in ("nan", "inf", "0", "-1", "many"):
        said = finished("hf-to-megatron", model, tmp_path / "target", "--shard-gib", size, status=2)
        assert f"must be a positive number of GiB, not {size}" in said
    (other / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:-100])
    said = finished("hf-to-megatron", other, tmp_path / "target", status=2)
    assert said.startswith("error: ")
    assert "model.safetensors cannot be read" in said
    said = finished("megatron-to-hf", model, tmp_path / "target", status=2)
    assert "megatron-to-hf needs a Megatron one" in said
    assert {path.name for path in tmp_path.iterdir()} == {"a model", "other"}


@pytest.mark.distributed
def test_processes_share_the_files_and_leave_together(tmp_path):
    model = make_moe_model(tmp_path / "model")
    arguments = ["--tensor", "2", "--expert", "2", "--shard-gib", str(40_000 / GIB)]
    finished("hf-to-megatron", model, tmp_path / "by one", *arguments)
    workers = start_workers(TOOL, 3, ["hf-to-megatron", str(model), str(tmp_path / "by three"), *arguments], tmp_path)
    assert wait_for(workers, 240) == [0, 0, 0]
    assert contents(tmp_path / "by three") == contents(tmp_path / "by one")
    (model / "model.safetensors").write_bytes(b"nothing")
    workers = start_workers(TOOL, 2, ["hf-to-megatron", str(model), str(tmp_path / "target"), *arguments], tmp_path)
    assert wait_for(workers, 240, patience_s=60) == [2, 2]
    logs = [(tmp_path / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert [log.count("error:") for log in logs] == [1, 0]


def make_large(folder, num_layers=6):
    """A bf16 checkpoint of 0.4 GiB in shards of two layers; its values repeat, each tensor from its own start.

    Returns the size of its largest tensor in bytes.
    """
    config = Qwen2Config(
        vocab_size=8_000, hidden_size=2048, intermediate_size=4096, num_hidden_layers=num_layers,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    del shapes["lm_head.weight"]
    values = torch.randn(1 << 21).bfloat16().repeat(-(-max(map(torch.Size.numel, shapes.values())) >> 21) + 1)
    names = list(shapes)
    shards = [names[start :: num_layers // 2] for start in range(num_layers // 2)]
    for file, shard in zip(shard_files(len(shards)), shards, strict=True):
        tensors = {
            name: values[(start := 977 * names.index(name)) : start + shapes[name].numel()].view(shapes[name]).clone()
            for name in shard
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
    total = sum(2 * shape.numel() for shape in shapes.values())
    write_index(folder, shards, total)
    assert total > 0.4 * GIB
    return max(2 * shape.numel() for shape in shapes.values())


def peak_memory(command, source, target, *options):
    """Largest resident memory of the tool in bytes, with the pages of the files that it maps."""
    log = target.with_suffix(".log")
    process = start_script(TOOL, [command, source, target, *options], log)
    peak = 0
    while process.exitcode is None:
        with suppress(OSError):  # It ends meanwhile.
            status = Path(f"/proc/{process.pid}/status").read_text()
            lines = dict(line.split(":", 1) for line in status.splitlines())
            peak = max(peak, int(lines.get("VmHWM", "0 kB").split()[0]) * 1024)
        process.join(0.01)
    assert process.exitcode == 0, log.read_text()
    return peak


def test_memory_is_that_of_a_few_tensors_and_a_shard_whatever_the_model(tmp_path):
    if shutil.disk_usage(tmp_path).free < 3 * GIB:
        pytest.skip("needs 3 GiB of disk")
    largest = make_large(tmp_path / "large")
    tiny = make_model(tmp_path / "tiny", tied=True, num_layers=2)
    baseline = peak_memory("hf-to-megatron", tiny, tmp_path / "tiny converted")
    layout = ("--tensor", 4, "--shard-gib", 0.125)
    there = peak_memory("hf-to-megatron", tmp_path / "large", tmp_path / "megatron", *layout) - baseline
    back = peak_memory("megatron-to-hf", tmp_path / "megatron", tmp_path / "back", "--shard-gib", 0.125) - baseline
    # A block, and what it is made of; a shard, and the parameter that is being read with its stored form.
    assert there < 3 * largest + 64 * MIB, (there / MIB, largest / MIB)
    assert back < 0.125 * GIB + 4 * largest + 64 * MIB, (back / MIB, largest / MIB)
    source, result = HfCheckpoint(tmp_path / "large"), HfCheckpoint(tmp_path / "back")
    assert result.names() == source.names()
    for name in source.names():
        assert torch.equal(result.tensor(name).view(torch.int16), source.tensor(name).view(torch.int16)), name
    for folder in ("large", "megatron", "back"):
        shutil.rmtree(tmp_path / folder)


def test_a_killed_conversion_continues_to_the_same_bits(tmp_path):
    model = make_model(tmp_path / "model", tied=True, num_layers=32)
    arguments = ("hf-to-megatron", model, tmp_path / "target", "--shard-gib", 30_000 / GIB)
    process = start_script(TOOL, arguments, tmp_path / "log")
    content = tmp_path / ".target.partial" / "content"
    deadline = time.monotonic() + 120
    while not content.is_dir() or len(list(content.iterdir())) < 3:
        assert time.monotonic() < deadline
        assert process.exitcode is None
        time.sleep(0.001)
    kill([process])
    assert not (tmp_path / "target").exists()
    records = tmp_path / ".target.partial" / "records"
    kept = {file.name: file.stat().st_mtime_ns for file in records.glob("*.json")}
    finished(*arguments)
    finished("hf-to-megatron", model, tmp_path / "at once", *arguments[3:])
    assert contents(tmp_path / "target") == contents(tmp_path / "at once")
    assert len(kept) > 1
    for name, recorded in kept.items():
        assert (tmp_path / "target" / name.removesuffix(".json")).stat().st_mtime_ns <= recorded, (
            f"{name} written again"
        )
