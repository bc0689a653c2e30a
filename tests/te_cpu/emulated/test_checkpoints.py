"""What leaves a policy with FP8 parameters as a checkpoint, an export, or a conversion of the one to the other."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.config import ParallelConfig
from dapo_mega.conversion.convert import open_checkpoint, to_hf
from dapo_mega.data.tokenizer import build_character_tokenizer
from dapo_mega.megatron.model import unwrapped
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from tests.distributed.tiny import make_samples, save_random
from tests.gpu.device_policy import DEVICE_SIZES, device_policy


@pytest.fixture
def policy(tmp_path):
    """After one update."""
    folder = save_random(Qwen2Config(**DEVICE_SIZES), tmp_path / "model", scale=0.03)
    build_character_tokenizer(map(chr, range(32, 127))).save_pretrained(folder)
    fp8 = {"scaling": "blockwise", "params": True}
    policy = device_policy(folder, start_processes(ParallelConfig(), 0), learning_rate=1e-2, fp8=fp8)
    batch = pack(flatten(make_samples(8, all_in_loss=True)), policy.packing_layout, max_response_tokens=64)
    policy.update([TokenBatch(batch)], SupervisedLoss())
    yield policy
    stop_processes()


@pytest.mark.parametrize("scaling", ["delayed", "tensorwise", "blockwise"])
def test_what_leaves_an_fp8_policy_is_its_exact_weights_rounded_once(tmp_path, scaling):
    """The optimizer's float32 weights are those of the checkpoint, bit for bit; they are rounded for the products."""
    folder = save_random(Qwen2Config(**DEVICE_SIZES), tmp_path / "model", scale=0.03)
    processes = start_processes(ParallelConfig(), 0)
    bf16 = device_policy(folder, processes)
    stored = exact_weights(bf16)
    fp8 = {"scaling": scaling, "params": True, "amax_history": 16}
    policy = device_policy(folder, processes, learning_rate=1e-2, fp8=fp8)
    loaded = exact_weights(policy)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    batch = pack(flatten(make_samples(8, all_in_loss=True)), policy.packing_layout, max_response_tokens=64)
    for _ in range(2):
        policy.update([TokenBatch(batch)], SupervisedLoss())
        # The same weights under the names of the checkpoint.
        for name, exact in exact_weights(policy).items():
            parameter = unwrapped(bf16.chunks[0]).get_parameter(name)
            parameter.data.copy_(exact.view_as(parameter))
        given, exact = (weights_of(each) for each in (policy, bf16))
        for name, tensor in exact.items():
            # Half a step of 3 bits of mantissa; of the smallest numbers, with the scale of the whole tensor.
            limit = tensor.abs() * 2**-4 + tensor.abs().max() * (2**-10 / 448 * 4) + 2**-20
            assert ((given[name] - tensor).abs() <= limit * 1.1).all(), name
    stop_processes()


def exact_weights(policy):
    """The optimizer's float32 copies by Megatron's names."""
    named = unwrapped(policy.chunks[0]).named_parameters()
    return {name: parameter.main_param.detach().clone() for name, parameter in named}


def weights_of(policy):
    return {name: tensor.float() for bucket in policy.weights(1 << 30) for name, tensor in bucket}


def test_exports_and_converted_checkpoints_have_the_fp8_policys_weights(tmp_path, policy):
    weights = {name: tensor.clone() for bucket in policy.weights(1 << 30) for name, tensor in bucket}
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    store.save(policy, lambda: LoopState(1, {}, {}), 1)
    save_hf_checkpoint(policy, tmp_path / "exported")
    to_hf(open_checkpoint(store.latest(), policy.path), tmp_path / "converted", 1 << 30)
    for folder in ("exported", "converted"):
        given = {}
        for file in (tmp_path / folder).glob("*.safetensors"):
            given |= load_file(file)
        assert given.keys() == weights.keys()
        differing = [name for name, tensor in weights.items() if not torch.equal(given[name].to(tensor.dtype), tensor)]
        assert not differing, (folder, differing)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
