"""Weights gathered from any layout are exact on every leader, and every byte travels at most once to each."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from .launching import run_workers
from .tiny import make_model, make_moe_model

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).parent / "workers" / "gathering.py"
TP2 = {"tensor": 2, "sequence": True}
VPP = {"pipeline": 2, "virtual_pipeline": 2}

# What remains of four processes is data parallel.
CASES = {
    "tp2": {"parallel": TP2},
    "tp4_two_processes_to_a_key_head": {"parallel": {"tensor": 4, "sequence": True}},
    "pp2": {"parallel": {"pipeline": 2}},
    "pp2_tied": {"parallel": {"pipeline": 2}, "model": "tied"},
    "tp2_pp2": {"parallel": {**TP2, "pipeline": 2}},
    "tp2_vpp2x2": {"parallel": {**TP2, **VPP}},
    "cp2": {"parallel": {"context": 2}},
    "tp2_cp2": {"parallel": {**TP2, "context": 2}},
    "dp4": {"parallel": {}},
    "bf16_tp2_pp2_with_float32_norms": {"parallel": {**TP2, "pipeline": 2}, "dtype": "bf16", "mixed": True},
    "experts_dp4": {"parallel": {}, "model": "experts"},
    "ep2": {"parallel": {"expert": 2}, "model": "experts"},
    "ep4": {"parallel": {"expert": 4}, "model": "experts"},
    "pp2_ep2": {"parallel": {"pipeline": 2, "expert": 2}, "model": "experts"},
    "vpp2x2_ep2": {"parallel": {**VPP, "expert": 2}, "model": "experts"},
    "cp2_ep2": {"parallel": {"context": 2, "expert": 2}, "model": "experts"},
    "tp2_cp2_ep2": {"parallel": {**TP2, "context": 2, "expert": 2}, "model": "experts"},
    "tp2_ep2": {"parallel": {**TP2, "expert": 2}, "model": "experts"},
    "tp2_ep4": {"parallel": {**TP2, "expert": 4}, "model": "experts"},
    "tp2_etp2": {"parallel": {**TP2, "expert_tensor": 2}, "model": "experts"},
    "tp2_ep2_etp2": {"parallel": {**TP2, "expert": 2, "expert_tensor": 2}, "model": "experts"},
    "bf16_ep2_with_float32_norms": {"parallel": {"expert": 2}, "model": "experts", "dtype": "bf16", "mixed": True},
}
BUCKET_BYTES = 1 << 17


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gathering")
    models = {
        "untied": make_model(folder / "untied", tied=False),
        "tied": make_model(folder / "tied", tied=True),
        "experts": make_moe_model(folder / "experts"),
    }
    cases = [
        {"dtype": "fp32", "bucket_bytes": BUCKET_BYTES, **case, "model": str(models[case.get("model", "untied")])}
        for case in CASES.values()
    ]
    lines = run_workers(WORKER, 4, [json.dumps(cases)], folder / "logs", timeout_s=240).strip().splitlines()
    return dict(zip(CASES, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_every_leader_gets_every_tensor_exactly_once(reports, name):
    report = reports[name]
    assert report["all_exact"], "a leader lacks a tensor or has a wrong one, or another process has any"
    assert report["same_order"]
    # Only what a leader lacks is sent; padding of the vocabulary and of short shards is on top.
    assert report["minimum"] <= report["bytes_sent"] <= 1.02 * report["minimum"]
    assert len(report["bucket_bytes"]) > 2
    assert max(report["bucket_bytes"]) <= BUCKET_BYTES // 2


@pytest.mark.parametrize("name", CASES)
def test_leaders_get_their_tensors_in_buckets_that_all_can_describe(reports, name):
    stages = reports[name]["stages"]
    assert stages["exact"]
    assert stages["complete"]
    assert stages["only_on_stage_leaders"]
    assert stages["same_everywhere"]
    assert stages["only_last_is_last"]
    assert stages["same_after_early_end"]
    assert stages["largest"] <= BUCKET_BYTES // 2
    assert stages["most_transfers"] <= 2, "the memory of a bucket that was read must be free before the next but one"
    assert stages["not_copied"] > 0, "tensors that need no gathering should be the model's own memory"


def test_down_projections_that_an_engine_fuses_are_never_in_two_buckets():
    from dapo_mega.megatron.gathering import _inseparable

    def unit(name):
        return SimpleNamespace(placed=(SimpleNamespace(hf=(f"model.layers.0.self_attn.{name}.weight",)),))

    names = ["q_proj", "o_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj"]
    runs = [len(run) for run in _inseparable(map(unit, [*names, "kv_a_proj_with_mqa"]))]
    assert runs == [1, 1, 4, 1, 2]
