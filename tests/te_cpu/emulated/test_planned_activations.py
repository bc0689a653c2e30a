"""What the planner says that Transformer Engine's layers keep for the backward pass, against what they keep."""

from pathlib import Path

from dapo_mega.config import ComputeConfig, ModelConfig, ParallelConfig
from dapo_mega.megatron.core.layers import attends_with_sinks
from dapo_mega.models import load_architecture
from dapo_mega.planning.activations import ActivationModel, MicroBatchShape, peak_activations
from dapo_mega.planning.rank_layout import RankLayout
from tests.distributed.allocations import allocated
from tests.distributed.launching import run_distributed
from tests.distributed.test_planning import ALL_DENSE, ALL_EXPERTS, ALL_MIXED, FULL, LENGTHS, TOLERANCE, make_models

ATTENTION = {"recompute": "selective"}
ACTIVATION = {"recompute": "selective", "recompute_modules": ["moe_act"]}
MODELS = {
    "wide": [ALL_DENSE],
    "experts": [ALL_EXPERTS],
    "latent": [ALL_MIXED],
    **({"sinks": [ALL_EXPERTS, ACTIVATION]} if attends_with_sinks()[0] else {}),
}
# bf16, as float32 has another attention.
CASES = {
    f"{model}, {compute or 'no recompute'}": {"model": model, "compute": compute}
    for model, own in MODELS.items()
    for compute in ({}, ATTENTION, *own, FULL)
}
SETTINGS = {"dtype": "bf16", "layers": "transformer_engine", "lengths": LENGTHS, "num_micro_batches": 1}


def test_transformer_engine_keeps_the_planned_bytes(tmp_path):
    make_models(tmp_path)
    cases = [
        {**SETTINGS, "name": name, "is_critic": False, **case, "model": str(tmp_path / case["model"])}
        for name, case in CASES.items()
    ]
    (measured,) = run_distributed(allocated, 1, cases)
    rows = []
    for case in cases:
        found, model = measured[case["name"]], ModelConfig(path=case["model"], dtype="bf16")
        placement = RankLayout(load_architecture(Path(case["model"]))[1], ParallelConfig(), 1)
        shape = MicroBatchShape(tuple(LENGTHS), found["num_scored"])
        kept = ActivationModel(placement, model, ComputeConfig(**case["compute"]), shape, "transformer_engine")
        (chunk,) = placement.chunks(0)
        rows.append((case["name"], "kept", found["activations"][0], kept.chunk(chunk)))
        rows.append((case["name"], "peak", found["peak_activations"], peak_activations(kept, 0, 1)[0]))
    print(*(f"{name}, {what}: {planned / bytes_ - 1:+.2%}" for name, what, bytes_, planned in rows), sep="\n")
    wrong = [row for row in rows if abs(row[3] / row[2] - 1) > TOLERANCE]
    assert not wrong, wrong
