"""A whole run of a mixture of experts: engine, weight sync and export under expert parallelism."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from dapo_mega.metrics import read_metrics
from tests.distributed.tiny import make_moe_model

from .runs import finish, prepare, start

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

AUXILIARY = "compute.moe={aux_loss_coefficient: 0.01, z_loss_coefficient: 0.001}"


def test_a_run_with_spread_experts_agrees_with_its_engine_and_exports(tmp_path):
    config = prepare(tmp_path)
    vocab_size = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    experts = make_moe_model(tmp_path / "experts", num_layers=2, vocab_size=vocab_size)
    for file in (tmp_path / "model").glob("*token*"):
        shutil.copyfile(file, experts / file.name)
    output = tmp_path / "run"
    # A single update per step: old log-probs and mismatch come from the update itself.
    overrides = [f"model.path={experts}", "num_steps=2", "parallel.expert=2", AUXILIARY, "batch.mini_batch_groups=6"]
    finish(start(config, 2, output, *overrides), output)
    records = read_metrics(output / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records[1:]:
        assert record["rollout/logprob_abs_diff_max"] < 1e-4
        assert record["policy/grad_norm"] > 0
        assert record["policy/load_balancing_loss"] >= 1.0 - 1e-4  # 1 is perfect balance
        assert record["policy/router_z_loss"] > 0
    given, exported = (load_file(folder / "model.safetensors") for folder in (experts, output / "hf"))
    assert exported.keys() == given.keys()
    unchanged = [name for name, tensor in given.items() if ".experts." in name and torch.equal(exported[name], tensor)]
    assert unchanged == [], "every expert has learnt"
    assert AutoConfig.from_pretrained(output / "hf").num_experts == 4
    AutoModelForCausalLM.from_pretrained(output / "hf")
