"""Transformer Engine's layers learn under every layout, precision and FP8 recipe what the local layers learn."""

import pytest
import torch

from tests.distributed.three_updates import relative_error, three_updates
from tests.distributed.tiny import make_deepseek_v3_model, save_random
from tests.te_cpu import apex
from tests.te_cpu.plugin import DEVIATIONS

# The first test of a table waits for all its cases.
pytestmark = pytest.mark.timeout(2400)

TP2 = {"tensor": 2, "sequence": True}
SELECTIVE = {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
BF16 = {"dtype": "bf16"}

# model -> number of processes -> {name: case}. In float32 unless a case says otherwise.
EXACT = {
    "dense": {
        1: {
            "local": {"layers": "local"},
            "one": {},
            "recompute": {"compute": SELECTIVE},
            "recompute_full": {"compute": {"recompute": "full", "recompute_layers": 2}},
            "apex_local": {"layers": "local", "within": apex.used_by_local_layers},
        },
        2: {
            "tp2": {"parallel": {"tensor": 2}},
            "tp2_sp_recompute": {"parallel": TP2, "compute": SELECTIVE},
            "pp2": {"parallel": {"pipeline": 2}},
            "vpp2x2": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "save_after": 2},
            "tp2_from_vpp2x2": {"parallel": TP2, "resume": "vpp2x2"},
            "dp2_overlap": {"compute": OVERLAP},
            "tp2_apex": {"parallel": TP2, "within": apex.used_by_transformer_engine},
            "dp2_overlap_apex_local": {"compute": OVERLAP, "layers": "local", "within": apex.used_by_local_layers},
        },
    },
    "experts": {
        1: {"local": {"layers": "local"}, "one": {}, "apex": {"within": apex.used_by_transformer_engine}},
        2: {
            "ep2": {"parallel": {"expert": 2}, "save_after": 1},
            "tp2_ep2_from_ep2": {"parallel": {**TP2, "expert": 2}, "resume": "ep2"},
            "tp2_expert_tp2": {"parallel": {**TP2, "expert_tensor": 2}},
        },
    },
    "latent": {
        1: {"local": {"layers": "local"}, "one": {}},
        2: {"tp2": {"parallel": {**TP2, "expert_tensor": 2}}, "pp2": {"parallel": {"pipeline": 2}}},
    },
}
RECIPES = {
    f"{scaling}{'_params' if params else ''}": (scaling, params)
    for scaling in ("delayed", "tensorwise", "blockwise")
    for params in (False, True)
}


def recipe(scaling, params):
    return {**BF16, "compute": {"fp8": {"scaling": scaling, "params": params, "amax_history": 16}}}


def rounded():
    """As EXACT: bf16, and every FP8 recipe with and without FP8 parameters."""
    table = {name: {1: {"local": {"layers": "local"}}, 2: {}} for name in ("dense", "experts")}
    for name, case in {"bf16": BF16, **{name: recipe(*kind) for name, kind in RECIPES.items()}}.items():
        compute = {**case.get("compute", {}), **OVERLAP, "recompute": "full"}
        table["dense"][1] |= {name: {**case, "save_after": 2}}
        table["dense"][2] |= {
            f"{name}_tp2": {**case, "parallel": TP2},
            f"{name}_cp2_overlap_recompute": {**case, "compute": compute, "parallel": {"context": 2}},
        }
    for name, kind in RECIPES.items():
        table["dense"][1][f"{name}_resumed"] = {**recipe(*kind), "resume": name}
        table["experts"][2][f"{name}_ep2"] = {**recipe(*kind), "parallel": {"expert": 2}}
    table["experts"][1]["bf16"] = BF16
    return table


ROUNDED = rounded()

