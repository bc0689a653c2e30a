"""No parallel layout changes what is learnt: three updates under each equal those of one process."""

import json
from functools import partial

import pytest
import torch

from .tables import marked, run_now
from .three_updates import learnt, relative_error, three_updates
from .tiny import make_deepseek_v3_model, make_model, make_moe_model, make_qwen3_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TP2 = {"tensor": 2, "sequence": True}
VPP = {"pipeline": 2, "virtual_pipeline": 2}
EMBEDDING_ALONE = {"pipeline": 2, "pipeline_layout": [0, 4]}
ENDS_ALONE = {**VPP, "pipeline_layout": [0, 3, 1, 0]}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SELECTIVE = {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}
SIGMOID = {"experts": "sigmoid", "compute": {"moe": {"router_bias_update_rate": 0.01}}}
AUXILIARY = {"moe": {"aux_loss_coefficient": 0.05, "z_loss_coefficient": 0.01}}

# number of processes -> {name: case}
DENSE = {
    1: {
        "one": {},
        "unfused": {"compute": {"fused_output_layer": False}},
        "recompute_selective": {"compute": SELECTIVE},
        "recompute_full": {"compute": {"recompute": "full", "recompute_layers": 2}},
        "deterministic": {"compute": {"deterministic": True}},
        "offload": {"compute": {"optimizer_offload": 1.0}},
        "bf16_one": {"dtype": "bf16"},
    },
    2: {
        "tp2": {"parallel": {"tensor": 2}},
        "tp2_sp": {"parallel": TP2},
        "tp2_sp_unfused": {"parallel": TP2, "compute": {"fused_output_layer": False}},
        "tp2_sp_recompute": {"parallel": TP2, "compute": SELECTIVE},
        "pp2": {"parallel": {"pipeline": 2}},
        "vpp2x2": {"parallel": VPP, "save_after": 2},
        "pp2_embedding_alone": {"parallel": EMBEDDING_ALONE, "save_after": 1},
        "vpp2x2_ends_alone": {"parallel": ENDS_ALONE},
        "pp2_uneven_from_embedding_alone": {
            "parallel": {"pipeline": 2, "pipeline_layout": "Et*3|tL"},
            "compute": {"recompute": "full", "recompute_layers": 2},
            "resume": "pp2_embedding_alone",
        },
        "cp2": {"parallel": {"context": 2}},
        "cp2_overlap_from_vpp2x2": {
            "parallel": {"context": 2},
            "compute": OVERLAP,
            "resume": "vpp2x2",
            "save_after": 3,
        },
        "tp2_from_vpp2x2": {"parallel": TP2, "resume": "vpp2x2"},
        "dp2": {},
        "dp2_overlap": {"compute": OVERLAP},
        "bf16_tp2": {"parallel": TP2, "dtype": "bf16"},
        "bf16_cp2": {"parallel": {"context": 2}, "dtype": "bf16"},
        "bf16_vpp2x2": {"parallel": VPP, "dtype": "bf16"},
    },
    8: {
        "tp2_pp2_dp2_from_vpp2x2": {"parallel": {**TP2, "pipeline": 2}, "resume": "vpp2x2"},
        "tp2_pp2_dp2": {"parallel": {**TP2, "pipeline": 2}},
        "tp2_vpp2x2_dp2_overlap_recompute": {"parallel": {**TP2, **VPP}, "compute": {**OVERLAP, "recompute": "full"}},
        "tp2_pp4_uneven_from_embedding_alone": {
            "parallel": {**TP2, "pipeline": 4, "pipeline_layout": [0, 2, 1, 1]},
            "resume": "pp2_embedding_alone",
        },
        "tp2_pp2_cp2": {"parallel": {**TP2, "pipeline": 2, "context": 2}},
        # Two key heads, each shared by two processes.
        "tp4_cp2_from_vpp2x2": {"parallel": {"tensor": 4, "sequence": True, "context": 2}, "resume": "vpp2x2"},
    },
}
EXPERTS = {
    1: {"one": {}, "recompute_moe": {"compute": {"recompute": "selective", "recompute_modules": ["moe"]}}},
    2: {
        "dp2": {},
        "ep2": {"parallel": {"expert": 2}, "save_after": 1},
        "tp2_ep2_from_ep2": {"parallel": {**TP2, "expert": 2}, "resume": "ep2"},
        "cp2": {"parallel": {"context": 2}},
        "tp2_ep2": {"parallel": {**TP2, "expert": 2}},
        "tp2_expert_tp2": {"parallel": {**TP2, "expert_tensor": 2}},
        "auxiliary_dp2": {"compute": AUXILIARY},
        "auxiliary_ep2": {"parallel": {"expert": 2}, "compute": AUXILIARY},
        "bias_dp2": SIGMOID,
        "bias_ep2": {"parallel": {"expert": 2}, **SIGMOID},
    },
    4: {
        "tp2_ep4": {"parallel": {**TP2, "expert": 4}},
        "tp2_ep2_expert_tp2": {"parallel": {**TP2, "expert": 2, "expert_tensor": 2}},
        "tp4_ep4": {"parallel": {"tensor": 4, "sequence": True, "expert": 4}},
        "tp2_ep4_from_ep2": {"parallel": {**TP2, "expert": 4}, "resume": "ep2"},
        "vpp2x2_ep2": {"parallel": {**VPP, "expert": 2}},
        "vpp2x2_ep2_ends_alone_from_ep2": {"parallel": {**ENDS_ALONE, "expert": 2}, "resume": "ep2"},
    },
}

