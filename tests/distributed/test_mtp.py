"""A layer of multi-token prediction learns the same under every layout, and the policy as it does without."""

import pytest
import torch

from .tables import marked, run_now
from .test_parallel_parity import assert_learns_the_same, only
from .three_updates import learnt, three_updates
from .tiny import add_trainable_mtp_layer, make_deepseek_v3_model, make_glm4_moe_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SP = {"tensor": 2, "sequence": True}
# number of processes -> {name: case}
LATENT = {
    1: {
        "one": {"mtp": True},
        "without": {},
        "recompute": {"mtp": True, "compute": {"recompute": "full", "fused_output_layer": False}},
    },
    2: {
        "cp2": {"mtp": True, "parallel": {"context": 2}, "compute": {"recompute": "selective"}},
        "vpp2x2": {"mtp": True, "parallel": {"pipeline": 2, "virtual_pipeline": 2}, "save_after": 1},
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
TIED = {1: {"one": {"mtp": True}}, 2: {"pp2": {"mtp": True, "parallel": {"pipeline": 2}}}}
WHOLE_TABLE = ("dp2_overlap", "pp2_ep2_from_tp2_ep2")
LAYOUTS = [name for table in LATENT.values() for name in table if name not in ("one", "without")]


@pytest.fixture(scope="module")
def latent(tmp_path_factory, pytestconfig):
    folder = tmp_path_factory.mktemp("latent")
    model = add_trainable_mtp_layer(make_deepseek_v3_model(folder / "model"))
    return run(LATENT, model, folder, pytestconfig)


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


def test_the_layer_of_multi_token_prediction_of_a_tied_model_learns_the_same_on_two_stages(
    tmp_path_factory, pytestconfig
):
    folder = tmp_path_factory.mktemp("tied")
    model = add_trainable_mtp_layer(make_glm4_moe_model(folder / "model", tie_word_embeddings=True))
    results = run(TIED, model, folder, pytestconfig)
    assert_learn_alike(results["pp2"], results["one"])


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
