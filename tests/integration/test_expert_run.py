"""A whole run of a mixture of experts: engine, weight sync and export under expert parallelism."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from dapo_mega.config import RunConfig, load_config
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.errors import InputError
from dapo_mega.metrics import read_metrics
from dapo_mega.training.replay import load_replay_config
from dapo_mega.training.run import run_training
from tests.distributed.tiny import disturbed_choices, make_moe_model

from .runs import finish, prepare, start

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

KEY = "rollout.routing_replay"
AUXILIARY = "compute.moe={aux_loss_coefficient: 0.01, z_loss_coefficient: 0.001}"


def prepare_experts(folder):
    """The configuration file of a run, and the folder of its mixture of experts."""
    config = prepare(folder)
    vocab_size = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    experts = make_moe_model(folder / "experts", num_layers=2, vocab_size=vocab_size)
    for file in (folder / "model").glob("*token*"):
        shutil.copyfile(file, experts / file.name)
    return config, experts


def test_a_run_replays_the_routes_of_an_engine_that_routes_otherwise(tmp_path, monkeypatch):
    """Beginning with a resume: until then the difference of log-probs shows what the engine does."""
    file, experts = prepare_experts(tmp_path)
    generate = EmbeddedEngine.generate

    def disturbed(engine, requests):
        with disturbed_choices():
            return generate(engine, requests)

    monkeypatch.setattr(EmbeddedEngine, "generate", disturbed)
    overrides = [f"model.path={experts}", "evaluation.every=0", "evaluation.at_start=false", "checkpoint.every=1"]
    overrides += ["rollout.mismatch_stop=null", "checkpoint.save_hf_at_end=false"]
    run_training(load_config(RunConfig, file, [*overrides, "num_steps=1"]))
    changed = load_config(RunConfig, file, [*overrides, "num_steps=3", f"{KEY}=true"])
    run_training(changed, accept_changes=True)
    first, *others = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert first["rollout/logprob_abs_diff_mean"] > 0.01
    assert [record["rollout/logprob_abs_diff_max"] < 1e-5 for record in others] == [True, True]
    with pytest.raises(InputError, match="files of samples do not have the experts of tokens"):
        load_replay_config(tmp_path / "run", [], 1)
    with pytest.raises(InputError, match=f"{KEY}=true: qwen2 has no experts; leave it out"):
        run_training(load_config(RunConfig, file, [f"{KEY}=true", f"output_dir={tmp_path / 'dense'}"]))


def test_a_run_with_spread_experts_agrees_with_its_engine_and_exports(tmp_path):
    config, experts = prepare_experts(tmp_path)
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
