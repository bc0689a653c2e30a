"""The Megatron policy computes what transformers computes, and the engine is told when it does not (property 7)."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dapo_mega
from dapo_mega.batching import microbatch
from dapo_mega.batching.samples import flatten, samples_to_score, single_turn
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.config import AlgorithmConfig, ComputeConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.core.layers import attends_with_sinks
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import PolicyGradient, SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.types import GenerationRequest, Prompt, SamplingParams, Trajectory
from tests import te_cpu
from tests.distributed.tiny import (
    DELTA_MODELS,
    FAMILIES,
    FAMILY_MODELS,
    VOCAB_SIZE,
    disturbed_choices,
    has_delta,
    make_model,
    make_samples,
    prompt_length,
    with_routes,
)
from tests.numerics.closeness import assert_alike, on_this_device


@pytest.fixture(scope="module")
def processes():
    yield start_processes(ParallelConfig(), 0)
    stop_processes()


@pytest.fixture(autouse=True)
def computed_by_these_layers(request):
    kind = getattr(request.node, "callspec", None) and request.node.callspec.params.get("kind")
    if not te_cpu.is_installed():
        return
    refused = ("gemma3", "olmo") if any(attends_with_sinks()) else ("gemma3", "olmo", "gpt_oss")
    if str(kind).startswith(refused):
        pytest.skip("Transformer Engine's layers refuse it")


def make_policy(path, processes, temperature=1.0, dtype="fp32", **compute):
    return MegatronPolicy(
        ModelConfig(path=str(path), dtype=dtype),
        ParallelConfig(),
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0, weight_decay=0.0, epsilon=1.0, clip_grad=0.0),
        processes,
        temperature=temperature,
        updates_per_step=1,
        num_steps=4,
        compute=ComputeConfig(**compute),
    )


def pack(samples):
    return microbatch.pack(flatten(samples), max_response_tokens=64)


def transformers_logprobs(model, samples, temperature):
    """Log-probs of all response tokens, sequence by sequence, without packing."""
    parts = []
    for sample in samples:
        tokens = sample.token_ids.long()[None]
        logp = torch.log_softmax(model(tokens).logits[0] / temperature, -1)
        steps = torch.arange(prompt_length(sample) - 1, len(sample.token_ids) - 1)
        parts.append(logp[steps, tokens[0, steps + 1]])
    return torch.cat(parts)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of all families' models by name."""
    folder = tmp_path_factory.mktemp("families")
    return {name: make(folder / str(i)) for i, (name, make) in enumerate(FAMILY_MODELS.items())}


@pytest.mark.parametrize("kind", FAMILY_MODELS)
def test_packed_and_single_logprobs_equal_those_of_transformers(checkpoints, processes, kind):
    samples = make_samples(12)
    policy = make_policy(checkpoints[kind], processes, temperature=0.7)
    packed = policy.score([pack(samples)])[0].logprobs
    single = torch.cat([score.logprobs for score in policy.score([pack([sample]) for sample in samples])])
    model = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=torch.float32)
    with torch.no_grad():
        expected = transformers_logprobs(model, samples, 0.7)
    assert_alike(packed, expected)
    assert_alike(single, expected)


@pytest.mark.skipif(has_delta(), reason="this Megatron-Core has gated delta layers for packed sequences")
def test_a_megatron_without_packed_gated_delta_layers_is_told_from_one_with_them(tmp_path, processes):
    with pytest.raises(InputError, match="gated delta layers do not take packed sequences"):
        make_policy(DELTA_MODELS["qwen3_5"](tmp_path), processes)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2, tied", "gemma3_text"])
def test_the_likeliest_next_tokens_are_those_of_transformers(checkpoints, processes, kind):
    """Every token is scored in the place of each sequence's last one, so that the scores are the whole distribution."""
    policy = make_policy(checkpoints[kind], processes)
    model = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=torch.float32)
    for sample in make_samples(3):
        prompt = sample.token_ids[:-1]
        variants = [single_turn(prompt, [token]) for token in range(VOCAB_SIZE)]
        logprobs = policy.score([pack(variants)])[0].logprobs
        with torch.no_grad():
            expected = model(prompt.long()[None]).logits[0, -1].log_softmax(-1)
        assert_alike(logprobs, expected)
        assert int(logprobs.argmax()) == int(expected.argmax())