# One key head with a norm and a bias, shared by two processes.
ONE_KEY_HEAD = {
    1: {"one": {}},
    2: {
        "tp2": {"parallel": {"tensor": 2}, "save_after": 1},
        "tp2_sp_recompute": {"parallel": TP2, "compute": {"recompute": "full"}},
        "pp2_from_tp2": {"parallel": {"pipeline": 2}, "resume": "tp2", "save_after": 2},
        "tp2_from_pp2_from_tp2": {"parallel": TP2, "resume": "pp2_from_tp2"},
    },
}

BIAS = {"moe": {"router_bias_update_rate": 0.01}}
REPEATED = {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "shared_experts"]}
LATENT = {
    1: {"one": {"compute": BIAS}, "fixed_one": {}},
    2: {
        "pp2": {"parallel": {"pipeline": 2}, "compute": BIAS, "save_after": 2},
        "tp2_from_pp2": {"parallel": {**TP2, "expert_tensor": 2}, "compute": BIAS, "resume": "pp2"},
        # Without training of biases: the padding that context parallelism adds counts as tokens of the experts.
        "fixed_cp2_recompute": {"parallel": {"context": 2}, "compute": REPEATED},
        "ep2_overlap": {"parallel": {"expert": 2}, "compute": {**BIAS, **OVERLAP}},
    },
}
for case in (case for cases in LATENT.values() for case in cases.values()):
    case["samples"] = (17, 26, 14)  # No expert gets so nearly the mean that the order of sums turns its bias's step.


FULL = {"recompute": "full", "recompute_layers": 2}
MOE = {"recompute": "selective", "recompute_modules": ["core_attn", "moe"]}
# Four layers, of which the first has no experts.
REPLAYED = {
    1: {"own_choice": {}, "one": {"routes": True}, "recompute": {"routes": True, "compute": FULL}},
    2: {
        "tp2_ep2_recompute_moe": {"routes": True, "parallel": {**TP2, "expert": 2}, "compute": MOE},
        "cp2": {"routes": True, "parallel": {"context": 2}},
        "vpp2x2_recompute": {"routes": True, "parallel": VPP, "compute": {**FULL, "recompute_layers": 1}},
    },
}

