"""What DeepSeek has beside other families: trained routing biases in float32, and latent vectors in the cache."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten
from dapo_mega.config import ComputeConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.errors import InputError
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.models import load_architecture
from dapo_mega.training.build import check_routing
from dapo_mega.types import GenerationRequest, SamplingParams
from tests.distributed.tiny import (
    make_deepseek_v2_model,
    make_deepseek_v3_model,
    make_moe_model,
    make_samples,
    prompt_length,
)

RATE = 0.01
TRAINED = ComputeConfig(moe={"router_bias_update_rate": RATE})


@pytest.fixture(scope="module")
def processes():
    yield start_processes(ParallelConfig(), 0)
    stop_processes()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_deepseek_v3_model(tmp_path_factory.mktemp("model"))


def make_policy(path, processes, compute, dtype="fp32"):
    return MegatronPolicy(
        ModelConfig(path=str(path), dtype=dtype),
        ParallelConfig(),
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        processes,
        temperature=1.0,
        updates_per_step=1,
        num_steps=4,
        compute=compute,
    )


def update(policy, samples):
    batch = pack(flatten(samples), max_response_tokens=64)
    policy.update([TokenBatch(batch)], SupervisedLoss())


def biases(named):
    return {name: tensor.cpu().clone() for name, tensor in named if name.endswith("e_score_correction_bias")}


def exported(policy):
    return biases(pair for bucket in policy.weights(1 << 12) for pair in bucket)


def tokens_per_expert(checkpoint, samples):
    """How many tokens each router sends to each expert: its name to [experts]."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    routers = {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}
    counts = {name: torch.zeros(router.num_experts) for name, router in routers.items()}

    def count(router, inputs, output, *, name):
        counts[name] += output[2].flatten().bincount(minlength=router.num_experts)

    for name, router in routers.items():
        router.register_forward_hook(partial(count, name=name))
    with torch.no_grad():
        for sample in samples:
            model(sample.token_ids.long()[None])
    return counts


def test_an_update_moves_each_bias_towards_balance(checkpoint, processes):
    samples = make_samples(12)
    policy = make_policy(checkpoint, processes, TRAINED)
    before = exported(policy)
    update(policy, samples)
    after = exported(policy)
    for name, counts in tokens_per_expert(checkpoint, samples).items():
        assert counts.min() != counts.max()
        expected = before[f"{name}.e_score_correction_bias"] + RATE * torch.sign(counts.mean() - counts)
        torch.testing.assert_close(after[f"{name}.e_score_correction_bias"], expected, rtol=0, atol=0)


def test_biases_stay_as_they_are_where_they_are_not_trained(checkpoint, processes):
    policy = make_policy(checkpoint, processes, ComputeConfig())
    update(policy, make_samples(4))
    on_disk = biases(load_file(checkpoint / "model.safetensors").items())
    after = exported(policy)
    assert after.keys() == on_disk.keys()
    assert all(torch.equal(after[name], on_disk[name]) for name in on_disk)


def test_policy_and_engine_keep_biases_in_float32_beside_bf16_weights(checkpoint, processes):
    policy = make_policy(checkpoint, processes, TRAINED, dtype="bf16")
    update(policy, make_samples(4))
    engine = EmbeddedEngine(checkpoint, torch.bfloat16)
    engine.load_weights(policy.weights(1 << 12), 0)
    given, in_engine = exported(policy), biases(engine._model.named_buffers())
    assert given.keys() == in_engine.keys()
    for name, bias in given.items():
        assert bias.dtype == in_engine[name].dtype == torch.float32
        assert torch.equal(bias, in_engine[name])
        assert not torch.equal(bias, bias.bfloat16().float())


def test_a_bias_is_trained_only_where_the_family_stores_it(tmp_path, checkpoint):
    config = SimpleNamespace(compute=TRAINED, rollout=SimpleNamespace(routing_replay=False))
    check_routing(config, load_architecture(checkpoint)[1])
    for name, make in (("deepseek_v2", make_deepseek_v2_model), ("qwen3_moe", make_moe_model)):
        with pytest.raises(InputError, match=f"a routing bias that {name} does not store"):
            check_routing(config, load_architecture(make(tmp_path / name))[1])


def test_a_bf16_engine_decodes_from_its_cache_as_in_a_full_forward(checkpoint):
    engine = EmbeddedEngine(checkpoint, torch.bfloat16)
    engine.load_weights([list(load_file(checkpoint / "model.safetensors").items())], 0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    prompts = [sample.token_ids[: prompt_length(sample)].numpy() for sample in make_samples(4)]
    requests = [GenerationRequest(i, prompt, i, SamplingParams(max_new_tokens=20)) for i, prompt in enumerate(prompts)]
    for prompt, answer in zip(prompts, engine.generate(requests), strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, answer.token_ids]).astype(np.int64))
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].float().log_softmax(-1)
        expected = logprobs[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(answer.logprobs), expected, rtol=2e-2, atol=2e-2)
