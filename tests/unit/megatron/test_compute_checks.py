"""What a model has no use for, and what this machine cannot run, is refused by name before anything starts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dapo_mega.config import ComputeConfig, ModelConfig
from dapo_mega.distributed import accelerator
from dapo_mega.errors import InputError
from dapo_mega.megatron import compute_checks
from dapo_mega.megatron.core import layers
from dapo_mega.models import Architecture
from dapo_mega.models.architecture import Experts

DENSE = Architecture(
    model_type="qwen2",
    num_layers=4,
    hidden_size=8,
    ffn_hidden_size=12,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=4,
    vocab_size=11,
    max_positions=64,
    norm_epsilon=1e-6,
    rope_theta=1e4,
    tied_embeddings=True,
    qkv_bias=True,
)
EXPERTS = replace(DENSE, experts=Experts(number=4, per_token=2, ffn_hidden_size=8, normalised=True))
MODEL = ModelConfig(path="model")


@pytest.mark.parametrize(
    ("arch", "compute", "message"),
    [
        (DENSE, {"recompute": "selective", "recompute_modules": ["moe"]}, r"\['moe'\] need a mixture-of-experts"),
        (DENSE, {"moe": {"aux_loss_coefficient": 0.1}}, "compute.moe is for mixture-of-experts models"),
        (EXPERTS, {"moe": {"router_bias_update_rate": 0.1}}, "needs a model with sigmoid router scores"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(arch, compute, message):
    with pytest.raises(InputError, match=message):
        compute_checks.check_compute(arch, MODEL, ComputeConfig(**compute))


def test_settings_that_fit_the_model_are_accepted():
    sigmoid = replace(EXPERTS, experts=replace(EXPERTS.experts, scores="sigmoid"))
    for arch, settings in (
        (DENSE, {"recompute": "selective"}),
        (EXPERTS, {"recompute": "selective", "recompute_modules": ("moe",)}),
        (sigmoid, {"moe": {"router_bias_update_rate": 0.001}}),
    ):
        assert compute_checks.check_compute(arch, MODEL, ComputeConfig(**settings)) is None


def test_blockwise_fp8_is_refused_with_an_older_cuda(monkeypatch):
    pretend(monkeypatch, (9, 0), True, cuda=(12, 8))
    with pytest.raises(InputError, match=r"torch was built for CUDA 12\.8, CUDA 12\.9 is needed"):
        compute_checks.check_compute(DENSE, MODEL, ComputeConfig(fp8={"scaling": "blockwise"}))


@pytest.mark.parametrize(
    ("scaling", "capability", "has_engine", "message"),
    [
        ("delayed", None, False, "this machine has no CUDA device"),
        ("tensorwise", (9, 0), False, "transformer-engine package is not installed"),
        ("tensorwise", (8, 0), True, r"compute capability \(8, 0\), \(8, 9\) is needed"),
        ("blockwise", (8, 9), True, r"compute capability \(8, 9\), \(9, 0\) is needed"),
    ],
)
def test_fp8_is_refused_where_it_cannot_run_with_the_reason(monkeypatch, scaling, capability, has_engine, message):
    pretend(monkeypatch, capability, has_engine)
    with pytest.raises(InputError, match=message):
        compute_checks.check_compute(DENSE, MODEL, ComputeConfig(fp8={"scaling": scaling}))


@pytest.mark.parametrize(("scaling", "capability"), [("delayed", (8, 9)), ("blockwise", (9, 0)), ("none", None)])
def test_fp8_is_accepted_where_it_runs(monkeypatch, scaling, capability):
    pretend(monkeypatch, capability, True)
    assert compute_checks.check_compute(DENSE, MODEL, ComputeConfig(fp8={"scaling": scaling})) is None


def test_an_offloaded_optimizer_is_refused_for_float32_on_a_gpu_only(monkeypatch):
    exact, offloaded = MODEL.model_copy(update={"dtype": "fp32"}), ComputeConfig(optimizer_offload=0.5)
    pretend(monkeypatch, None, False)
    assert compute_checks.check_compute(DENSE, exact, offloaded) is None
    pretend(monkeypatch, (9, 0), True)
    with pytest.raises(InputError, match=r"compute\.optimizer_offload=0\.5 .* set it to 0, or model\.dtype=bf16"):
        compute_checks.check_compute(DENSE, exact, offloaded)
    assert compute_checks.check_compute(DENSE, MODEL.model_copy(update={"dtype": "bf16"}), offloaded) is None


def pretend(monkeypatch, capability, has_engine, cuda=(12, 9)):
    """A machine with a CUDA device of this compute capability, or without one; with Transformer Engine, or without."""
    monkeypatch.setattr(accelerator, "has_gpu", lambda: capability is not None)
    monkeypatch.setattr(accelerator, "capability", lambda: capability)
    monkeypatch.setattr(accelerator, "cuda_version", lambda: cuda)
    found = SimpleNamespace() if has_engine else None
    monkeypatch.setattr(layers.importlib.util, "find_spec", lambda name: found)