# What the gate has in a combination.
WHOLE_TABLE = {
    "dense": (
        *("recompute_selective", "recompute_full", "tp2_sp", "tp2_sp_unfused", "pp2", "cp2", "dp2_overlap"),
        *("tp2_from_vpp2x2", "tp2_pp2_dp2", "tp2_pp2_dp2_from_vpp2x2", "bf16_cp2", "bf16_vpp2x2"),
        "tp2_pp4_uneven_from_embedding_alone",
    ),
    "softmax": (
        *("recompute_moe", "tp2_ep2_from_ep2", "tp2_ep2", "tp2_expert_tp2", "tp2_ep4", "tp4_ep4"),
        "vpp2x2_ep2_ends_alone_from_ep2",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sigmoid = make_moe_model(folder / "sigmoid")
    config = json.loads((sigmoid / "config.json").read_text())
    (sigmoid / "config.json").write_text(json.dumps({**config, "scoring_func": "sigmoid"}))
    return {
        "dense": make_model(folder / "dense", tied=False),
        "softmax": make_moe_model(folder / "softmax"),
        "sigmoid": sigmoid,
        "latent": make_deepseek_v3_model(folder / "latent"),
        "one_key_head": make_qwen3_model(folder / "one_key_head", num_key_value_heads=1, attention_bias=True),
    }


@pytest.fixture(scope="module")
def run_table(models, tmp_path_factory, pytestconfig):
    """table, model -> {name: what the case left behind}."""
    return partial(_run_table, models=models, make_folder=tmp_path_factory.mktemp, config=pytestconfig)


def _run_table(table, default_model, models, make_folder, config):
    """One start of processes per world size."""
    results, folder = {}, make_folder(default_model)
    for world_size, cases in run_now(table, WHOLE_TABLE.get(default_model, ()), config).items():
        of_case = {name: models[case.get("experts", default_model)] for name, case in cases.items()}
        results |= three_updates(world_size, cases, of_case, folder / "checkpoints")
    return results


@pytest.fixture(scope="module")
def dense(run_table):
    return run_table(DENSE, "dense")


@pytest.fixture(scope="module")
def experts(run_table):
    return run_table(EXPERTS, "softmax")


@pytest.fixture(scope="module")
def latent(run_table):
    return run_table(LATENT, "latent")


@pytest.fixture(scope="module")
def replayed(run_table):
    return run_table(REPLAYED, "latent")


@pytest.fixture(scope="module")
def one_key_head(run_table):
    return run_table(ONE_KEY_HEAD, "one_key_head")


def only(result, names):
    """The result of a case with no other tensors than these."""
    return {**result, **{when: {name: result[when][name] for name in names} for when in ("before", "after")}}


def assert_learns_the_same(got, expected, bound=1e-5):
    updates = len(got["metrics"])
    assert updates == len(expected["metrics"]) or got["resumed"]
    for step, (mine, reference) in enumerate(zip(got["metrics"], expected["metrics"][-updates:], strict=True)):
        for name in ("policy/loss", "policy/grad_norm", "policy/learning_rate"):
            assert mine[name] == pytest.approx(reference[name], rel=bound), (step, name)
    if not got["resumed"]:
        assert got["scores"] == pytest.approx(expected["scores"], rel=bound)
    assert got["after"].keys() == expected["after"].keys()
    for name, parameter in expected["after"].items():
        assert relative_error({name: got["after"][name]}, {name: parameter}) < bound, name
    # Weights change by a thousandth of themselves or less; what is compared here is the change.
    mine, theirs = learnt(got), learnt(expected)
    assert relative_error(mine, theirs) < bound
    for name, change in theirs.items():
        # Single tensors whose weights are large beside their change show the weights' rounding.
        assert relative_error({name: mine[name]}, {name: change}) < max(1e-3, bound), name


FP32_DENSE = [name for cases in DENSE.values() for name in cases if "bf16" not in name and name != "one"]


@pytest.mark.parametrize("name", marked(FP32_DENSE, WHOLE_TABLE["dense"]))
def test_a_dense_model_learns_the_same_under_every_layout(dense, name):
    assert_learns_the_same(dense[name], dense["one"])


NOT_AUXILIARY = [
    name for cases in EXPERTS.values() for name in cases if name != "one" and not name.startswith(("auxiliary", "bias"))
]


@pytest.mark.parametrize("name", marked(NOT_AUXILIARY, WHOLE_TABLE["softmax"]))
def test_a_mixture_of_experts_learns_the_same_under_every_layout(experts, name):
    assert_learns_the_same(experts[name], experts["one"])


@pytest.mark.parametrize("name", ONE_KEY_HEAD[2])
def test_a_key_head_that_processes_share_learns_the_same(one_key_head, name):
    assert_learns_the_same(one_key_head[name], one_key_head["one"])


@pytest.mark.parametrize("name", LATENT[2])
def test_latent_attention_with_routing_biases_learns_the_same(latent, name):
    alone = latent["fixed_one" if name.startswith("fixed") else "one"]
    biases = [key for key in alone["after"] if key.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    assert all(torch.equal(latent[name]["after"][key], alone["after"][key]) for key in biases)
    weights = alone["after"].keys() - set(biases)
    assert_learns_the_same(only(latent[name], weights), only(alone, weights))


@pytest.mark.parametrize("name", ["recompute", *REPLAYED[2]])
def test_replayed_routes_are_learnt_from_the_same_under_every_layout(replayed, name):
    weights = [key for key in replayed["one"]["after"] if not key.endswith("e_score_correction_bias")]
    assert_learns_the_same(only(replayed[name], weights), only(replayed["one"], weights))
    assert abs(replayed["one"]["scores"][0] - replayed["own_choice"]["scores"][0]) > 1


@pytest.mark.parametrize("name", marked(["bf16_tp2", "bf16_cp2", "bf16_vpp2x2"], WHOLE_TABLE["dense"]))
def test_bf16_layouts_agree_within_its_precision(dense, name):
    """bf16 keeps 8 bits, 0.4 % a rounding: gradients of three updates pass through some dozen of them, and so do the
    weights that come out, which change by less than that."""
    got, expected = dense[name], dense["bf16_one"]
    for mine, reference in zip(got["metrics"], expected["metrics"], strict=True):
        assert mine["policy/loss"] == pytest.approx(reference["policy/loss"], abs=0.01)
        assert mine["policy/grad_norm"] == pytest.approx(reference["policy/grad_norm"], rel=0.03)
    assert relative_error(learnt(got), learnt(expected)) < 0.25
    assert relative_error(got["after"], expected["after"]) < 0.002


def assert_not_trivial(results):
    metrics = results["one"]["metrics"]
    assert results["one"]["counts"][0] >= 3, "several micro-batches"
    assert all(0.01 < m["policy/clip_low_share"] < 0.9 for m in metrics)
    assert all(0.01 < m["policy/clip_high_share"] < 0.9 for m in metrics)
    assert len({round(m["policy/loss"], 3) for m in metrics}) == 3
    assert all(bool(change.any()) for change in learnt(results["one"]).values())


def test_the_table_is_not_trivial(dense):
    assert_not_trivial(dense)
    assert all(count % 2 == 0 for count in dense["vpp2x2"]["counts"])


def test_experts_are_not_trivial(experts):
    assert_not_trivial(experts)


def test_deterministic_algorithms_are_used_where_asked_for(dense):
    assert {name for name, result in dense.items() if result["deterministic"]} == {"deterministic"}


@pytest.mark.parametrize("name", ["ep2", "vpp2x2_ep2", "dp2"])
def test_every_token_goes_to_the_same_experts_under_expert_parallelism(experts, name):
    """These layouts pad nothing, so the counts are those of the same tokens."""
    expected = experts["one"]["routing"]
    assert expected.shape == (4, 4)
    assert len({int(total) for total in expected.sum(1)}) == 1, "two experts for every token in every layer"
    assert bool((expected.max(1).values > expected.min(1).values).all()), "experts are chosen unequally"
    assert torch.equal(experts[name]["routing"], expected)


def test_auxiliary_losses_act_and_are_equal_under_expert_parallelism(experts):
    """They are means over micro-batches, so only layouts that split alike can be compared."""
    assert_learns_the_same(experts["auxiliary_ep2"], experts["auxiliary_dp2"])
    router = "model.layers.0.mlp.gate.weight"
    change, plain = learnt(experts["auxiliary_dp2"])[router], learnt(experts["dp2"])[router]
    assert relative_error({router: change}, {router: plain}) > 0.01
    for metrics in experts["auxiliary_ep2"]["metrics"]:
        assert metrics["policy/load_balancing_loss"] >= 1.0 - 1e-4  # 1 is perfect balance
        assert metrics["policy/router_z_loss"] > 0
    assert "policy/load_balancing_loss" not in experts["dp2"]["metrics"][0]


def test_the_balancing_bias_moves_alike_under_expert_parallelism(experts):
    """DeepSeek-V3's rule: the bias of an expert goes up by the rate when it got fewer tokens than the mean."""
    got, expected = experts["bias_ep2"], experts["bias_dp2"]
    assert_learns_the_same(got, expected)
    assert len(expected["expert_biases"]) == 4
    for mine, reference in zip(got["expert_biases"], expected["expert_biases"], strict=True):
        assert torch.allclose(mine, reference)
        assert bool(reference.any())
        assert float(reference.abs().max()) <= 3 * 0.01 + 1e-6
