"""A layer of multi-token prediction learns the same under every layout, and the policy as it does without."""

from functools import partial

import pytest
import torch

from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.config import ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.conversion.convert import open_checkpoint, reshard, to_hf
from dapo_mega.conversion.merging import merge
from dapo_mega.conversion.verification import different_fields, different_tensors
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.processes import start_processes
from dapo_mega.models.hf_checkpoint import HfCheckpoint

from .launching import run_distributed
from .tables import marked, run_now
from .test_parallel_parity import assert_learns_the_same, only
from .three_updates import learnt, three_updates
from .tiny import (
    add_trainable_mtp_layer,
    has_delta,
    make_deepseek_v3_model,
    make_glm4_moe_model,
    make_qwen3_5_model,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SP = {"tensor": 2, "sequence": True}
# number of processes -> {name: case}
LATENT = {
    1: {
        "one": {"mtp": True, "save_after": 2},
        "one_from_one": {"mtp": True, "resume": "one", "save_after": 3},
        "without": {"save_after": 3},
    },
    2: {
        "cp2_unfused": {
            "mtp": True,
            "parallel": {"context": 2},
            "compute": {"recompute": "full", "fused_output_layer": False},
        },
        "vpp2x2": {
            "mtp": True,
            "parallel": {"pipeline": 2, "virtual_pipeline": 2},
            "compute": {"recompute": "selective"},
            "save_after": 1,
        },
        "output_alone": {
            "mtp": True,
            "parallel": {"pipeline": 2, "pipeline_layout": [4, 0]},
            "compute": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        },
        "dp2_overlap": {"mtp": True, "compute": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
        "tp2_from_vpp2x2": {"mtp": True, "parallel": {**SP, "expert_tensor": 2}, "resume": "vpp2x2"},
        "tp2_ep2": {"mtp": True, "parallel": {**SP, "expert": 2}, "save_after": 1},
    },
    4: {"pp2_ep2_from_tp2_ep2": {"mtp": True, "parallel": {"pipeline": 2, "expert": 2}, "resume": "tp2_ep2"}},
}
PP2 = {"pp2": {"mtp": True, "parallel": {"pipeline": 2}}}
OTHERS = {"glm4_moe, tied": (partial(make_glm4_moe_model, tie_word_embeddings=True), PP2)}
if has_delta():
    CUT = {"tp2": {"mtp": True, "parallel": SP}, "cp2": {"mtp": True, "parallel": {"context": 2}}}
    OTHERS["qwen3_5"] = make_qwen3_5_model, CUT
WHOLE_TABLE = ("dp2_overlap", "output_alone", "pp2_ep2_from_tp2_ep2")
LAYOUTS = [name for table in LATENT.values() for name in table if not name.startswith(("one", "without"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    add_trainable_mtp_layer(make_deepseek_v3_model(folder / "model"))
    return folder


@pytest.fixture(scope="module")
def latent(folder, pytestconfig):
    return run(LATENT, folder / "model", folder, pytestconfig)


def run(table, model, folder, config):
    results = {}
    for size, cases in run_now(table, WHOLE_TABLE, config).items():
        results |= three_updates(size, cases, dict.fromkeys(cases, model), folder / "checkpoints")
    return results


def assert_learn_alike(got, expected):
    learning = [name for name in expected["after"] if not name.endswith("e_score_correction_bias")]
    assert_learns_the_same(only(got, learning), only(expected, learning))
    for mine, reference in zip(got["metrics"][::-1], expected["metrics"][::-1], strict=False):
        for metric in ("policy/mtp_loss", "policy/mtp_accuracy"):
            assert mine[metric] == pytest.approx(reference[metric], rel=1e-5)


@pytest.mark.parametrize("name", marked(LAYOUTS, WHOLE_TABLE))
def test_a_layer_of_multi_token_prediction_learns_the_same_under_every_layout(latent, name):
    assert_learn_alike(latent[name], latent["one"])


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_learn_the_same_on_two_processes(tmp_path, name):
    make, cases = OTHERS[name]
    model = add_trainable_mtp_layer(make(tmp_path / "model"))
    (expected,) = three_updates(1, {"one": {"mtp": True}}, {"one": model}, tmp_path).values()
    for got in three_updates(2, cases, dict.fromkeys(cases, model), tmp_path).values():
        assert_learn_alike(got, expected)


def test_a_run_goes_on_to_the_bit_and_not_without_its_layer_of_multi_token_prediction(latent, folder):
    resumed, expected = latent["one_from_one"], latent["one"]
    assert resumed["metrics"] == expected["metrics"][2:]
    assert all(torch.equal(resumed["after"][name], weight) for name, weight in expected["after"].items())
    for case in ({"resume": "one"}, {"resume": "without", "mtp": True}):
        with pytest.raises(
            AssertionError, match=r"is of a run with model\.train_mtp=\w+, unlike this one; resume with it"
        ):
            three_updates(1, {"changed": case}, {"changed": folder / "model"}, folder / "checkpoints")


def test_checkpoints_are_converted_with_what_was_trained(latent, folder):
    step = folder / "checkpoints" / "one_from_one" / "step_00000003"
    reshard(open_checkpoint(step, folder / "model"), folder / "pp2", ParallelConfig(pipeline=2), 1 << 16)
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    copies = {f"model.layers.4.{copy}": own for copy, own in copies.items()}
    expected = latent["one_from_one"]["after"]
    for source in (step, folder / "pp2"):
        to_hf(open_checkpoint(source, folder / "model"), folder / f"{source.name} back", 1 << 16)
        found = HfCheckpoint(folder / f"{source.name} back")
        assert found.names() == expected.keys() | copies.keys()
        for name in found.names():
            assert torch.equal(found.tensor(name), expected[copies.get(name, name)]), name
    run, exported = open_checkpoint(step, folder / "model"), open_checkpoint(folder / f"{step.name} back")
    assert different_fields(run, exported) == different_tensors(run, exported) == []
    merge([run, exported], [0.5, 0.5], folder / "merged", 1 << 20)
    merged = HfCheckpoint(folder / "merged")
    assert merged.names() == expected.keys() | copies.keys()
    assert all(torch.equal(merged.tensor(name), tensor) for name, tensor in expected.items())
    to_hf(open_checkpoint(step), folder / "alone", 1 << 20)
    assert HfCheckpoint(folder / "alone").names() == expected.keys()


def test_a_run_that_starts_from_a_checkpoint_keeps_what_was_trained_there(latent, folder, tmp_path):
    step = folder / "checkpoints" / "one_from_one" / "step_00000003"
    run_distributed(export, 1, step, tmp_path / "export", timeout_s=120)
    found, expected = HfCheckpoint(tmp_path / "export"), latent["one_from_one"]["after"]
    assert found.names() == expected.keys()
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in expected.items())


def export(model, folder):
    """Of a policy that learns nothing."""
    settings = {"temperature": 1.0, "updates_per_step": 1, "num_steps": 1}
    processes = start_processes(ParallelConfig(), 0)
    model_config = ModelConfig(path=str(model), dtype="fp32")
    policy = MegatronPolicy(model_config, ParallelConfig(), OptimizerConfig(), processes, **settings)
    save_hf_checkpoint(policy, folder)


def test_the_policy_learns_as_it_does_without_multi_token_prediction_to_the_bit(latent):
    with_it, without = latent["one"], latent["without"]
    changes = learnt(with_it)
    of_mtp = changes.keys() - without["after"].keys()
    assert len(of_mtp) > 4
    assert all(bool(changes[name].any()) for name in of_mtp if not name.endswith("correction_bias"))
    assert all(torch.equal(with_it["after"][name], weight) for name, weight in without["after"].items())
    for mine, expected in zip(with_it["metrics"], without["metrics"], strict=True):
        assert {name: mine[name] for name in expected} == expected
    assert without["metrics"][0]["policy/grad_norm"] > 1.0, "gradients are clipped"
