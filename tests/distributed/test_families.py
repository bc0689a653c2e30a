"""Every model family in every layout: checkpoints come back bit by bit, log-probs and gradients do not depend on it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .launching import run_workers
from .tiny import FAMILY_MODELS

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).parent / "workers" / "families.py"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIXTURES = tuple(name for name in FAMILY_MODELS if name.startswith(("qwen2_moe", "qwen3_moe", "deepseek")))
DENSE = tuple(name for name in FAMILY_MODELS if name not in MIXTURES)
ALL = DENSE + MIXTURES
TP2 = {"tensor": 2, "sequence": True}


@dataclass(frozen=True)
class Case:
    """One layout of `num_processes` and the models that are tried in it."""

    num_processes: int
    parallel: dict[str, int | bool] = field(default_factory=dict)
    models: tuple[str, ...] = ALL
    dtype: str = "fp32"


LAYOUTS = {
    "one": Case(1),
    "one_bf16": Case(1, dtype="bf16"),
    "tp2": Case(2, {"tensor": 2}, DENSE),
    "tp2_sp": Case(2, TP2, DENSE),
    "tp2_experts_cut": Case(2, {**TP2, "expert_tensor": 2}, MIXTURES),
    "pp2": Case(2, {"pipeline": 2}),
    "cp2": Case(2, {"context": 2}, ("qwen3", "llama, all biases, tied", "mistral")),
    "ep2": Case(2, {"expert": 2}, MIXTURES),
    "tp2_pp2": Case(4, {**TP2, "pipeline": 2}, DENSE),
    "tp2_pp2_bf16": Case(4, {**TP2, "pipeline": 2}, DENSE, "bf16"),
    "tp2_pp2_ep2": Case(4, {**TP2, "pipeline": 2, "expert": 2}, MIXTURES),
    "tp2_pp2_ep2_bf16": Case(4, {**TP2, "pipeline": 2, "expert": 2}, MIXTURES, "bf16"),
}
PAIRS = [(layout, model) for layout, case in LAYOUTS.items() for model in case.models]
IN_FLOAT32 = [(layout, model) for layout, model in PAIRS if LAYOUTS[layout].dtype == "fp32" and layout != "one"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: make(folder / name) for name, make in FAMILY_MODELS.items()}


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    """What the processes wrote: layout -> model -> results by rank."""
    folder = tmp_path_factory.mktemp("results")
    for num_processes in sorted({case.num_processes for case in LAYOUTS.values()}):
        described = [
            {
                "name": layout,
                "parallel": case.parallel,
                "dtype": case.dtype,
                "learns": case.dtype == "fp32",
                "models": {model: str(checkpoints[model]) for model in case.models},
            }
            for layout, case in LAYOUTS.items()
            if case.num_processes == num_processes
        ]
        logs = folder / f"logs{num_processes}"
        run_workers(WORKER, num_processes, [str(folder), json.dumps(described)], logs, timeout_s=600)
    return {
        layout: {
            model: [torch.load(folder / layout / f"{model}.{rank}.pt") for rank in range(case.num_processes)]
            for model in case.models
        }
        for layout, case in LAYOUTS.items()
    }


def assert_same_tensors(given, expected, **tolerances):
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(given[name], tensor, **tolerances, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("layout", "model"), PAIRS)
def test_a_checkpoint_comes_back_bit_by_bit(results, checkpoints, layout, model):
    on_disk = load_file(checkpoints[model] / "model.safetensors")
    dtype = DTYPES[LAYOUTS[layout].dtype]
    # Routers keep their biases in float32 whatever the policy's dtype.
    expected = {k: v if k.endswith("e_score_correction_bias") else v.to(dtype) for k, v in on_disk.items()}
    assert_same_tensors(results[layout][model][0]["weights"], expected, rtol=0, atol=0)


@pytest.mark.parametrize(("layout", "model"), IN_FLOAT32)
def test_logprobs_do_not_depend_on_the_layout(results, layout, model):
    (alone,) = results["one"][model]
    given = torch.cat([result["logprobs"] for result in results[layout][model] if "logprobs" in result])
    expected = alone["logprobs"]
    if "context" in LAYOUTS[layout].parallel:
        # Each process has pieces of all sequences.
        given, expected = given.sort().values, expected.sort().values
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layout", "model"), IN_FLOAT32)
def test_a_supervised_step_does_not_depend_on_the_layout(results, layout, model):
    alone, given = results["one"][model][0], results[layout][model][0]
    assert_same_tensors(given["updated"], alone["updated"], rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(alone["updated"][name], alone["weights"][name]) for name in alone["weights"])
