"""Megatron itself loads what the converter writes, at any layout; a resharded run goes on as the original would."""

import json
from pathlib import Path

import pytest
import torch

from dapo_mega.config import ParallelConfig
from dapo_mega.conversion.convert import open_checkpoint, reshard, to_megatron

from .launching import run_workers
from .tiny import FAMILY_MODELS, make_moe_model

pytestmark = pytest.mark.distributed

WORKERS = Path(__file__).parent / "workers"
TP2 = {"tensor": 2, "sequence": True}
TP4 = {"tensor": 4, "sequence": True}  # Twice the key heads.
VPP = {"pipeline": 2, "virtual_pipeline": 2}
# Layouts that a checkpoint is written for, resharded to, and loaded at by four processes.
CASES = {
    "qwen2": (TP4, TP2, [TP4]),
    "qwen3": ({}, TP4, [{"pipeline": 2}]),
    "qwen2, tied": (TP2, VPP, [{**TP2, "pipeline": 2}, VPP]),
    "llama, all biases, tied": ({"pipeline": 2}, TP2, [{}, TP2]),
    "qwen3_moe": ({"expert": 2}, VPP, [{**TP2, "expert_tensor": 2}, {"expert": 2}]),
    "qwen2_moe": (VPP, {**TP2, "expert": 2}, [{"expert": 4}]),
    "deepseek_v3": ({**TP2, "expert": 2}, {"expert": 4}, [{**TP2, "pipeline": 2, "expert": 2}, VPP]),
}
SHARD_BYTES = 1 << 20


def test_megatron_and_the_policy_load_converted_checkpoints_at_any_layout(tmp_path):
    cases = []
    for name, (written, resharded, layouts) in CASES.items():
        model = FAMILY_MODELS[name](tmp_path / name)
        first, second = tmp_path / f"{name} converted", tmp_path / f"{name} resharded"
        to_megatron(open_checkpoint(model), first, ParallelConfig(**written), SHARD_BYTES)
        reshard(open_checkpoint(first), second, ParallelConfig(**resharded), 40_000)
        folders = {"converted": str(first), "resharded": str(second)}
        cases += [{"model": str(model), **folders, "parallel": layout} for layout in layouts]
    run_workers(WORKERS / "load_megatron_folders.py", 4, [json.dumps(cases)], tmp_path / "logs", timeout_s=400)


def test_a_run_resharded_between_expert_layouts_learns_what_it_would_have(tmp_path):
    """Without spread experts there is one optimizer, with them two: their states change places."""
    model = make_moe_model(tmp_path / "model")

    def run(cases, folder):
        listed = [{"model": str(model), **case} for case in cases]
        script = WORKERS / "three_updates.py"
        run_workers(script, 2, [str(tmp_path), json.dumps(listed)], tmp_path / folder, timeout_s=400)

    run([{"name": "together", "save_after": 1}, {"name": "apart", "parallel": {"expert": 2}, "save_after": 1}], "first")
    resumed = []
    for source, target, parallel in (("together", "now apart", {**TP2, "expert": 2}), ("apart", "now together", {})):
        step = next((tmp_path / "checkpoints" / source).glob("step_*"))
        folder = tmp_path / "checkpoints" / target
        folder.mkdir()
        reshard(open_checkpoint(step, model), folder / step.name, ParallelConfig(**parallel), SHARD_BYTES)
        resumed.append({"name": f"{target}, resumed", "resume": target, "parallel": parallel})
    run(resumed, "second")
    expected = torch.load(tmp_path / "together.pt", weights_only=True)
    for case in resumed:
        found = torch.load(tmp_path / f"{case['name']}.pt", weights_only=True)
        for name, tensor in expected["after"].items():
            error = (found["after"][name] - tensor).norm() / tensor.norm()
            assert error < 1e-5, (case["name"], name)
        for mine, reference in zip(found["metrics"], expected["metrics"][1:], strict=True):
            assert mine["policy/grad_norm"] == pytest.approx(reference["policy/grad_norm"], rel=1e-5)
