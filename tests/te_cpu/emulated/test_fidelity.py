"""What stands in for the compiled extension, against tables, plain torch and Transformer Engine's own Python."""

import itertools
import math

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

from dapo_mega.megatron.core.layers import attends_with_sinks
from tests.te_cpu import extension
from tests.te_cpu.extension.enums import DType
from tests.te_cpu.extension.quantization import to_fp8, values

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def codes(dtype):
    """The value of each byte, from the format's definition (arXiv 2209.05433, table 1): [256] float64."""
    exponent_bits, mantissa_bits, bias = {E4M3: (4, 3, 7), E5M2: (5, 2, 15)}[dtype]
    table = []
    for byte in range(256):
        sign = -1.0 if byte >> 7 else 1.0
        exponent, mantissa = byte >> mantissa_bits & (1 << exponent_bits) - 1, byte & (1 << mantissa_bits) - 1
        fraction = mantissa / (1 << mantissa_bits)
        is_last = exponent == (1 << exponent_bits) - 1
        if dtype == E5M2 and is_last:
            table.append(sign * math.inf if mantissa == 0 else math.nan)
        elif dtype == E4M3 and is_last and mantissa == 7:
            table.append(math.nan)
        elif exponent == 0:
            table.append(sign * 2.0 ** (1 - bias) * fraction)
        else:
            table.append(sign * 2.0 ** (exponent - bias) * (1 + fraction))
    return torch.tensor(table, dtype=torch.float64)


def nearest_even(wide, dtype):
    """Bytes of the nearest finite values of the table; of two as near, the one with an even byte."""
    table = codes(dtype)[:128]
    finite = table[table.isfinite()]
    distance = (wide.double().abs()[:, None] - finite).abs()
    best = distance.min(1, keepdim=True).values
    byte = torch.arange(len(finite)).expand_as(distance)
    is_best = distance == best
    even = torch.where(is_best & (byte % 2 == 0), byte, 999).min(1).values
    any_ = torch.where(is_best, byte, 999).min(1).values
    chosen = torch.where(is_best.sum(1) > 1, even, any_)
    return (chosen + 128 * wide.signbit()).to(torch.uint8)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_casts_round_to_the_nearest_value_of_the_format_and_saturate(dtype):
    finite = codes(dtype)[codes(dtype).isfinite()].float()
    ties = (finite.sort().values[1:] + finite.sort().values[:-1]) / 2
    torch.manual_seed(0)
    spread = torch.randn(2000) * 2.0 ** torch.randint(-20, 20, (2000,))
    wide = torch.cat([finite, ties, spread, torch.tensor([1e30, -1e30, 0.0])])
    wide = wide[wide != 0]  # The sign of zero is the cast's own.
    assert torch.equal(to_fp8(wide, dtype), nearest_even(wide.clamp(-float(finite.max()), float(finite.max())), dtype))


def test_a_tensor_has_one_scale_that_makes_its_largest_value_the_formats():
    torch.manual_seed(0)
    wide = torch.randn(32, 48) * 3
    quantizer = Float8CurrentScalingQuantizer(E4M3, torch.device("cpu"))
    quantized = quantizer(wide)
    scale = 448 / wide.abs().max()
    assert float(quantized._scale_inv) == pytest.approx(float(1 / scale), rel=1e-6)
    by_table = codes(E4M3)[quantized._data.long()].float() * quantized._scale_inv
    assert torch.equal(quantized.dequantize(), by_table)
    assert torch.equal(codes(E4M3)[quantized._transpose.long()].float().t() * quantized._scale_inv, by_table)
    assert (by_table - wide).abs().max() <= wide.abs().max() / 448 * 16


