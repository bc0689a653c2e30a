"""Transformer Engine's layers learn under every layout, precision and FP8 recipe what the local layers learn."""

import functools

import pytest
import torch
import transformers

from tests.distributed.three_updates import relative_error, three_updates
from tests.distributed.tiny import make_deepseek_v3_model, save_random
from tests.gpu.device_policy import DEVICE_SIZES
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
            "dp2_overlap": {"compute": OVERLAP},
            "tp2_apex": {"parallel": TP2, "within": apex.used_by_transformer_engine},
            "dp2_overlap_apex_local": {"compute": OVERLAP, "layers": "local", "within": apex.used_by_local_layers},
        },
    },
    "deep": {
        1: {"local": {"layers": "local"}},
        2: {
            "vpp2x2": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "save_after": 2},
            "tp2_from_vpp2x2": {"parallel": TP2, "resume": "vpp2x2"},
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
RESUMED = [("dense", f"{name}_resumed") for name in (*RECIPES, "delayed_params_last", "bf16_offload")]
RESUMED += [("experts", f"{name}_resumed") for name in ("bf16_offload", *(f"{scaling}_ep2" for scaling in RECIPES))]
PRECISIONS = {"bf16": BF16} | {
    name: {**BF16, "compute": {"fp8": {"scaling": scaling, "params": params, "amax_history": 16}}}
    for name, (scaling, params) in RECIPES.items()
}
# Besides Qwen2 and Qwen3-MoE, which the models "dense" and "experts" are.
DENSE_FAMILIES = ("qwen3", "llama", "mistral")
FAMILIES_OF_EXPERTS = ("qwen2_moe", "deepseek_v2", "deepseek_v3")


def rounded():
    """As EXACT: bf16, and every FP8 recipe with and without FP8 parameters; all families in bf16 and block-wise FP8."""
    models = ("dense", "deep", "experts", *DENSE_FAMILIES, *FAMILIES_OF_EXPERTS)
    table = {name: {1: {"local": {"layers": "local"}}, 2: {}} for name in models}
    for name, case in PRECISIONS.items():
        compute = case.get("compute", {})
        overlap, recompute = {**compute, **OVERLAP}, {**compute, **OVERLAP, "recompute": "full"}
        table["dense"][1] |= {name: {**case, "save_after": 2}}
        table["dense"][2] |= {
            f"{name}_tp2": {**case, "parallel": TP2},
            f"{name}_pp2": {**case, "parallel": {"pipeline": 2}},
            f"{name}_dp2_overlap": {**case, "compute": overlap},
            f"{name}_cp2_overlap_recompute": {**case, "compute": recompute, "parallel": {"context": 2}},
        }
        table["deep"][2] |= {
            f"{name}_vpp2x2": {**case, "parallel": {"pipeline": 2, "virtual_pipeline": 2}, "save_after": 2},
            f"{name}_tp2_from_vpp2x2": {**case, "parallel": TP2, "resume": f"{name}_vpp2x2"},
        }
        table["experts"][2] |= {
            f"{name}_ep2": {**case, "parallel": {"expert": 2}, "save_after": 2},
            f"{name}_ep2_resumed": {**case, "parallel": {"expert": 2}, "resume": f"{name}_ep2"},
            f"{name}_tp2_expert_tp2": {**case, "parallel": {**TP2, "expert_tensor": 2}},
        }
    for name in RECIPES:
        table["dense"][1][f"{name}_resumed"] = {**PRECISIONS[name], "resume": name}
    # The last update's largest values alone.
    last = {**BF16, "compute": {"fp8": {"scaling": "delayed", "params": True, "amax_history": 1}}}
    table["dense"][1] |= {
        "delayed_params_last": {**last, "save_after": 2},
        "delayed_params_last_resumed": {**last, "resume": "delayed_params_last"},
    }
    offload = {**BF16, "compute": {"optimizer_offload": 0.5}}
    for model, parallel in (("dense", {}), ("experts", {"expert": 2})):
        table[model][2] |= {
            "bf16_offload": {**offload, "parallel": parallel, "save_after": 2},
            "bf16_offload_resumed": {**offload, "parallel": parallel, "resume": "bf16_offload"},
        }
    for name in ("bf16", "blockwise"):
        case = PRECISIONS[name]
        for model in DENSE_FAMILIES:
            table[model][2][f"{name}_tp2"] = {**case, "parallel": TP2}
        for model in FAMILIES_OF_EXPERTS:
            table[model][2][f"{name}_tp2"] = {**case, "parallel": {**TP2, "expert_tensor": 2}}
            table[model][2][f"{name}_ep2"] = {**case, "parallel": {"expert": 2}}
    table["experts"][1]["bf16"] = {**BF16}
    for case in (case for sizes in table.values() for cases in sizes.values() for case in cases.values()):
        case["samples"] = (17, 29, 41)  # With fewer, one that crosses a limit of the loss changes it by percents.
    return table


ROUNDED = rounded()

# What stands here runs with the gate, each property once; `--whole-table` runs the rest too.
IN_GATE = {
    "dense": """one tp2_sp_recompute dp2_overlap tp2_apex
        delayed delayed_resumed delayed_params_last delayed_params_last_resumed
        blockwise_params blockwise_params_resumed bf16_offload bf16_offload_resumed
        bf16_cp2_overlap_recompute delayed_params_tp2 blockwise_params_tp2
        tensorwise_params_cp2_overlap_recompute""",
    "deep": "vpp2x2 tp2_from_vpp2x2",
    "experts": """ep2 tp2_ep2_from_ep2 tp2_expert_tp2 delayed_ep2 delayed_params_ep2 delayed_params_ep2_resumed
        blockwise_params_ep2""",
    "latent": "tp2",
}

EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **DEVICE_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# model -> (its configuration in transformers, values of it).
MODELS = {
    "dense": ("Qwen2Config", DEVICE_SIZES),
    "deep": ("Qwen2Config", {**DEVICE_SIZES, "num_hidden_layers": 4}),  # A chunk for each of two virtual stages.
    "experts": ("Qwen3MoeConfig", {**DEVICE_SIZES, **EXPERTS, "head_dim": 64, "norm_topk_prob": True}),
    "qwen3": ("Qwen3Config", {**DEVICE_SIZES, "head_dim": 64}),
    "llama": ("LlamaConfig", {**DEVICE_SIZES, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {**DEVICE_SIZES, "head_dim": 64, "sliding_window": 7}),
    "qwen2_moe": ("Qwen2MoeConfig", {**DEVICE_SIZES, **EXPERTS, "shared_expert_intermediate_size": 128}),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, "num_mtp_layers": 0}),
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Makes a model when it is first asked for: name -> folder."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(name):
        if name == "latent":
            return make_deepseek_v3_model(folder / name)
        kind, values = MODELS[name]
        # As a trained model's: larger weights make more of every rounding.
        return save_random(getattr(transformers, kind)(**values), folder / name, scale=0.03)

    return make


# So that each start of processes ends within its limit of time, also on a busy machine.
CASES_AT_A_TIME = 12


def needed_cases(table, session):
    """(model, name) of what the session's tests compare: their own cases, what these resume, the local layers."""
    chosen = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    cases = {(model, name): c for model, sizes in table.items() for of in sizes.values() for name, c in of.items()}
    needed = cases.keys() & {(values.get("model"), values.get("name")) for values in chosen}
    needed |= {(model, cases[model, name].get("resume", name)) for model, name in needed}
    return needed | {(model, "local") for model, _ in needed}


def run_table(table, model_of, folder, session):
    results, needed = {}, needed_cases(table, session)
    for model, sizes in table.items():
        for world_size, cases in sizes.items():
            cases = {name: {"budget": 512, **case} for name, case in cases.items() if (model, name) in needed}
            for start in range(0, len(cases), CASES_AT_A_TIME):
                some = dict(list(cases.items())[start : start + CASES_AT_A_TIME])
                done = three_updates(world_size, some, dict.fromkeys(some, model_of(model)), folder / model)
                results |= {(model, name): result for name, result in done.items()}
    return results


@pytest.fixture(scope="module")
def exact(model_of, tmp_path_factory, request):
    return run_table(EXACT, model_of, tmp_path_factory.mktemp("exact"), request.session)


@pytest.fixture(scope="module")
def rounding(model_of, tmp_path_factory, request):
    return run_table(ROUNDED, model_of, tmp_path_factory.mktemp("rounded"), request.session)


def parameters(table, needed=()):
    """All cases of a table, or those of `needed`: (model, name)."""
    found = [(model, name) for model, sizes in table.items() for of_size in sizes.values() for name in of_size]
    return [
        pytest.param(*case, marks=[] if case[1] in IN_GATE.get(case[0], "").split() else pytest.mark.whole_table)
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
    assert of_norms < 2e-5


@pytest.mark.parametrize(("model", "name"), parameters(ROUNDED))
def test_with_rounding_the_same_is_learnt_within_its_precision(rounding, model, name):
    of_weights, of_losses, of_norms = deviation(rounding, model, name, lambda got, local: got["after"])
    assert of_weights < (0.04 if "_params" in name else 0.005)
    # Where there are experts, some tokens go to others.
    is_dense = model in ("dense", "deep", *DENSE_FAMILIES)
    assert of_losses < (0.03 if "bf16" in name else 0.08)
    assert of_norms < (0.25 if not is_dense else 0.05 if "bf16" in name else 0.12)


@pytest.mark.parametrize(("model", "name"), [p for p in parameters(ROUNDED) if not p.values[1].endswith("_resumed")])
def test_weights_leave_a_policy_as_they_came(rounding, model, name):
    """FP8 parameters are rounded to E4M3's 3 bits of mantissa, all others to bf16's 7: an error is at most half a step,
    2^-4 or 2^-8 of the power of two below, and spread evenly within it, so its root mean square is below that by the
    root of 3."""
    error = relative_error(rounding[model, name]["before"], rounding[model, "local"]["before"])
    assert error < 2 ** -(4 if "_params" in name else 8) / 3**0.5


@pytest.mark.parametrize(("model", "name"), parameters(ROUNDED, needed=[("dense", name) for name in RECIPES]))
def test_tokens_are_scored_within_fp8s_precision_before_the_first_update(rounding, model, name):
    assert rounding[model, name]["scores"] == pytest.approx(rounding[model, "local"]["scores"], rel=0.02)


@pytest.mark.parametrize(("model", "name"), parameters(ROUNDED, needed=RESUMED))
def test_a_resumed_run_continues_bit_for_bit(rounding, model, name):
    whole, resumed = rounding[model, name.removesuffix("_resumed")], rounding[model, name]
    assert resumed["metrics"] == whole["metrics"][2:]
    assert all(torch.equal(resumed["after"][key], tensor) for key, tensor in whole["after"].items())
