"""Transformer Engine's layers learn under every layout, precision and FP8 recipe what the local layers learn."""

import pytest
import torch

from tests.distributed.three_updates import learnt, relative_error, three_updates
from tests.distributed.tiny import make_deepseek_v3_model, save_random
from tests.te_cpu import apex
from tests.te_cpu.plugin import DEVIATIONS

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
            "pp2": {"parallel": {"pipeline": 2}, "save_after": 2},
            "vpp2x2": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}},
            "tp2_from_pp2": {"parallel": TP2, "resume": "pp2"},
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
RECIPES = [(scaling, params) for scaling in ("delayed", "tensorwise", "blockwise") for params in (False, True)]


def recipe(scaling, params, **compute):
    return {**BF16, "compute": {"fp8": {"scaling": scaling, "params": params, "amax_history": 16}, **compute}}


def rounded():
    """As EXACT: bf16, and every FP8 recipe with and without FP8 parameters."""
    table = {
        "dense": {
            1: {"local": {"layers": "local"}, "bf16": BF16},
            2: {"bf16_tp2": {**BF16, "parallel": TP2}, "bf16_cp2": {**BF16, "parallel": {"context": 2}}},
        },
        "experts": {1: {"local": {"layers": "local"}, "bf16": BF16}, 2: {}},
    }
    for scaling, params in RECIPES:
        name, case = f"{scaling}{'_params' if params else ''}", recipe(scaling, params)
        table["dense"][1] |= {name: {**case, "save_after": 2}, f"{name}_resumed": {**case, "resume": name}}
        table["dense"][2] |= {
            f"{name}_tp2": {**case, "parallel": TP2},
            f"{name}_cp2_overlap_recompute": recipe(scaling, params, **OVERLAP, recompute="full")
            | {"parallel": {"context": 2}},
        }
        table["experts"][2][f"{name}_ep2"] = {**case, "parallel": {"expert": 2}}
    return table


ROUNDED = rounded()


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


def run_table(table, models, folder):
    results = {}
    for model, sizes in table.items():
        for world_size, cases in sizes.items():
            cases = {name: {"budget": 512, **case} for name, case in cases.items()}
            of_case = dict.fromkeys(cases, models[model])
            done = three_updates(world_size, cases, of_case, folder / model)
            results |= {(model, name): result for name, result in done.items()}
    return results


@pytest.fixture(scope="module")
def exact(models, tmp_path_factory):
    return run_table(EXACT, models, tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def rounding(models, tmp_path_factory):
    return run_table(ROUNDED, models, tmp_path_factory.mktemp("rounded"))


def cases(table):
    return [(model, name) for model, sizes in table.items() for of_size in sizes.values() for name in of_size]


def deviation(results, model, name):
    """(relative error of what was learnt, of the losses, of the gradient norms) against the local layers in float32."""
    got, local = results[model, name], results[model, "local"]
    first = len(local["metrics"]) - len(got["metrics"])  # A resumed case did the last updates only.
    pairs = list(zip(got["metrics"], local["metrics"][first:], strict=True))
    errors = [
        max(abs(mine[key] - its[key]) / max(abs(its[key]), 1e-2) for mine, its in pairs)
        for key in ("policy/loss", "policy/grad_norm")
    ]
    whole = learnt(got) if first == 0 else {k: got["after"][k] - local["before"][k].double() for k in got["after"]}
    of_learnt = relative_error(whole, learnt(local))
    DEVIATIONS.append(f"| {model} | {name} | {of_learnt:.1e} | {errors[0]:.1e} | {errors[1]:.1e} |")
    return (of_learnt, *errors)


@pytest.mark.parametrize(("model", "name"), [case for case in cases(EXACT) if case[1] != "local"])
def test_in_float32_nothing_differs_but_the_order_of_sums(exact, model, name):
    of_learnt, of_losses, of_norms = deviation(exact, model, name)
    assert of_learnt < 2e-5
    assert of_losses < 1e-5
    assert of_norms < 1e-5


@pytest.mark.parametrize(("model", "name"), [case for case in cases(ROUNDED) if case[1] != "local"])
def test_with_rounding_the_same_is_learnt_within_its_precision(rounding, model, name):
    # What is learnt in one update is less than bf16's rounding of the weights.
    _, of_losses, of_norms = deviation(rounding, model, name)
    assert of_losses < (0.02 if "bf16" in name else 0.12)
    assert of_norms < (0.05 if "bf16" in name else 0.2)


@pytest.mark.parametrize(("model", "name"), [case for case in cases(ROUNDED) if case[1] != "local"])
def test_weights_leave_a_policy_as_they_came(rounding, model, name):
    """FP8 parameters are rounded to 3 bits of mantissa; all others leave in bf16."""
    if not name.endswith("_resumed"):
        error = relative_error(rounding[model, name]["before"], rounding[model, "local"]["before"])
        assert error < (0.04 if "_params" in name else 0.005)


@pytest.mark.parametrize(("scaling", "params"), RECIPES)
def test_tokens_are_scored_within_fp8s_precision_before_the_first_update(rounding, scaling, params):
    got, local = (rounding["dense", name]["scores"] for name in (f"{scaling}{'_params' if params else ''}", "local"))
    assert got == pytest.approx(local, rel=0.02)


@pytest.mark.parametrize(("scaling", "params"), RECIPES)
def test_a_resumed_fp8_run_continues_bit_for_bit(rounding, scaling, params):
    name = f"{scaling}{'_params' if params else ''}"
    whole, resumed = rounding["dense", name], rounding["dense", f"{name}_resumed"]
    assert resumed["metrics"] == whole["metrics"][2:]
    assert all(torch.equal(resumed["after"][key], tensor) for key, tensor in whole["after"].items())
