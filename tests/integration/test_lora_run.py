"""A whole run that trains adapters: it goes on to the bit, its checkpoints hold adapters only, its export is merged."""

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import TensorStorageMetadata

from dapo_mega.checkpoints.folders import CheckpointFolders
from dapo_mega.errors import InputError
from dapo_mega.evaluation.model_folder import open_model
from dapo_mega.metrics import read_metrics
from dapo_mega.models.megatron_format.pickles import read_metadata
from dapo_mega.models.stored_model import open_policy
from tests.distributed.launching import run_script

from .runs import TRAIN, decisive, finish, prepare, start

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

LORA = ("lora.rank=4", "lora.alpha=8", "lora.dropout=0.2", "algorithm.kl.coefficient=0.05")
SHORT = ("checkpoint.every=2", "evaluation.every=0", "evaluation.at_start=false", "evaluation.at_end=false")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder, and the folders of a run of 3 steps without and with an interruption after 2."""
    folder = tmp_path_factory.mktemp("lora")
    config = prepare(folder)
    whole, interrupted = folder / "whole", folder / "interrupted"
    finish(start(config, 2, whole, *LORA, *SHORT, "num_steps=3"), whole)
    for steps in (2, 3):
        finish(start(config, 2, interrupted, *LORA, *SHORT, f"num_steps={steps}"), interrupted)
    return folder, whole, interrupted


def tensors(folder):
    return load_file(next(folder.glob("*.safetensors")))


def test_a_run_goes_on_to_the_bit(runs):
    _, whole, interrupted = runs
    for name in ("hf", "adapter"):
        expected, got = tensors(whole / name), tensors(interrupted / name)
        assert expected.keys() == got.keys()
        assert all(torch.equal(got[key], tensor) for key, tensor in expected.items()), name
    last, again = (decisive(read_metrics(run / "metrics.jsonl")[-1]) for run in (whole, interrupted))
    assert last == again
    assert last["policy/kl_to_reference"] > 0
    assert last["policy/grad_norm"] > 0


def test_the_export_is_the_model_with_the_adapter_merged(runs):
    folder, whole, _ = runs
    base, merged, adapter = tensors(folder / "model"), tensors(whole / "hf"), tensors(whole / "adapter")
    assert not (whole / "hf" / "adapter_config.json").exists()
    for name, weight in base.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{prefix}.lora_A.weight" in adapter:
            expected = weight + 2.0 * adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"]
            assert bool((merged[name] != weight).any())
        torch.testing.assert_close(merged[name], expected, rtol=1e-6, atol=1e-7)


def test_checkpoints_hold_adapters_only(runs, tmp_path):
    _, whole, _ = runs
    newest = CheckpointFolders(whole / "checkpoints", 1).latest()
    stored = read_metadata(newest).state_dict_metadata
    names = [name for name, item in stored.items() if isinstance(item, TensorStorageMetadata)]
    assert len([name for name in names if name.endswith(".linear_qkv.lora.B")]) == 2 * 4, "param, two moments, itself"
    assert [name for name in names if ".lora." not in name] == []
    with pytest.raises(InputError, match=r"holds LoRA adapters and not the model .* the folder hf"):
        open_policy(newest)
    assert open_model(whole, None, tmp_path).path == whole / "hf"


def test_what_a_run_cannot_do_is_said_before_it_begins(runs):
    folder, whole, _ = runs
    arguments = ("--config", folder / "config.yaml", f"output_dir={folder / 'refused'}")
    for given, said in (
        (("lora.targets=[wrong]",), "lora.targets: 'wrong' is no linear layer of qwen2"),
        (("lora.rank=4", f"lora.path={whole / 'adapter'}"), "set lora.alpha=8.0"),
    ):
        for more in ((), ("--dry-run",)):
            status, output = run_script(TRAIN, [*arguments, *given, *more])
            assert status != 0
            assert said in output.strip().splitlines()[-1]
    assert not (folder / "refused" / "metrics.jsonl").exists()
    status, output = run_script(TRAIN, [*arguments, "lora.rank=4", "--dry-run"])
    assert status == 0, output
    assert "parameters are trained" in output
