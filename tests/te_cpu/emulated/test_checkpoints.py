"""What leaves a policy with FP8 parameters as a checkpoint, an export, or a conversion of the one to the other."""

import pytest
import torch
from safetensors.torch import load_file
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.config import LoraConfig, ParallelConfig
from dapo_mega.config.compute import Fp8Config
from dapo_mega.conversion.convert import open_checkpoint, to_hf
from dapo_mega.data.tokenizer import build_character_tokenizer
from dapo_mega.megatron.core.decoder import unwrapped
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
    store.save(policy, LoopState(1, {}, {}), 1)
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


def test_a_checkpoint_of_a_machine_without_gpu_continues_on_one(tmp_path, policy):
    """Torch's Adam, which is used there, saves its count of steps as a float."""
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    for group in policy.optimizer.param_groups:
        group["step"] = float(group["step"])
    store.save(policy, LoopState(1, {}, {}), 1)
    store.load(policy, store.latest())
    trained(policy)
    assert [group["step"] for group in policy.optimizer.param_groups] == [2, 2]


LORA = {"lora": LoraConfig(rank=4)}
# Settings that a checkpoint is written with -> those that are changed at a resume.
RESUMES = [
    ({"scaling": "delayed"}, {"format": "e4m3"}),
    ({"scaling": "delayed"}, {"amax_history": 4}),
    ({"scaling": "delayed"}, {"params": True}),
    ({"scaling": "delayed"}, {"scaling": "none"}),
    ({"scaling": "tensorwise"}, {"scaling": "delayed"}),
    ({"scaling": "tensorwise"}, {"format": "e4m3"}),
    ({"scaling": "tensorwise"}, {"bf16_layers_at_ends": 1}),
    ({"scaling": "blockwise", "params": True}, {"format": "e4m3"}),
    ({"scaling": "delayed", **LORA}, {"format": "e4m3"}),
    ({"scaling": "delayed", **LORA}, {"scaling": "blockwise"}),
    ({"scaling": "tensorwise", **LORA}, {"scaling": "delayed"}),
    ({"scaling": "none", "implementation": "local"}, {"scaling": "blockwise", "implementation": "auto"}),
]


def test_changed_fp8_and_layers_take_effect_at_a_resume(tmp_path):
    """compute.fp8 and model.layer_implementation. Transformer Engine's states would bring the old formats back."""
    changed = {key for _, change in RESUMES for key in change}
    assert changed == {*Fp8Config.model_fields, "implementation"}, "change a new key here"
    sizes = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    folder = save_random(Qwen2Config(**{**DEVICE_SIZES, **sizes}), tmp_path / "model", scale=0.03)
    processes = start_processes(ParallelConfig(), 0)
    saved = {}

    def made(settings):
        fp8 = {"amax_history": 16, **settings}
        implementation, lora = fp8.pop("implementation", "auto"), fp8.pop("lora", None)
        policy = device_policy(folder, processes, implementation, learning_rate=1e-2, lora=lora, fp8=fp8)
        return policy, Fp8Config(**fp8)

    for number, (before, change) in enumerate(RESUMES):
        if str(before) not in saved:
            policy, _ = made(before)
            trained(policy)
            store = saved[str(before)] = CheckpointStore(tmp_path / str(number), keep_last=1)
            store.save(policy, LoopState(1, {}, {}), 1)
        store = saved[str(before)]
        policy, fp8 = made({**before, **change})
        store.load(policy, store.latest())
        trained(policy)
        middle = expected(fp8)
        ends = None if fp8.bf16_layers_at_ends else middle
        assert formats(policy) == [ends, middle, ends], (before, change)
    stop_processes()


def trained(policy):
    """Scored, as a step that has several updates begins, and updated."""
    batch = pack(flatten(make_samples(2, all_in_loss=True)), policy.packing_layout, max_response_tokens=64)
    policy.score([batch])
    policy.update([TokenBatch(batch)], SupervisedLoss())


def expected(fp8):
    """As `formats` of a layer that computes so."""
    recipe = {"delayed": "TEDelayedScaling", "tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
    of_gradients = "kFloat8E5M2" if fp8.format == "hybrid" else "kFloat8E4M3"
    history = fp8.amax_history if fp8.scaling == "delayed" else None
    return (recipe[fp8.scaling], "kFloat8E4M3", of_gradients, history, fp8.params) if fp8.enabled else None


def formats(policy):
    """(recipe, formats of weights and of gradients, length of the history, whether weights are stored in FP8) of what
    each layer computed with last; None of a layer that did in bf16."""
    found = []
    for layer in unwrapped(policy.chunks[0]).decoder.layers:
        module = layer.mlp.linear_fc1
        meta, quantizers = module.fp8_meta, module.quantizers
        if not module.fp8:
            found.append(None)
            continue
        kinds = [quantizers[way][0].dtype.name for way in ("scaling_fwd", "scaling_bwd")]
        history = len(meta["scaling_fwd"].amax_history) if meta["recipe"].delayed() else None
        found.append((type(meta["recipe"]).__name__, *kinds, history, isinstance(module.weight, QuantizedTensor)))
    return found
