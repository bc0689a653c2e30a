"""A whole run of a mixture of experts: engine, weight sync and export under expert parallelism."""

import json
import shutil

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from dapo_mega.metrics import read_metrics
from tests.distributed.tiny import make_moe_model

from .runs import finish, prepare, start

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

AUXILIARY = "compute.moe={aux_loss_coefficient: 0.01, z_loss_coefficient: 0.001}"


def test_a_run_under_expert_parallelism_equals_the_same_run_without(tmp_path):
    config = prepare(tmp_path)
    vocab_size = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    experts = make_moe_model(tmp_path / "experts", num_layers=2, vocab_size=vocab_size)
    for file in (tmp_path / "model").glob("*token*"):
        shutil.copyfile(file, experts / file.name)
    records, exports = [], []
    for size in (1, 2):
        output = tmp_path / f"expert_{size}"
        # A single update per step: old log-probs and mismatch come from the update itself.
        overrides = [f"model.path={experts}", "num_steps=2", f"parallel.expert={size}", AUXILIARY]
        overrides.append("batch.mini_batch_groups=6")
        finish(start(config, 2, output, *overrides), output)
        records.append(read_metrics(output / "metrics.jsonl"))
        exports.append(load_file(output / "hf" / "model.safetensors"))
    assert len(records[0]) == 3
    for before, after in zip(*records, strict=True):
        for name in ("rollout/tokens", "buffer/size"):
            assert after.get(name) == before.get(name), (name, before["step"])
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy", "policy/load_balancing_loss"):
            assert after.get(name, 0) == pytest.approx(before.get(name, 0), rel=1e-4, abs=1e-6), (name, before["step"])
        if after["step"] > 0:
            assert after.get("rollout/logprob_abs_diff_max", 0) < 1e-4
            assert after["policy/router_z_loss"] > 0
    assert exports[0].keys() == load_file(experts / "model.safetensors").keys() == exports[1].keys()
    assert AutoConfig.from_pretrained(output / "hf").num_experts == 4
    AutoModelForCausalLM.from_pretrained(output / "hf")
