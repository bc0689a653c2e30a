"""The weights that FP8 engines get are what SGLang's own quantiser makes of the policy's, tensor by tensor."""

import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from dapo_mega.types import WeightBucket, WeightSpec
from dapo_mega.weight_sync.fp8 import quantised_bucket
from tests.distributed.tiny import save_random

from .sglang_servers import sglang_python

pytestmark = pytest.mark.integration

_QUANTISE = """
import sys
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.mxfp8_block_convert import bf16_to_block_fp8_128
made = {}
for name, weight in load_file(sys.argv[1]).items():
    if weight.dim() == 2:
        made[name], made[name + "_scale_inv"] = bf16_to_block_fp8_128(weight)
save_file(made, sys.argv[2])
"""


def test_sent_blocks_and_scales_are_those_of_sglangs_quantiser(tmp_path):
    """Not where a whole block is below 1e-4: SGLang's scales stop there, ours go on."""
    sizes = {"vocab_size": 64, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 136}
    config = Qwen3MoeConfig(**sizes, **experts, num_attention_heads=4, num_key_value_heads=2, head_dim=56)
    model = save_random(config, tmp_path / "model", scale=0.03)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, tmp_path / "weights.safetensors")
    given, made = tmp_path / "weights.safetensors", tmp_path / "quantised.safetensors"
    done = subprocess.run([sglang_python(), "-c", _QUANTISE, given, made], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = load_file(made)

    specs = tuple(WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items())
    sent = dict(quantised_bucket(WeightBucket(0, specs, list(weights.values()), is_last=True)))
    quantised = {name.removesuffix("_scale_inv") for name in sent if name.endswith("_scale_inv")}
    assert len(quantised) == 2 * (4 + 3 * 4)
    for name in quantised:
        assert torch.equal(sent[name].view(torch.uint8), theirs[name].view(torch.uint8)), name
        assert torch.equal(sent[f"{name}_scale_inv"], theirs[f"{name}_scale_inv"]), name
    unchanged = sent.keys() - quantised - {f"{name}_scale_inv" for name in quantised}
    assert all(torch.equal(sent[name], weights[name]) for name in unchanged)
