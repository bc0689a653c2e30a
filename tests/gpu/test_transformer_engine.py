"""What only a CUDA device can show: Transformer Engine layers against the local ones, and the engine beside them."""

from dataclasses import replace

import pytest
import torch

from dapo_mega.config import AlgorithmConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.packing import build_micro_batch, columns_from_samples
from tests.distributed.tiny import make_samples

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Head size 64 and sizes that are multiples of 16, as Transformer Engine's kernels want them."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def processes():
    from dapo_mega.policy.processes import start_processes, stop_processes

    yield start_processes(ParallelConfig(), 0)
    stop_processes()


def policy(model_path, processes, implementation):
    from dapo_mega.policy.megatron_policy import MegatronPolicy

    return MegatronPolicy(
        ModelConfig(path=str(model_path), dtype="bf16", layer_implementation=implementation),
        ParallelConfig(),
        OptimizerConfig(learning_rate=1e-4, warmup_steps=0),
        processes,
        temperature=1.0,
        updates_per_step=1,
        num_steps=2,
    )


def test_transformer_engine_layers_agree_with_the_local_ones(model_path, processes):
    pytest.importorskip("transformer_engine")
    from dapo_mega.policy.objectives import PolicyGradient, TokenBatch

    samples = [replace(sample, in_loss=True) for sample in make_samples(16)]
    batch = build_micro_batch(
        columns_from_samples(samples), range(16), aggregation="token_mean", max_response_tokens=64, multiple_of=16
    )
    scores, losses = {}, {}
    for implementation in ("local", "transformer_engine"):
        subject = policy(model_path, processes, implementation)
        scores[implementation] = subject.score([batch])[0]
        old = scores[implementation].logprobs
        losses[implementation] = subject.update([TokenBatch(batch, old)], PolicyGradient(AlgorithmConfig()))
    difference = (scores["local"].logprobs - scores["transformer_engine"].logprobs).abs()
    assert difference.mean() < 0.02
    assert losses["transformer_engine"]["policy/grad_norm"] == pytest.approx(
        losses["local"]["policy/grad_norm"], rel=0.05
    )


def test_the_embedded_engine_on_the_gpu_agrees_with_the_policy(model_path, processes):
    from dapo_mega.rollout.embedded import EmbeddedEngine
    from dapo_mega.types import GenerationRequest, Sample, SamplingParams

    subject = policy(model_path, processes, "auto")
    engine = EmbeddedEngine.from_config(model_path, torch.bfloat16, device=processes.device)
    engine.load_weights(subject.gatherer.buckets(1 << 20), 0)
    prompt = make_samples(1)[0].token_ids[:5]
    sampling = SamplingParams(max_new_tokens=32)
    answers = engine.generate([GenerationRequest(i, prompt, i, sampling) for i in range(8)])
    samples = [
        Sample(torch.cat([torch.from_numpy(prompt), torch.from_numpy(a.token_ids)]).numpy(), 5, 1.0, True, a.logprobs)
        for a in answers
    ]
    batch = build_micro_batch(
        columns_from_samples(samples), range(8), aggregation="token_mean", max_response_tokens=32, multiple_of=16
    )
    scored = subject.score([batch])[0].logprobs.cpu()
    sampled = batch.rollout_logprobs[batch.response_mask]
    assert (scored - sampled).abs().mean() < 0.05
