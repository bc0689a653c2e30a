"""Megatron itself loads what the converter writes, at any layout; a resharded run goes on as the original would."""

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state

from dapo_mega.config import ModelConfig, ParallelConfig
from dapo_mega.conversion.convert import open_checkpoint, reshard, to_megatron
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.megatron_policy import ScoringModel
from dapo_mega.megatron.processes import start_processes

from .launching import run_distributed
from .three_updates import three_updates
from .tiny import FAMILY_MODELS, has_delta, make_moe_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TP2 = {"tensor": 2, "sequence": True}
TP4 = {"tensor": 4, "sequence": True}  # Twice the key heads.
VPP = {"pipeline": 2, "virtual_pipeline": 2}
# Layouts that a checkpoint is written for, resharded to, and loaded at by four processes.
CASES = {
    "qwen2": (TP4, TP2, [TP4]),
    "qwen3": ({}, TP4, [{"pipeline": 2}]),
    "qwen2, tied": (TP2, VPP, [{**TP2, "pipeline": 2}, {**VPP, "pipeline_layout": [0, 3, 1, 0]}]),
    "llama, all biases, tied": ({"pipeline": 2}, TP2, [{}, TP2]),
    "qwen3_moe": ({"expert": 2}, VPP, [{**TP2, "expert_tensor": 2}, {"expert": 2}]),
    "qwen2_moe": ({**VPP, "pipeline_layout": [1, 2, 1, 0]}, {**TP2, "expert": 2}, [{"expert": 4}]),
    "gpt_oss": ({**TP2, "expert": 2}, {"pipeline": 2}, [{**TP2, "pipeline": 2, "expert": 2}, {"expert": 2}]),
    "olmo3": ({}, TP2, [{**TP2, "pipeline": 2}]),
    "gemma3_text": (TP2, {}, [{"pipeline": 2}]),
    "deepseek_v3": ({"pipeline": 3}, {"expert": 4}, [{**TP2, "pipeline": 2, "expert": 2}, VPP]),
}
if has_delta():
    CASES["qwen3_5, tied"] = (TP2, VPP, [{**TP2, "pipeline": 2}, {"context": 2}])
    CASES["qwen3_next"] = ({**TP2, "expert": 2}, {}, [{**TP2, "expert_tensor": 2}])
SHARD_BYTES = 1 << 20


def check_loading(cases):
    """The policy loads a converted checkpoint, and Megatron itself a resharded one, as what they were made from."""
    for case in cases:
        check_case(case)


def check_case(case):
    parallel = ParallelConfig(**case["parallel"])
    processes = start_processes(parallel, 0)

    def tensors_of(model):
        return {
            f"{number}.{name}": tensor.clone()
            for number, chunk in enumerate(model.chunks)
            for name, tensor in unwrapped(chunk).state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }

    def load(path):
        return ScoringModel(ModelConfig(path=path, dtype="fp32"), parallel, processes, temperature=1.0)

    model = load(case["model"])
    chunks = {f"model{number}": unwrapped(chunk) for number, chunk in enumerate(model.chunks)}
    expected = tensors_of(model)
    assert_equal(tensors_of(load(case["converted"])), expected, (case, "by the policy"))
    for tensor in (tensor for chunk in chunks.values() for tensor in chunk.state_dict().values()):
        if tensor is not None:
            tensor.fill_(float("nan"))
    loaded = dist_checkpointing.load(
        {name: chunk.sharded_state_dict() for name, chunk in chunks.items()}, case["resharded"]
    )
    for name, chunk in chunks.items():
        chunk.load_state_dict(loaded[name])
    assert_equal(tensors_of(model), expected, (case, "by Megatron"))
    parallel_state.destroy_model_parallel()


def assert_equal(found, expected, what):
    assert found.keys() == expected.keys(), what
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different, (what, different)


def test_megatron_and_the_policy_load_converted_checkpoints_at_any_layout(tmp_path):
    cases = []
    for name, (written, resharded, layouts) in CASES.items():
        model = FAMILY_MODELS[name](tmp_path / name)
        first, second = tmp_path / f"{name} converted", tmp_path / f"{name} resharded"
        to_megatron(open_checkpoint(model), first, ParallelConfig(**written), SHARD_BYTES)
        reshard(open_checkpoint(first), second, ParallelConfig(**resharded), 40_000)
        folders = {"converted": str(first), "resharded": str(second)}
        cases += [{"model": str(model), **folders, "parallel": layout} for layout in layouts]
    run_distributed(check_loading, 4, cases, timeout_s=400)


def test_a_run_resharded_between_expert_layouts_learns_what_it_would_have(tmp_path):
    """Without spread experts there is one optimizer, with them two: their states change places."""
    model = make_moe_model(tmp_path / "model")

    def run(cases):
        return three_updates(2, cases, dict.fromkeys(cases, model), tmp_path / "checkpoints")

    expected = run({"together": {"save_after": 1}, "apart": {"parallel": {"expert": 2}, "save_after": 1}})["together"]
    resumed = {}
    for source, target, parallel in (("together", "now apart", {**TP2, "expert": 2}), ("apart", "now together", {})):
        step = next((tmp_path / "checkpoints" / source).glob("step_*"))
        folder = tmp_path / "checkpoints" / target
        folder.mkdir()
        reshard(open_checkpoint(step, model), folder / step.name, ParallelConfig(**parallel), SHARD_BYTES)
        resumed[f"{target}, resumed"] = {"resume": target, "parallel": parallel}
    for case, found in run(resumed).items():
        for name, tensor in expected["after"].items():
            error = (found["after"][name] - tensor).norm() / tensor.norm()
            assert error < 1e-5, (case, name)
        for mine, reference in zip(found["metrics"], expected["metrics"][1:], strict=True):
            assert mine["policy/grad_norm"] == pytest.approx(reference["policy/grad_norm"], rel=1e-5)