@pytest.mark.parametrize("kind", FAMILY_MODELS)
def test_one_supervised_step_equals_that_of_transformers(tmp_path, checkpoints, processes, kind):
    samples = make_samples(12, all_in_loss=True)
    policy = make_policy(checkpoints[kind], processes)
    metrics = policy.update([TokenBatch(pack(samples))], SupervisedLoss())
    model = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1.0, weight_decay=0.0)
    loss = -transformers_logprobs(model, samples, 1.0).mean()
    loss.backward()
    optimizer.step()
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=on_this_device(1e-5))
    # Saved, because transformers keeps experts together in memory and apart on disk.
    model.save_pretrained(tmp_path / "expected")
    updated = dict(pair for bucket in policy.weights(1 << 20) for pair in bucket)
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert updated.keys() == expected.keys()
    for name, parameter in expected.items():
        assert_alike(updated[name], parameter, rtol=1e-5, atol=1e-6, name=name)
    with torch.no_grad():
        after = transformers_logprobs(model, samples, 1.0)
    assert_alike(policy.score([pack(samples)])[0].logprobs, after, rtol=1e-4, atol=1e-4)


def test_rotary_frequencies_stay_in_float32_in_a_bf16_policy(checkpoints, processes):
    policy = make_policy(checkpoints["llama"], processes, dtype="bf16")
    (chunk,) = policy.chunks
    embedding = unwrapped(chunk).rotary_pos_emb
    assert torch.equal(embedding.inv_freq.cpu(), policy.arch.inverse_frequencies)
    assert embedding(64).dtype is torch.float32


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_an_update_that_scores_itself_equals_one_after_scoring(tmp_path, processes, kl):
    """The first update of a step starts from the weights that are its old ones."""
    path = make_model(tmp_path / "model", tied=True)
    objective = PolicyGradient(AlgorithmConfig(kl={"coefficient": kl}))
    batches = [pack(make_samples(7, seed)) for seed in (0, 1)]
    sizes = [int(b.targets.response_mask.sum()) for b in batches]
    references = [torch.full((size,), -3.0, device=processes.device) for size in sizes]
    once, twice = make_policy(path, processes), make_policy(path, processes)
    scores = twice.score(batches)
    expected = twice.update(
        [TokenBatch(b, s.logprobs, r) for b, s, r in zip(batches, scores, references, strict=True)], objective
    )
    own = []
    metrics = once.update(
        [TokenBatch(b, None, r) for b, r in zip(batches, references, strict=True)], objective, scores=own
    )
    assert metrics == pytest.approx(expected, rel=on_this_device(1e-6), abs=1e-9)
    assert metrics["policy/ratio_mean"] == 1.0
    assert metrics["policy/grad_norm"] > 0
    for mine, reference in zip(own, scores, strict=True):
        assert not mine.logprobs.requires_grad, "the graph of its micro-batch lives as long as it does"
        torch.testing.assert_close(mine.logprobs, reference.logprobs)
        torch.testing.assert_close(mine.entropy, reference.entropy)
    updated = (dict(pair for bucket in policy.weights(1 << 20) for pair in bucket) for policy in (once, twice))
    for mine, reference in zip(*(weights.values() for weights in updated), strict=True):
        torch.testing.assert_close(mine, reference)


def test_few_functions_are_between_a_parameter_and_an_engine(checkpoints, processes):
    """Of an update after the first, as engines/README.md counts them."""
    policy, engine = make_policy(checkpoints["llama"], processes), EmbeddedEngine(checkpoints["llama"], torch.float32)
    called, package = set(), str(Path(dapo_mega.__file__).parent)

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and not code.co_name.startswith("<"):
            called.add((code.co_filename, code.co_qualname))

    for version in range(2):
        sys.setprofile(note if version else None)
        try:
            engine.load_weights(policy.weights(1 << 12), version)
        finally:
            sys.setprofile(None)
    assert 10 < len(called) <= 28, sorted(called)
    assert len({file for file, _ in called}) <= 9


@pytest.mark.parametrize("kind", [*FAMILIES, "qwen2, tied"])
def test_the_engine_agrees_with_the_policy_whose_weights_it_was_given(checkpoints, processes, kind):
    policy = make_policy(checkpoints[kind], processes)
    engine = EmbeddedEngine(checkpoints[kind], torch.float32)
    engine.load_weights(policy.weights(1 << 12), 0)
    prompt = make_samples(1)[0].token_ids[:5].numpy()
    requests = [GenerationRequest(i, prompt, i, SamplingParams(max_new_tokens=24)) for i in range(6)]
    answers = engine.generate(requests)
    samples = [single_turn(prompt, a.token_ids, a.logprobs) for a in answers]
    scores = policy.score([pack(samples)])[0].logprobs
    sampled = torch.from_numpy(np.concatenate([answer.logprobs for answer in answers]))
    assert_alike(scores, sampled)