def test_delayed_scales_follow_the_largest_value_of_the_last_passes():
    """By Transformer Engine's own bookkeeping, with a history of three passes, the last of which fill it up."""
    torch.manual_seed(0)
    module = te.Linear(16, 16, bias=False)
    recipe = DelayedScaling(fp8_format=Format.E4M3, amax_history_len=3, amax_compute_algo="max")
    scales = []
    for largest in (1.0, 4.0, 2.0, 2.0, 0.5):
        inputs = torch.rand(16, 16) * 0.9 * largest
        inputs[3, 5] = -largest
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            module(inputs.requires_grad_())
        scales.append(float(module.fp8_meta["scaling_fwd"].scale[0]))
    assert scales == [448 / largest for largest in (1.0, 4.0, 4.0, 4.0, 2.0)]


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (160, 272), (48, 16)])
@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("columnwise", [False, True])
def test_blocks_lie_where_transformer_engines_own_python_looks_for_them(shape, dimensions, columnwise):
    """Its dequantization is plain torch: an error of layout here that the emulated products undo does not pass it."""
    torch.manual_seed(0)
    # Blocks of very different sizes: a scale in the wrong place is wrong by orders of magnitude.
    rows, columns = (torch.arange(size) // 128 for size in shape)
    wide = torch.randn(shape) * 10.0 ** (rows[:, None] - 2.0 * columns)
    quantizer = Float8BlockQuantizer(
        E4M3, rowwise=not columnwise, columnwise=columnwise, force_pow_2_scales=True, block_scaling_dim=dimensions
    )
    quantized = quantizer(wide)
    theirs, ours = quantized.dequantize(), values(quantized, columnwise=columnwise)
    assert torch.equal(theirs, ours)
    assert ((theirs - wide).abs() <= wide.abs().clamp(min=0) * 2**-4 + tile_maximum(wide) * 2**-9).all()


def tile_maximum(wide):
    """The largest value of the 128x128 block of each element; a 1x128 block's is not larger."""
    result = torch.empty_like(wide)
    for top in range(0, wide.shape[0], 128):
        for left in range(0, wide.shape[1], 128):
            tile = slice(top, top + 128), slice(left, left + 128)
            result[tile] = wide[tile].abs().max()
    return result


def aligned_sum(products, bits=13):
    """One accumulation of Hopper's tensor cores: products are cut to `bits` below the largest exponent, then added
    (DeepSeek-V3, arXiv 2412.19437, section 3.5.2, measured 14 bits)."""
    exponent = products.abs().amax(-1, keepdim=True).clamp(min=1e-38).log2().floor()
    unit = 2.0 ** (exponent - bits)
    return ((products / unit).trunc() * unit).sum(-1)


def hopper(left, right, step=32, promote=128):
    """left [M, K] times right [N, K] transposed: sums of `step` products, promoted to float32 every `promote`."""
    total = torch.zeros(left.shape[0], right.shape[0])
    for first in range(0, left.shape[1], promote):
        partial = torch.zeros_like(total)
        for start in range(first, min(first + promote, left.shape[1]), step):
            products = left[:, None, start : start + step] * right[None, :, start : start + step]
            partial = aligned_sum(torch.cat([products, partial[..., None]], -1))
        total += partial
    return total


@pytest.mark.parametrize("inner", [128, 512, 2048])
def test_the_exact_product_differs_from_hoppers_sums_by_less_than_the_inputs_rounding(inner):
    torch.manual_seed(0)
    left, right = torch.randn(16, inner), torch.randn(24, inner)
    quantizer = Float8CurrentScalingQuantizer(E4M3, torch.device("cpu"))
    a, b = quantizer(right), quantizer(left)
    workspace = torch.empty(0, dtype=torch.uint8)
    arguments = (a, True, b, False, None, None, DType.kFloat32, None, DType.kFloat32, False, None, False, workspace, 0)
    ours = extension.generic_gemm(*arguments, False, True)[0]
    emulated = hopper(values(b), values(a))
    exact = left @ right.t()
    norm = exact.norm()
    assert (ours - emulated).norm() / norm < 3e-3
    assert (ours - emulated).norm() < 0.1 * (ours - exact).norm()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_transformer_engines_modules_compute_what_plain_torch_does(dtype, limit, has_norm):
    torch.manual_seed(0)
    inputs = torch.randn(32, 64, dtype=dtype, requires_grad=True)
    if has_norm:
        module = te.LayerNormLinear(64, 96, bias=True, normalization="RMSNorm", params_dtype=dtype, eps=1e-6)
    else:
        module = te.Linear(64, 96, bias=True, params_dtype=dtype)
    output = module(inputs)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    plain = [p.detach().float().requires_grad_() for p in (inputs, *module.parameters())]
    names = ["inputs", *(name for name, _ in module.named_parameters())]
    of = dict(zip(names, plain, strict=True))
    hidden = (
        torch.nn.functional.rms_norm(of["inputs"], (64,), of["layer_norm_weight"], 1e-6) if has_norm else of["inputs"]
    )
    expected = torch.nn.functional.linear(hidden, of["weight"], of["bias"])
    expected.backward(gradient.float())
    assert (output.float() - expected).norm() / expected.norm() < limit
    for mine, its in zip((inputs, *module.parameters()), plain, strict=True):
        assert (mine.grad.float() - its.grad).norm() / its.grad.norm() < limit


@pytest.mark.skipif(not attends_with_sinks()[0], reason="Transformer Engine's layers refuse it")
def test_attention_with_sinks_computes_what_plain_torch_does():
    """A sink is one more key of each sequence, with a logit of its own for each head and no value."""
    torch.manual_seed(0)
    lengths, heads, groups, size = [7, 12], 4, 2, 16
    attention = te.DotProductAttention(
        heads, size, groups, 0.0, qkv_format="thd", attn_mask_type="padding_causal", softmax_type="learnable"
    )
    attention.softmax_offset.data.normal_()
    shapes = [(sum(lengths), number, size) for number in (heads, groups, groups)]
    packed = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    most = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths), "window_size": (4, 0)}
    output = attention(*packed, cu_seqlens_q=ends, cu_seqlens_kv=ends, **most)
    gradient = torch.randn_like(output)
    output.backward(gradient)

    plain = [p.detach().float().requires_grad_() for p in (*packed, attention.softmax_offset)]
    queries, keys, values = (part.repeat_interleave(heads // part.shape[1], 1) for part in plain[:3])
    expected = []
    for start, length in zip(ends, lengths, strict=False):
        rows = slice(start, start + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        logits = torch.einsum("qhd,khd->hqk", queries[rows], keys[rows]) / size**0.5
        logits = logits.masked_fill((distance < 0) | (distance > 4), -math.inf)
        weights = torch.cat([logits, plain[3].view(-1, 1, 1).expand(-1, length, 1)], -1).softmax(-1)[..., :-1]
        expected.append(torch.einsum("hqk,khd->qhd", weights, values[rows]).flatten(1))
    expected = torch.cat(expected)
    expected.backward(gradient.float())
    assert (output.float() - expected).norm() / expected.norm() < 1e-2
    for mine, its in zip((*packed, attention.softmax_offset), plain, strict=True):
        assert (mine.grad.float() - its.grad).norm() / its.grad.norm() < 1e-2


def test_what_a_device_would_refuse_is_refused():
    quantizer = Float8CurrentScalingQuantizer(E4M3, torch.device("cpu"), columnwise=False)
    by_rows = quantizer(torch.randn(32, 32))
    odd = quantizer(torch.randn(32, 24))
    workspace = torch.empty(0, dtype=torch.uint8)
    rest = (None, None, DType.kFloat32, None, DType.kFloat32, False, None, False, workspace, 0, False, True)
    with pytest.raises(RuntimeError, match="column-wise usage"):
        extension.generic_gemm(by_rows, False, by_rows, False, *rest)
    with pytest.raises(RuntimeError, match="Leading dimension"):
        extension.generic_gemm(odd, True, odd, False, *rest)
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.layernorm_fwd is not emulated"):
        extension.layernorm_fwd(torch.randn(2, 2))
