"""A layer of multi-token prediction of Transformer Engine learns what the local one does, also in FP8."""

import pytest
import torch
from transformers import DeepseekV3Config

from tests.distributed.three_updates import learnt, relative_error, three_updates
from tests.distributed.tiny import add_trainable_mtp_layer, save_random

from .test_layouts import BF16, LATENT

pytestmark = pytest.mark.timeout(600)

TP2_EP2 = {"tensor": 2, "sequence": True, "expert": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp") / "model"
    return add_trainable_mtp_layer(save_random(DeepseekV3Config(**LATENT), folder, scale=0.03))


def of_mtp(result):
    return {name: change for name, change in learnt(result).items() if "layers.2." in name}


def test_it_learns_what_the_local_layer_learns(model, tmp_path):
    case = {"mtp": True, "budget": 512}
    results = three_updates(1, {"local": {**case, "layers": "local"}}, {"local": model}, tmp_path)
    spread = {"tp2_ep2": {**case, "parallel": TP2_EP2}, "pp2": {**case, "parallel": {"pipeline": 2}}}
    results |= three_updates(2, spread, dict.fromkeys(spread, model), tmp_path)
    expected = of_mtp(results.pop("local"))
    for name, got in results.items():
        assert relative_error(of_mtp(got), expected) < 1e-4, name


@pytest.mark.parametrize(
    "scaling",
    ["delayed", *(pytest.param(other, marks=pytest.mark.whole_table) for other in ("blockwise", "tensorwise"))],
)
def test_it_learns_in_fp8_within_its_precision_and_goes_on_to_the_bit(model, tmp_path, scaling):
    case = {**BF16, "mtp": True, "budget": 512, "compute": {"fp8": {"scaling": scaling, "params": True}}}
    cases = {
        "local": {"mtp": True, "budget": 512, "layers": "local"},
        "bf16": {**BF16, "mtp": True, "budget": 512},
        "fp8": {**case, "save_after": 2},
        "resumed": {**case, "resume": "fp8"},
    }
    results = three_updates(1, cases, dict.fromkeys(cases, model), tmp_path)
    in_bf16, in_fp8 = (relative_error(of_mtp(results[name]), of_mtp(results["local"])) for name in ("bf16", "fp8"))
    assert in_bf16 < in_fp8 < in_bf16 + 0.05  # Most of both is the rounding of weights.
    for mine, expected in zip(results["fp8"]["metrics"], results["local"]["metrics"], strict=True):
        assert mine["policy/mtp_loss"] == pytest.approx(expected["policy/mtp_loss"], rel=1e-2)
    resumed = results["resumed"]["after"]
    assert all(torch.equal(resumed[name], weight) for name, weight in results["fp8"]["after"].items())
    assert results["resumed"]["metrics"] == results["fp8"]["metrics"][2:]