# What stands here runs with the gate, each property once; `--whole-table` runs the rest too.
IN_GATE = {
    "dense": """one tp2_sp_recompute vpp2x2 tp2_from_vpp2x2 dp2_overlap tp2_apex dp2_overlap_apex_local
        delayed delayed_resumed tensorwise_params tensorwise_params_resumed blockwise blockwise_params
        blockwise_params_resumed bf16_cp2_overlap_recompute delayed_params_tp2 tensorwise_tp2 blockwise_params_tp2
        tensorwise_params_cp2_overlap_recompute blockwise_cp2_overlap_recompute""",
    "experts": "ep2 tp2_ep2_from_ep2 tp2_expert_tp2 delayed_ep2 blockwise_params_ep2",
    "latent": "tp2",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Head size 64 and sizes that are multiples of 16, as a device's kernels want them."""
    from transformers import Qwen2Config, Qwen3MoeConfig

    sizes = {
        "vocab_size": 128,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    experts = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
    folder = tmp_path_factory.mktemp("models")
    scale = 0.03  # As a trained model's: larger weights make more of every rounding.
    return {
        "dense": save_random(Qwen2Config(**sizes), folder / "dense", scale=scale),
        "experts": save_random(
            Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True), folder / "experts", scale=scale
        ),
        "latent": make_deepseek_v3_model(folder / "latent"),
    }


# So that each start of processes ends within its limit of time, also on a busy machine.
CASES_AT_A_TIME = 12


def is_chosen(model, name, whole_table):
    return whole_table or name == "local" or name in IN_GATE[model].split()


def run_table(table, models, folder, whole_table):
    results = {}
    for model, sizes in table.items():
        for world_size, cases in sizes.items():
            cases = {name: {"budget": 512, **c} for name, c in cases.items() if is_chosen(model, name, whole_table)}
            for start in range(0, len(cases), CASES_AT_A_TIME):
                some = dict(list(cases.items())[start : start + CASES_AT_A_TIME])
                done = three_updates(world_size, some, dict.fromkeys(some, models[model]), folder / model)
                results |= {(model, name): result for name, result in done.items()}
    return results


@pytest.fixture(scope="module")
def exact(models, tmp_path_factory, pytestconfig):
    return run_table(EXACT, models, tmp_path_factory.mktemp("exact"), pytestconfig.getoption("whole_table", False))


@pytest.fixture(scope="module")
def rounding(models, tmp_path_factory, pytestconfig):
    return run_table(ROUNDED, models, tmp_path_factory.mktemp("rounded"), pytestconfig.getoption("whole_table", False))


def parameters(table, needed=()):
    """All cases of a table, or those of `needed`: (model, name)."""
    found = [(model, name) for model, sizes in table.items() for of_size in sizes.values() for name in of_size]
    return [
        pytest.param(*case, marks=[] if is_chosen(*case, whole_table=False) else pytest.mark.whole_table)
        for case in found
        if case[1] != "local" and (not needed or case in needed)
    ]


def deviation(results, model, name, weights):
    """(relative error of the new weights, of the losses, of the gradient norms) against the local layers in float32.

    `weights` makes of a result what is compared: the weights themselves where they are rounded, as what three updates
    change is less than bf16 rounds off; else what was learnt.
    """
    got, local = results[model, name], results[model, "local"]
    first = len(local["metrics"]) - len(got["metrics"])  # A resumed case did the last updates only.
    pairs = list(zip(got["metrics"], local["metrics"][first:], strict=True))
    errors = [
        max(abs(mine[key] - its[key]) / max(abs(its[key]), 1e-2) for mine, its in pairs)
        for key in ("policy/loss", "policy/grad_norm")
    ]
    of_weights = relative_error(weights(got, local), weights(local, local))
    DEVIATIONS.append(f"| {model} | {name} | {of_weights:.1e} | {errors[0]:.1e} | {errors[1]:.1e} |")
    return (of_weights, *errors)


def change_from_the_start(got, local):
    """Also of a resumed case, which did the last updates only."""
    return {key: got["after"][key].double() - local["before"][key].double() for key in local["before"]}


@pytest.mark.parametrize(("model", "name"), parameters(EXACT))
def test_in_float32_nothing_differs_but_the_order_of_sums(exact, model, name):
    of_learnt, of_losses, of_norms = deviation(exact, model, name, change_from_the_start)
    assert of_learnt < 2e-5
    assert of_losses < 1e-5
    assert of_norms < 1e-5


@pytest.mark.parametrize(("model", "name"), parameters(ROUNDED))
def test_with_rounding_the_same_is_learnt_within_its_precision(rounding, model, name):
    of_weights, of_losses, of_norms = deviation(rounding, model, name, lambda got, local: got["after"])
    assert of_weights < (0.04 if "_params" in name else 0.005)
    assert of_losses < (0.02 if "bf16" in name else 0.12)
    assert of_norms < (0.05 if "bf16" in name else 0.2)


@pytest.mark.parametrize(("model", "name"), [p for p in parameters(ROUNDED) if not p.values[1].endswith("_resumed")])
def test_weights_leave_a_policy_as_they_came(rounding, model, name):
    """FP8 parameters are rounded to 3 bits of mantissa; all others leave in bf16."""
    error = relative_error(rounding[model, name]["before"], rounding[model, "local"]["before"])
    assert error < (0.04 if "_params" in name else 0.005)


@pytest.mark.parametrize(("model", "name"), parameters(ROUNDED, needed=[("dense", name) for name in RECIPES]))
def test_tokens_are_scored_within_fp8s_precision_before_the_first_update(rounding, model, name):
    assert rounding[model, name]["scores"] == pytest.approx(rounding[model, "local"]["scores"], rel=0.02)


@pytest.mark.parametrize(("model", "name"), parameters(ROUNDED, needed=[("dense", f"{r}_resumed") for r in RECIPES]))
def test_a_resumed_fp8_run_continues_bit_for_bit(rounding, model, name):
    whole, resumed = rounding[model, name.removesuffix("_resumed")], rounding[model, name]
    assert resumed["metrics"] == whole["metrics"][2:]
    assert all(torch.equal(resumed["after"][key], tensor) for key, tensor in whole["after"].items())
