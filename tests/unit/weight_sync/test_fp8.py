"""Quantised weights are the weights to within FP8's error, in the form that SGLang's loaders take."""

import pytest
import torch

from dapo_mega.types import WeightBucket, WeightSpec
from dapo_mega.weight_sync.fp8 import BLOCK, quantise, quantised_bucket

# Half a step of 3 bits of mantissa, and below 2^-6 half a step of the subnormal numbers, in units of a block's scale.
RELATIVE_ERROR, ABSOLUTE_ERROR = 2.0**-4, 2.0**-10


def dequantised(quantised, scales):
    rows, columns = quantised.shape
    by_element = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return quantised.float() * by_element, by_element


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (100, 70), (129, 257), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_value_is_within_half_a_step_of_the_weight(shape, dtype):
    random = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=random) * torch.logspace(-4, 2, shape[1])).to(dtype)
    quantised, scales = quantise(weight)
    restored, by_element = dequantised(quantised, scales)
    assert quantised.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    assert scales.shape == (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    limit = torch.maximum(weight.float().abs() * RELATIVE_ERROR, by_element * ABSOLUTE_ERROR)
    assert ((restored - weight.float()).abs() <= limit * (1 + 1e-6)).all()


def test_each_blocks_scale_uses_all_of_float8s_range_and_is_finite_for_zeros():
    weight = torch.zeros(256, 300)
    weight[3, 5], weight[7, 7], weight[7, 255], weight[255, 256] = -13.0, 3.25, 0.7, 5.0
    quantised, scales = quantise(weight)
    expected = torch.tensor([[13.0 / 448.0, 0.7 / 448.0, 1.0], [1.0, 1.0, 5.0 / 448.0]])
    torch.testing.assert_close(scales, expected)
    assert quantised[3, 5].item() == -448.0
    assert quantised[7, 7].item() == 112.0
    assert quantised.float().abs().count_nonzero() == 4


def test_only_projections_are_quantised_beside_their_scales():
    quantised_names = [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.0.mlp.experts.3.down_proj.weight",
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
    ]
    other_names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "lm_head.weight",
    ]
    tensors = {name: torch.randn(130, 70).bfloat16() for name in quantised_names}
    tensors |= {name: torch.randn(9, 4).bfloat16() for name in other_names}
    specs = tuple(WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    result = quantised_bucket(WeightBucket(1, specs, iter(tensors.values()), is_last=True))
    got = dict(result)
    assert set(got) == {*tensors, *(f"{name}_scale_inv" for name in quantised_names)}
    for name in other_names:
        assert torch.equal(got[name], tensors[name])
    for name in quantised_names:
        expected, scales = quantise(tensors[name])
        assert torch.equal(got[name].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(got[f"{name}_scale_inv"], scales)
    assert (result.stage, result.is_last) == (1, True)
    sizes = [tensor.dtype.itemsize for tensor in got.values()]
    assert sizes == sorted(sizes, reverse=True)  # So that SGLang, which does not pad, finds everything aligned.
    assert [(spec.name, spec.dtype, spec.shape) for spec in result.specs] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in got.items()
    ]
    elsewhere = quantised_bucket(WeightBucket(1, specs, None, is_last=True))
    assert (elsewhere.specs, elsewhere.tensors) == (result.specs, None)
