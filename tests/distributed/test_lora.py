"""Adapters beside frozen weights learn the same under every layout, also when they continue from checkpoints."""

from functools import partial
from pathlib import Path

import pytest
import torch

from dapo_mega.config import LoraConfig
from dapo_mega.models import load_architecture
from dapo_mega.models.peft_adapters import factor_shape, trained_names, write_adapter

from .tables import run_now
from .test_parallel_parity import assert_learns_the_same, only
from .three_updates import learnt, relative_error, three_updates
from .tiny import (
    has_delta,
    make_deepseek_v3_model,
    make_gpt_oss_model,
    make_moe_model,
    make_phi3_model,
    make_qwen2_moe_model,
    make_qwen3_5_model,
    make_qwen3_model,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SP = {"tensor": 2, "sequence": True}
VPP = {"pipeline": 2, "virtual_pipeline": 2}
FULL = {"recompute": "full"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
# number of processes -> {name: case}
DENSE = {
    1: {"one": {}, "recompute": {"compute": FULL}},
    2: {
        "tp2": {"parallel": {"tensor": 2}},
        "tp2_sp_recompute": {"parallel": SP, "compute": FULL},
        "vpp2x2": {"parallel": {**VPP, "pipeline_layout": [0, 3, 1, 0]}, "save_after": 2},
        "output_alone": {"parallel": {"pipeline": 2, "pipeline_layout": [4, 0]}, "save_after": 1},
        "embedding_alone": {
            "parallel": {"pipeline": 2, "pipeline_layout": [0, 4]},
            "resume": "output_alone",
            "save_after": 2,
        },
        "tp2_from_embedding_alone": {"parallel": {"tensor": 2}, "resume": "embedding_alone"},
        "cp2": {"parallel": {"context": 2}},
        "dp2_overlap": {"compute": OVERLAP},
        "tp2_sp_from_vpp2x2": {"parallel": SP, "resume": "vpp2x2", "save_after": 3},
    },
}
EXPERTS = {
    1: {"one": {}},
    2: {
        "ep2": {"parallel": {"expert": 2}, "save_after": 1},
        "tp2_ep2": {"parallel": {**SP, "expert": 2}},
        "tp2_expert_tp2": {"parallel": {**SP, "expert_tensor": 2}},
        "tp2_ep2_from_ep2": {"parallel": {**SP, "expert": 2}, "resume": "ep2"},
    },
    4: {"tp2_ep2_expert_tp2": {"parallel": {**SP, "expert": 2, "expert_tensor": 2}}},
}
# Megatron's optimizer of all else than experts has no parameters.
EXPERTS_ALONE = {
    2: {
        "one": {},
        "ep2": {"parallel": {"expert": 2}, "save_after": 1},
        "ep2_from_ep2": {"parallel": {"expert": 2}, "resume": "ep2"},
    }
}
# One key head, which two processes cut, and targets that leave out parts of layers.
PARTS = {1: {"one": {}}, 2: {"tp2": {"parallel": {"tensor": 2}}, "tp2_sp": {"parallel": SP}}}
# One tensor of q, k, v, and one of gate and up, that processes cut in parts.
FUSED = {
    1: {"one": {"save_after": 1}},
    2: {"tp2": {"parallel": {"tensor": 2}}, "tp2_from_one": {"parallel": {"tensor": 2}, "resume": "one"}},
}
LATENT = {
    1: {"one": {}},
    2: {
        "ep2": {"parallel": {"expert": 2}, "save_after": 1},
        "tp2_ep2": {"parallel": {**SP, "expert": 2}},
        "tp2_ep2_from_ep2": {"parallel": {**SP, "expert": 2}, "resume": "ep2"},
    },
}
# Experts with biases, of which peft has one A and one B of all.
STACKED = {
    1: {"one": {}},
    2: {
        "ep2": {"parallel": {"expert": 2}, "save_after": 1},
        "ep2_from_ep2": {"parallel": {"expert": 2}, "resume": "ep2"},
        "tp2_ep2_from_ep2": {"parallel": {**SP, "expert": 2}, "resume": "ep2"},
        "pp2": {"parallel": {"pipeline": 2}, "compute": FULL, "save_after": 1},
        "cp2_from_pp2": {"parallel": {"context": 2}, "resume": "pp2"},
        "dp2_overlap": {"compute": OVERLAP},
    },
}
DELTA = {
    1: {"one": {"save_after": 1}},
    2: {
        "tp2_sp_from_one": {"parallel": SP, "resume": "one", "save_after": 2},
        "pp2_from_tp2_sp": {"parallel": {"pipeline": 2}, "resume": "tp2_sp_from_one"},
    },
}
SHARED = {1: {"one": {}}, 2: {"tp2_ep2": {"parallel": {**SP, "expert": 2}}}}
TABLES = {
    **{"dense": DENSE, "experts": EXPERTS, "parts": PARTS, "fused": FUSED, "shared": SHARED, "latent": LATENT},
    **{"experts_alone": EXPERTS_ALONE, "stacked": STACKED},
    **({"delta": DELTA} if has_delta() else {}),
}
DROPOUT = {
    1: {"one": {}, "none": {"dropout": 0.0}, "recompute": {"compute": FULL}},
    2: {
        "tp2_sp": {"parallel": SP, "save_after": 1},
        "tp2_sp_from_tp2_sp": {"parallel": SP, "resume": "tp2_sp"},
        "tp2": {"parallel": {"tensor": 2}},
    },
}

# What the gate has in a combination.
WHOLE_TABLE = {
    "dense": ("recompute", "tp2", "output_alone", "embedding_alone", "tp2_from_embedding_alone"),
    "experts": ("tp2_ep2", "tp2_expert_tp2"),
    "parts": ("tp2",),
    "fused": ("tp2",),
    "latent": ("tp2_ep2",),
    "stacked": ("pp2", "cp2_from_pp2", "dp2_overlap"),
}


def make_adapter(folder: Path, model: Path, lora: LoraConfig, seed: int = 0) -> Path:
    """An adapter whose A and B are both random."""
    family, arch = load_architecture(model)
    generator = torch.Generator().manual_seed(seed)
    names = sorted(trained_names(family, arch, lora.targets))
    tensors = {name: torch.randn(factor_shape(name, arch, lora.rank), generator=generator) * 0.1 for name in names}
    write_adapter(folder, lora, tensors, model)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory, pytestconfig):
    """Kind of table -> name -> what the case left behind; all of a table begin with one adapter."""
    folder = tmp_path_factory.mktemp("lora")
    models = {
        "dense": partial(make_qwen3_model, attention_bias=True),
        "experts": make_moe_model,
        "experts_alone": make_moe_model,
        "parts": partial(make_qwen3_model, num_key_value_heads=1),
        "fused": make_phi3_model,
        "shared": make_qwen2_moe_model,
        "latent": make_deepseek_v3_model,
        "stacked": make_gpt_oss_model,
        "delta": make_qwen3_5_model,
    }
    settings = {
        "parts": {"targets": ("q_proj", "v_proj", "up_proj")},
        "experts_alone": {"targets": ("gate_proj", "up_proj", "down_proj")},
        "dropout": {"dropout": 0.3},
    }
    paths = {kind: models[kind](folder / kind) for kind in TABLES}
    by_size: dict[int, dict[str, dict]] = {}
    for kind, table in {**TABLES, "dropout": DROPOUT}.items():
        lora = {"rank": 4, "alpha": 8.0, **settings.get(kind, {})}
        path = make_adapter(folder / f"adapter of {kind}", paths.setdefault(kind, paths["dense"]), LoraConfig(**lora))
        for size, cases in run_now(table, WHOLE_TABLE.get(kind, ()), pytestconfig).items():
            for name, case in cases.items():
                lora_of_case = {**lora, "path": str(path)} | ({"dropout": 0.0} if "dropout" in case else {})
                before = {"resume": f"{kind} {case['resume']}"} if "resume" in case else {}
                by_size.setdefault(size, {})[f"{kind} {name}"] = {**case, **before, "lora": lora_of_case}
    done = {}
    for size, cases in sorted(by_size.items()):
        done |= three_updates(size, cases, {name: paths[name.split()[0]] for name in cases}, folder / "checkpoints")
    results: dict[str, dict[str, dict]] = {}
    for name, result in done.items():
        results.setdefault(name.split()[0], {})[name.split()[1]] = result
    return results


CASES = [
    pytest.param(kind, name, marks=pytest.mark.whole_table if name in WHOLE_TABLE.get(kind, ()) else ())
    for kind, table in TABLES.items()
    for cases in table.values()
    for name in cases
    if name != "one"
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_adapters_learn_the_same_under_every_layout(results, kind, name):
    got, expected = results[kind][name], results[kind]["one"]
    changed = [name for name, change in learnt(expected).items() if bool(change.any())]
    frozen = expected["after"].keys() - set(changed)
    assert all(torch.equal(got["after"][weight], got["before"][weight]) for weight in frozen)
    assert_learns_the_same(only(got, changed), only(expected, changed))
    assert got["adapters"].keys() == expected["adapters"].keys()
    assert relative_error(got["adapters"], expected["adapters"]) < 1e-5


def test_the_targets_learn_and_nothing_else(results):
    every = dict.fromkeys(("dense", "experts", "stacked"), "_proj")
    for kind, parts in {**every, "parts": ("q_proj", "v_proj", "up_proj")}.items():
        for name, change in learnt(results[kind]["one"]).items():
            is_target = name.removesuffix(".weight").endswith(parts)
            assert bool(change.any()) == is_target, (kind, name)


def test_dropout_is_repeated_and_adapters_are_resumed_to_the_bit(results):
    cases, stacked = results["dropout"], results["stacked"]
    for again, first in (
        (cases["recompute"], cases["one"]),
        (cases["tp2_sp_from_tp2_sp"], cases["tp2_sp"]),
        (stacked["ep2_from_ep2"], stacked["ep2"]),
    ):
        assert all(torch.equal(again["after"][name], weight) for name, weight in first["after"].items())
    assert cases["tp2"]["metrics"][0]["policy/loss"] != cases["none"]["metrics"][0]["policy/loss"]
    assert cases["tp2"]["scores"] == pytest.approx(cases["none"]["scores"], rel=1e-5), "none is dropped in scoring"