@pytest.mark.parametrize(
    ("kind", "group_size", "max_batch_rows"),
    [(kind, 4, 32) for kind in ("qwen3_moe", "qwen2_moe", "deepseek_v3", "glm4_moe", "gpt_oss")]
    + [("qwen3_moe", 1, 16)],  # Requests that wait take the places of finished ones.
)
def test_replayed_routes_give_the_log_probs_of_an_engine_that_routes_otherwise(
    checkpoints, processes, kind, group_size, max_batch_rows
):
    """Its choice of experts is disturbed, and their weights are not."""
    policy = make_policy(checkpoints[kind], processes)
    engine = EmbeddedEngine(checkpoints[kind], torch.float32, max_batch_rows)
    engine.load_weights(policy.weights(1 << 12), 0)
    given = make_samples(32 // group_size)
    prompts = [Prompt(i, "", sample.token_ids[: 3 + i % 5].numpy(), "") for i, sample in enumerate(given)]
    params = SamplingParams(max_new_tokens=24, stop_token_ids=(7, 8, 9))
    asked = enumerate(prompt.token_ids for _ in range(group_size) for prompt in prompts)
    requests = [GenerationRequest(number, ids, number, params, routes_from=0) for number, ids in asked]
    with disturbed_choices():
        answers = engine.generate(requests)
    members = [(prompts[answer.request_id % len(prompts)], Trajectory.of(answer)) for answer in answers]
    replayed = microbatch.pack(samples_to_score(members, 0), max_response_tokens=64)
    assert replayed.targets.routes.shape[1:] == (policy.arch.num_layers, policy.arch.experts.per_token)
    own = replace(replayed, targets=replace(replayed.targets, routes=replayed.targets.routes[:, :0, :0]))
    with_routes, without = (score.logprobs for score in policy.score([replayed, own]))
    sampled = torch.from_numpy(np.concatenate([answer.logprobs for answer in answers]))
    assert len({len(answer.token_ids) for answer in answers}) > 1
    assert (with_routes - sampled).abs().max() < 1e-5
    assert (without - sampled).abs().mean() > 0.01


def test_an_update_behind_one_that_failed_replays_its_own_routes(checkpoints, processes):
    """Recompute keeps the routes of a forward pass for a backward pass, which does not come."""

    class Failing(SupervisedLoss):
        def evaluate(self, scores, batch):
            raise ValueError("failed behind the forward pass")

    policy, other = (make_policy(checkpoints["qwen3_moe"], processes, recompute="full") for _ in range(2))
    experts = policy.arch.experts
    batches = [
        TokenBatch(pack(with_routes(make_samples(3), policy.arch.num_layers, experts.number, experts.per_token, seed)))
        for seed in range(2)
    ]
    with pytest.raises(ValueError, match="failed behind the forward pass"):
        policy.update(batches[:1], Failing())
    assert policy.update(batches[1:], SupervisedLoss()) == other.update(batches[1:], SupervisedLoss())


def test_an_exported_checkpoint_loads_in_transformers_and_is_bit_equal(tmp_path, processes):
    path = make_model(tmp_path / "model", tied=False)
    policy = make_policy(path, processes)
    save_hf_checkpoint(policy, tmp_path / "export")
    before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("bucket_bytes", [1, 4096, 1 << 30])
def test_buckets_are_bounded_and_hold_every_tensor_once(tmp_path, processes, bucket_bytes):
    path = make_model(tmp_path / "model", tied=True)
    policy = make_policy(path, processes)
    largest = max(p.nbytes for chunk in policy.chunks for p in chunk.parameters())
    names = []
    for bucket in policy.weights(bucket_bytes):
        assert sum(tensor.nbytes for _, tensor in bucket) <= max(bucket_bytes, largest)
        names += [spec.name for spec in bucket.specs]
    assert len(names) == len(set(names))
    assert set(names) == set(AutoModelForCausalLM.from_pretrained(path).state_dict()) - {"lm_head.weight"}


def test_a_checkpoint_of_other_shapes_is_refused_by_name(tmp_path, processes):
    import json

    from dapo_mega.errors import InputError

    path = make_model(tmp_path / "model", tied=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(InputError, match=r"gate_proj.*different models"):
        make_policy(path, processes)
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(InputError, match=r"lacks the tensors model\.layers\.4"):
        make_policy(path, processes)
    (path / "config.json").write_text(json.dumps(config))
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        make_policy(path, processes)
