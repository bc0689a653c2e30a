"""Weights gathered from any layout are exact on every leader and in every engine. Every byte travels at most once to
each leader, and all processes have about the same number to send."""

import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file

from dapo_mega.config import ModelConfig, ParallelConfig, WeightSyncConfig
from dapo_mega.megatron import gathering
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.megatron_policy import ScoringModel
from dapo_mega.megatron.processes import start_processes
from dapo_mega.weight_sync.broadcast import BroadcastSender
from tests.unit.weight_sync.pushing import Pushing
from tests.unit.weight_sync.scripted_engines import ScriptedFleet

from .launching import run_distributed
from .tables import marked, run_now
from .tiny import make_model, make_moe_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TP2 = {"tensor": 2, "sequence": True}
VPP = {"pipeline": 2, "virtual_pipeline": 2}

# What remains of four processes is data parallel.
CASES = {
    "tp2": {"parallel": TP2},
    "tp4_two_processes_to_a_key_head": {"parallel": {"tensor": 4, "sequence": True}},
    "pp2": {"parallel": {"pipeline": 2}},
    "pp2_tied": {"parallel": {"pipeline": 2}, "model": "tied"},
    "pp4_tied_ends_alone": {"parallel": {"pipeline": 4, "pipeline_layout": [0, 1, 3, 0]}, "model": "tied"},
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
# What the gate has in a combination.
WHOLE_TABLE = {"tp2", "pp2", "tp2_pp2", "ep2", "pp2_ep2", "cp2_ep2", "tp2_ep2", "tp2_etp2"}
WITH_ENGINES = (
    "pp2_tied",
    "pp4_tied_ends_alone",
    "tp2_vpp2x2",
    "cp2",
    "tp2_cp2",
    "dp4",
    "bf16_tp2_pp2_with_float32_norms",
    "vpp2x2_ep2",
    "tp2_ep4",
)
URLS = [f"http://e{number}" for number in range(4)]
BUCKET_BYTES = 1 << 17
SENDERS_BYTES = 1 << 15  # So that every process has several buckets.


def run_cases(cases):
    return [run_case(case) for case in cases]


def run_case(case):
    parallel = ParallelConfig(**case["parallel"])
    processes = start_processes(parallel, 0)
    model = ScoringModel(ModelConfig(path=case["model"], dtype=case["dtype"]), parallel, processes, 1.0)
    chunks = [unwrapped(chunk) for chunk in model.chunks]
    expected = load_file(Path(case["model"]) / "model.safetensors")
    dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float32
    expected = {name: tensor.to(dtype) for name, tensor in expected.items()}
    if case.get("mixed"):
        expected.update({name: tensor.float() for name, tensor in expected.items() if "norm" in name})
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if "norm" in name:
                    parameter.data = parameter.data.float()
    with pytest.MonkeyPatch.context() as patch:
        meetings = watch_meetings(patch)
        gatherer = gathering.WeightGatherer(chunks, model.layout, processes)
    buckets = [list(bucket) for bucket in gatherer.weights(case["bucket_bytes"])]
    got = dict(pair for bucket in buckets for pair in bucket)
    if processes.is_leader:
        exact = got.keys() == expected.keys() and all(
            got[name].dtype == tensor.dtype and torch.equal(got[name], tensor) for name, tensor in expected.items()
        )
    else:
        exact = not got
    model_bytes = sum(tensor.nbytes for tensor in expected.values())
    held_bytes = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    # What a leader does not hold must reach it once; nobody else needs anything.
    counts = [int(exact), gatherer.bytes_sent, model_bytes - held_bytes if processes.is_leader else 0]
    total = torch.tensor(counts, dtype=torch.int64)
    dist.all_reduce(total, group=processes.control)
    names: list = [None] * processes.data_size
    if processes.is_leader:
        dist.all_gather_object(names, [name for bucket in buckets for name, _ in bucket], group=processes.leaders)
    stages = check_stage_buckets(gatherer, case["bucket_bytes"], expected, processes)
    numbers = sorted({1, processes.data_size})
    senders = [check_senders(gatherer, range(replicas), expected, processes) for replicas in numbers]
    engines = check_engines(gatherer, expected, processes) if case.get("engines") else []
    parallel_state.destroy_model_parallel()
    return {
        "stages": stages,
        "senders": senders,
        "engines": engines,
        "has_met": meetings == [processes.device],
        "all_exact": int(total[0]) == processes.world_size,
        "bytes_sent": int(total[1]),
        "minimum": int(total[2]),
        "bucket_bytes": [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets],
        "same_order": all(order == names[0] for order in names),
    }


def check_stage_buckets(gatherer, bucket_bytes, expected, processes):
    """What rank 0 finds over all processes: names by bucket, and whether data are where they should be and right."""
    transfers = watch_transfers(gatherer)
    own = {parameter.untyped_storage().data_ptr() for _, parameter, _ in gatherer._held.values()}
    # Closed early, by all processes after the same bucket.
    first_specs = next(gatherer.weights(bucket_bytes, "stage_leaders", (0,))).specs
    described, data, sizes, num_own, most_alive = [], {}, [], 0, 0
    for bucket in gatherer.weights(bucket_bytes, "stage_leaders", (0,)):
        described.append((bucket.stage, bucket.specs, bucket.is_last))
        for name, tensor in bucket:
            num_own += tensor.untyped_storage().data_ptr() in own
            data[name] = tensor.clone()
        if bucket.tensors is not None:
            sizes.append(bucket.num_bytes)
        most_alive = max(most_alive, sum(transfer() is not None for transfer in transfers))
    everyones: list = [None] * processes.world_size
    is_exact = all(expected[name].dtype == t.dtype and torch.equal(expected[name], t) for name, t in data.items())
    is_same = first_specs == described[0][1]
    mine = (described, list(data), is_exact, max(sizes, default=0), is_same, num_own, most_alive)
    dist.all_gather_object(everyones, mine, group=processes.control)
    names = [spec.name for bucket in described for spec in bucket[1]]
    stage_size = processes.world_size // processes.pipeline_size
    held = [
        [s.name for bucket in described if bucket[0] == stage for s in bucket[1]] for stage in range(len(everyones))
    ]
    return {
        "same_everywhere": all(each[0] == described for each in everyones),
        "complete": sorted(names) == sorted(expected),
        "only_on_stage_leaders": all(
            each[1] == (held[rank // stage_size] if rank % stage_size == 0 else [])
            for rank, each in enumerate(everyones)
        ),
        "exact": all(each[2] for each in everyones),
        "largest": max(each[3] for each in everyones),
        "same_after_early_end": all(each[4] for each in everyones),
        "not_copied": sum(each[5] for each in everyones),
        "most_transfers": max(each[6] for each in everyones),
        "only_last_is_last": [bucket[2] for bucket in described] == [False] * (len(described) - 1) + [True],
    }


def check_senders(gatherer, replicas, expected, processes):
    """What rank 0 finds over all processes when all processes of these replicas get buckets."""
    planned = gatherer.weight_plan(SENDERS_BYTES)
    transfers = watch_transfers(gatherer)
    replica_size = processes.tensor_size * processes.context_size
    sender = processes.pipeline_rank * replica_size + processes.rank % replica_size
    data, as_planned, most_alive = {}, True, 0
    next(gatherer.weights(SENDERS_BYTES, "senders", replicas))  # Closed early, by all processes after the same round.
    first = len(transfers)
    for number, bucket in enumerate(gatherer.weights(SENDERS_BYTES, "senders", replicas)):
        data |= {name: tensor.clone() for name, tensor in bucket}
        specs = bucket.specs if bucket.tensors is not None else None
        alone = [b.specs for b in planned[number] if (b.stage, b.sender) == (processes.pipeline_rank, sender)]
        as_planned &= [specs] == (alone or [None]) if processes.data_rank in replicas else specs is None
        alive = sum(transfer() is not None for transfer in transfers[first:])
        most_alive = max(most_alive, alive - max(map(len, planned)))
        del bucket
    is_exact = all(expected[name].dtype == t.dtype and torch.equal(expected[name], t) for name, t in data.items())
    num_bytes = sum(tensor.nbytes for tensor in data.values())
    mine = (processes.data_rank, processes.pipeline_rank, list(data), is_exact, as_planned, num_bytes, most_alive)
    everyones: list = [None] * processes.world_size
    dist.all_gather_object(everyones, mine, group=processes.control)
    totals = {}
    for replica, stage, *_, num_bytes, _ in everyones:
        totals.setdefault((replica, stage), []).append(num_bytes)
    sending = [each for (replica, _), each in totals.items() if replica in replicas]
    return {
        "exact": all(each[3] for each in everyones),
        "as_planned": all(each[4] for each in everyones),
        "complete": all(
            sorted(name for each in everyones if each[0] == replica for name in each[2])
            == (sorted(expected) if replica in replicas else [])
            for replica in range(processes.data_size)
        ),
        "imbalance": max(max(each) * len(each) / sum(each) for each in sending),
        "most_alive": max(each[6] for each in everyones),
    }


def check_engines(gatherer, expected, processes):
    """Three updates of four engines: one dies in the middle of the first and is alone in the second. On rank 0, which
    engines have the weights after each, which are away, and the metrics."""
    fleet = ScriptedFleet(4, 60.0) if processes.rank == 0 else None
    config = WeightSyncConfig(timeout_s=60, bucket_mib=SENDERS_BYTES / 2**20)
    sync = Pushing(processes, fleet, config, BroadcastSender(processes, config))
    outcomes = []
    for version, push in enumerate((sync.push, sync.push_to_outdated, sync.push)):
        if fleet:
            fleet.return_all()
            fleet.without_plugin = set(fleet.engines) if version == 2 else set()
            engine = fleet.engines["http://e1"]
            engine.faults = {("update", 4): "die"} if version == 0 else {}
            for each in [engine] if version == 1 else fleet.engines.values():
                each.weights.clear()
        metrics = push(gatherer, version)
        if fleet:
            exact = [url for url, each in fleet.engines.items() if same_bytes(each.weights, expected)]
            outcomes.append((exact, list(fleet.away), metrics))
    sync.close()
    if fleet:
        fleet.close()
    return outcomes


def same_bytes(got, expected):
    return got.keys() == expected.keys() and all(
        got[name].dtype == tensor.dtype and torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in expected.items()
    )


def watch_meetings(patch):
    """Where the tensors are that all processes reduce from now on."""
    reduce, places = dist.all_reduce, []

    def watched(tensor, *arguments, group=None, **options):
        if group is None:
            places.append(tensor.device)
        return reduce(tensor, *arguments, group=group, **options)

    patch.setattr(dist, "all_reduce", watched)
    return places


def watch_transfers(gatherer):
    """References to all transfers from now on, which do not keep their memory."""
    start = gatherer._start
    transfers = []

    def watched(*arguments):
        transfer = start(*arguments)
        transfers.append(weakref.ref(transfer))
        return transfer

    gatherer._start = watched
    return transfers


@pytest.fixture(scope="module")
def reports(tmp_path_factory, pytestconfig):
    folder = tmp_path_factory.mktemp("gathering")
    models = {
        "untied": make_model(folder / "untied", tied=False),
        "tied": make_model(folder / "tied", tied=True),
        "experts": make_moe_model(folder / "experts"),
    }
    (chosen,) = run_now({4: CASES}, WHOLE_TABLE, pytestconfig).values()
    cases = [
        {
            "dtype": "fp32",
            "bucket_bytes": BUCKET_BYTES,
            **case,
            "model": str(models[case.get("model", "untied")]),
            "engines": name in WITH_ENGINES,
        }
        for name, case in chosen.items()
    ]
    return dict(zip(chosen, run_distributed(run_cases, 4, cases, timeout_s=240)[0], strict=True))


@pytest.mark.parametrize("name", marked(CASES, WHOLE_TABLE))
def test_every_leader_gets_every_tensor_exactly_once(reports, name):
    report = reports[name]
    assert report["has_met"], "NCCL connects a group in an operation of all its processes, before some of them exchange"
    assert report["all_exact"], "a leader lacks a tensor or has a wrong one, or another process has any"
    assert report["same_order"]
    # Only what a leader lacks is sent; padding of the vocabulary and of short shards is on top.
    assert report["minimum"] <= report["bytes_sent"] <= 1.02 * report["minimum"]
    assert len(report["bucket_bytes"]) > 2
    assert max(report["bucket_bytes"]) <= BUCKET_BYTES // 2


@pytest.mark.parametrize("name", marked(CASES, WHOLE_TABLE))
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


@pytest.mark.parametrize("name", marked(CASES, WHOLE_TABLE))
def test_the_processes_of_a_replica_get_about_equal_parts_of_its_weights(reports, name):
    """Whether one replica sends or all of them."""
    for senders in reports[name]["senders"]:
        assert senders["exact"]
        assert senders["complete"]
        assert senders["as_planned"]
        assert senders["imbalance"] <= 1.1
        assert senders["most_alive"] <= 1, "beside the next round, a process has the bucket that it sends"


@pytest.mark.parametrize("name", WITH_ENGINES)
def test_engines_of_all_replicas_get_the_same_bytes_from_all_processes(reports, name):
    first, second, third = reports[name]["engines"]
    assert (first[0], first[1]) == ([URLS[0], *URLS[2:]], URLS[1:2]), "one died in the middle"
    assert second[:2] == (URLS, [])
    assert third[:2] == (URLS, [])
    assert second[2]["weight_sync/bytes"] == third[2]["weight_sync/bytes"] == first[2]["weight_sync/bytes"]
    # Every stage sends its own weights: of four, one has three of four layers here.
    assert 1 <= third[2]["weight_sync/sender_balance"] <= (3 if name == "pp4_tied_ends_alone" else 1.1)


def test_down_projections_that_an_engine_fuses_are_never_in_two_buckets():
    from dapo_mega.megatron.gathering import _inseparable

    def unit(name):
        return SimpleNamespace(placed=(SimpleNamespace(hf=(f"model.layers.0.self_attn.{name}.weight",)),))

    names = ["q_proj", "o_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj"]
    runs = [len(run) for run in _inseparable(map(unit, [*names, "kv_a_proj_with_mqa"]))]
    assert runs == [1, 1, 4, 1, 2]
