"""Weights gathered from any layout are exact on every leader, and every byte travels at most once to each."""

import itertools
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
def test_every_leader_gets_every_tensor_exactly_in_one_order_and_nobody_else_any(reports, name):
    assert reports[name]["all_exact"]
    assert reports[name]["same_order"]


@pytest.mark.parametrize("name", CASES)
def test_only_what_a_leader_lacks_is_sent_and_only_once(reports, name):
    report = reports[name]
    # Padding of the vocabulary and of short shards is on top.
    assert report["minimum"] <= report["bytes_sent"] <= 1.02 * report["minimum"]


@pytest.mark.parametrize("name", CASES)
def test_two_buckets_fit_the_limit(reports, name):
    sizes = reports[name]["bucket_bytes"]
    assert len(sizes) > 2
    assert max(sizes) <= BUCKET_BYTES // 2


@pytest.mark.parametrize("name", CASES)
def test_each_stages_leader_in_the_first_replica_gets_the_stages_tensors_as_bytes_that_all_can_describe(reports, name):
    stages = reports[name]["stages"]
    assert stages["exact"]
    assert stages["complete"]
    assert stages["only_on_stage_leaders"]
    assert stages["same_everywhere"]
    assert stages["only_last_is_last"]


@pytest.mark.parametrize("name", CASES)
def test_two_stage_buckets_and_the_shards_of_one_fit_twice_the_limit(reports, name):
    assert reports[name]["stages"]["largest"] <= BUCKET_BYTES * 2 // 3
    for places in reports[name]["stages"]["places_of_leaders"]:
        assert len(set(places)) <= 2
        assert all(place != after for place, after in itertools.pairwise(places))
    assert reports[name]["stages"]["memory_is_kept"], "touching fresh memory takes longer than filling it"


@pytest.mark.parametrize("name", CASES)
def test_stage_buckets_can_be_left_early_and_gathered_again(reports, name):
    assert reports[name]["stages"]["same_after_early_end"]


@pytest.mark.parametrize("name", CASES)
def test_large_tensors_that_need_no_gathering_leave_from_where_they_lie(reports, name):
    pieces = reports[name]["pieces"]
    assert pieces["exact"]
    assert pieces["same_everywhere"]
    parallel = CASES[name]["parallel"]
    assert pieces["own_pieces"] > 0 or "tensor" in parallel
    # They take no memory, so a bucket holds more of them.
    assert pieces["most_copied"] <= BUCKET_BYTES * 2 // 3
    assert pieces["largest"] <= 4 * BUCKET_BYTES
    assert pieces["largest"] > BUCKET_BYTES or "tensor" in parallel or "expert" in parallel


def test_down_projections_that_an_engine_fuses_are_never_in_two_buckets():
    from dapo_mega.megatron.gathering import _inseparable

    def unit(name):
        return SimpleNamespace(placed=(SimpleNamespace(hf=(f"model.layers.0.self_attn.{name}.weight",)),))

    names = ["q_proj", "o_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj"]
    runs = [len(run) for run in _inseparable(map(unit, [*names, "kv_a_proj_with_mqa"]))]
    assert runs == [1, 1, 4, 1, 2]
