"""Adapters compute what peft computes, their gradients are those of float64, and engines get them merged."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo_mega.batching.samples import single_turn
from dapo_mega.checkpoints.hf_export import save_adapter, save_hf_checkpoint
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.config import ComputeConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.errors import InputError
from dapo_mega.megatron.megatron_policy import MegatronPolicy, ScoringModel, WithoutAdapters
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.megatron.value_model import ValueModel
from dapo_mega.models.hf_checkpoint import HfCheckpoint
from dapo_mega.models.peft_adapters import peft_name
from dapo_mega.planning.adapters import num_trained_parameters
from dapo_mega.planning.parameters import num_parameters, stage_bytes
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.types import GenerationRequest, SamplingParams
from tests.distributed.allocations import gradient_buffers, optimizer_bytes, storage_bytes
from tests.distributed.test_lora import make_adapter
from tests.distributed.three_updates import relative_error
from tests.distributed.tiny import (
    has_delta,
    make_deepseek_v2_model,
    make_deepseek_v3_model,
    make_gemma3_model,
    make_gpt_oss_model,
    make_model,
    make_moe_model,
    make_olmo2_model,
    make_olmo3_model,
    make_phi3_model,
    make_qwen3_5_model,
    make_qwen3_model,
    make_qwen3_next_model,
    make_samples,
)

from .closeness import assert_alike
from .test_policy_against_transformers import pack, transformers_logprobs

EVERY = {"rank": 4, "alpha": 8.0}
SCALE = 2.0
LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
DELTA = ("in_proj_qkvz", "out_proj", "o_proj")
needs_delta = pytest.mark.skipif(not has_delta(), reason="this Megatron-Core has no gated delta layers for packs")
SOME = {**EVERY, "targets": ("q_proj", "v_proj", "down_proj")}


@pytest.fixture(scope="module")
def processes():
    yield start_processes(ParallelConfig(), 0)
    stop_processes()


def make_policy(model, processes, path=None, **lora):
    return without_adapters(model, processes, lora=LoraConfig(**lora, path=str(path) if path else None))


def without_adapters(model, processes, **settings):
    return MegatronPolicy(
        ModelConfig(path=str(model), dtype="fp32"),
        ParallelConfig(),
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0, weight_decay=0.0, epsilon=1.0, clip_grad=0.0),
        processes,
        temperature=1.0,
        updates_per_step=1,
        num_steps=4,
        **settings,
    )


def gathered(policy):
    buckets = policy.selected("adapters").weights(1 << 20)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket if name in policy.lora.names}


def transformers_names(weights):
    """The weights as transformers keeps them in memory, experts in one."""
    kept, experts = {}, {}
    for name, weight in weights.items():
        layer, found, rest = name.partition(".mlp.experts.")
        if found and "." in rest:  # gpt-oss's from an engine are in one already.
            number, part = rest.removesuffix(".weight").split(".")
            experts.setdefault(layer, {}).setdefault(int(number), {})[part] = weight
        else:
            kept[name] = weight
    for layer, of_layer in experts.items():
        parts = [of_layer[number] for number in sorted(of_layer)]
        for part in parts:
            if "gate_proj" in part:
                part["gate_up_proj"] = torch.cat([part.pop("gate_proj"), part.pop("up_proj")])
        kept |= {f"{layer}.mlp.experts.{name}": torch.stack([part[name] for part in parts]) for name in parts[0]}
    return kept


@pytest.mark.parametrize(
    ("make", "lora"),
    [
        *((make_qwen3_model, lora) for lora in (SOME, EVERY)),
        *((make, EVERY) for make in (make_moe_model, make_deepseek_v3_model, make_gpt_oss_model)),
    ],
)
def test_gradients_of_a_and_b_are_those_of_float64(tmp_path, processes, make, lora):
    model = make(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", model, LoraConfig(**lora))
    policy = make_policy(model, processes, adapter, **lora)
    factors = {name: tensor.double().requires_grad_() for name, tensor in gathered(policy).items()}
    source = HfCheckpoint(model)
    weights = {name: source.tensor(name).double() for name in source.names()}
    for name in list(weights):
        a = peft_name(name, "A")
        if a in factors:
            change = SCALE * factors[peft_name(name, "B")] @ factors[a]
            weights[name] = weights[name] + (change if name.endswith(".weight") else change.t())
    samples = make_samples(6, all_in_loss=True)
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, experts_implementation="eager")

    def logits(tokens):
        return torch.func.functional_call(oracle, transformers_names(weights), (tokens,))

    loss = -transformers_logprobs(logits, samples, 1.0).mean()
    expected = dict(zip(factors, torch.autograd.grad(loss, list(factors.values())), strict=True))
    metrics = policy.update([TokenBatch(pack(samples))], SupervisedLoss())
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    for parameter in policy.lora.parameters.values():
        parameter.data = parameter.main_grad.clone()  # What is gathered now are the gradients.
    got = gathered(policy)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        if not gradient.any():  # Of an expert that no token went to.
            assert not got[name].any(), name
            continue
        assert relative_error({name: got[name]}, {name: gradient}) < 2e-5, name


def test_the_first_model_is_that_without_adapters_and_stays_the_reference(tmp_path, processes):
    model = make_model(tmp_path / "model", tied=True)
    batch = pack(make_samples(6))
    frozen = ScoringModel(ModelConfig(path=str(model), dtype="fp32"), ParallelConfig(), processes, 1.0)
    (expected,) = frozen.score([batch])
    policy = make_policy(model, processes, **EVERY)
    assert torch.equal(policy.score([batch])[0].logprobs, expected.logprobs)
    for _ in range(2):
        policy.update([TokenBatch(batch)], SupervisedLoss())
    (reference,) = WithoutAdapters(policy).score([batch])
    assert torch.equal(reference.logprobs, expected.logprobs)
    assert float((policy.score([batch])[0].logprobs - expected.logprobs).abs().max()) > 1e-3


@pytest.mark.parametrize("make", [make_qwen3_model, make_phi3_model, make_moe_model, make_gpt_oss_model])
def test_an_engine_that_gets_merged_weights_agrees_with_the_policy(tmp_path, processes, make):
    model = make(tmp_path / "model")
    policy = make_policy(model, processes, make_adapter(tmp_path / "adapter", model, LoraConfig(**EVERY)), **EVERY)
    engine = EmbeddedEngine(model, torch.float32)
    engine.load_weights(policy.weights(1 << 12), 0)
    prompt = make_samples(1)[0].token_ids[:5].numpy()
    requests = [GenerationRequest(i, prompt, i, SamplingParams(max_new_tokens=24)) for i in range(6)]
    answers = engine.generate(requests)
    samples = [single_turn(prompt, answer.token_ids, answer.logprobs) for answer in answers]
    scores = policy.score([pack(samples)])[0].logprobs
    assert_alike(scores, torch.from_numpy(np.concatenate([answer.logprobs for answer in answers])))


@pytest.mark.parametrize(
    ("make", "lora"),
    [
        (partial(make_qwen3_model, attention_bias=True), EVERY),
        (make_qwen3_model, SOME),
        (make_phi3_model, EVERY),
        (make_gpt_oss_model, {**EVERY, "dropout": 0.2}),
        (make_gpt_oss_model, {**EVERY, "targets": ("experts.gate_up_proj",)}),
        (make_olmo2_model, EVERY),
        (make_olmo3_model, EVERY),
        (make_gemma3_model, EVERY),
        (make_deepseek_v2_model, {**EVERY, "targets": ("q_proj", *LATENT)}),
        (make_deepseek_v3_model, {**EVERY, "targets": ("q_a_proj", "q_b_proj", *LATENT)}),
        pytest.param(make_qwen3_next_model, {**EVERY, "targets": DELTA}, marks=needs_delta),
        pytest.param(make_qwen3_next_model, {**EVERY, "targets": ("in_proj_ba", *DELTA)}, marks=needs_delta),
        pytest.param(make_qwen3_5_model, EVERY, marks=needs_delta),
    ],
)
def test_an_adapter_goes_to_peft_and_back(tmp_path, processes, make, lora):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = make(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", model, LoraConfig(**lora))
    policy = make_policy(model, processes, adapter, **lora)
    samples = make_samples(6, all_in_loss=True)
    batch = pack(samples)
    policy.update([TokenBatch(batch)], SupervisedLoss())
    save_adapter(policy, tmp_path / "ours")
    save_hf_checkpoint(policy, tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours", is_trainable=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        expected = policy.score([batch])[0].logprobs
        assert_alike(transformers_logprobs(theirs, samples, 1.0), expected)
        assert_alike(transformers_logprobs(merged, samples, 1.0), expected)
    loss = -transformers_logprobs(theirs, samples, 1.0).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.5 * parameter.grad)
    theirs.save_pretrained(tmp_path / "theirs")
    ours_again = make_policy(model, processes, tmp_path / "theirs", **lora)
    with torch.no_grad():
        expected = transformers_logprobs(theirs, samples, 1.0)
        assert float((expected - policy.score([batch])[0].logprobs).abs().max()) > 1e-3
        assert_alike(ours_again.score([batch])[0].logprobs, expected)
        whole = theirs.merge_and_unload().state_dict()
    ours = dict(pair for bucket in ours_again.weights(1 << 20) for pair in bucket)
    for name, tensor in transformers_names(ours).items():
        assert_alike(tensor, whole[name], name=name)


def test_changed_adapters_take_effect_at_a_resume(tmp_path, processes):
    """Another rank or other targets do not fit what was saved; alpha and dropout act on it."""
    model = make_qwen3_model(tmp_path / "model")
    policy = make_policy(model, processes, make_adapter(tmp_path / "adapter", model, LoraConfig(**SOME)), **SOME)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    store.save(policy, LoopState(1, {}, {}), 1)

    def resumed(**changes):
        again = make_policy(model, processes, **{**SOME, **changes})
        store.load(again, store.latest())
        return again

    for changes, said in (
        ({"rank": 2}, "shape mismatch.*resume with the model.path and the section lora the run was started with"),
        ({"targets": (*SOME["targets"], "o_proj")}, "linear_proj.lora"),
        (
            {"targets": ("q_proj", "v_proj")},
            r"adapters that lora.targets=\['q_proj', 'v_proj'\] leaves out \(.*fc2.lora",
        ),
    ):
        with pytest.raises(InputError, match=said):
            resumed(**changes)
    with pytest.raises(InputError, match="is of a run with lora, unlike this one; resume with the section lora"):
        store.load(without_adapters(model, processes), store.latest())
    batch = pack(make_samples(6, all_in_loss=True))
    base, expected = HfCheckpoint(model), dict(pair for bucket in policy.weights(1 << 20) for pair in bucket)
    for name, tensor in (pair for bucket in resumed(alpha=4.0).weights(1 << 20) for pair in bucket):
        weight = base.tensor(name)
        assert_alike(tensor - weight, (expected[name] - weight) / 2, name=name)
    losses = [resumed(dropout=share).update([TokenBatch(batch)], SupervisedLoss()) for share in (0.0, 0.5)]
    assert losses[0]["policy/loss"] != losses[1]["policy/loss"]


@pytest.mark.parametrize(
    ("make", "lora"), [(make_qwen3_model, SOME), (make_moe_model, SOME), (make_gpt_oss_model, EVERY)]
)
def test_planned_bytes_are_those_that_megatron_allocates(tmp_path, processes, make, lora):
    path, given, lora = make(tmp_path / "model"), lora, LoraConfig(**lora)
    model = ModelConfig(path=str(path), dtype="fp32")
    policy = make_policy(path, processes, **given)
    policy.update([TokenBatch(pack(make_samples(3)))], SupervisedLoss())
    placement = RankLayout(policy.arch, ParallelConfig(), 1)
    critic = ValueModel(
        model, ParallelConfig(), OptimizerConfig(), processes, updates_per_step=1, num_steps=1, lora=lora
    )
    for trained, where in ((policy, placement), (critic, placement.of_critic)):
        planned = stage_bytes(where, 0, model, ComputeConfig(), lora)
        weights = storage_bytes(parameter for chunk in trained.chunks for parameter in chunk.parameters())
        assert planned.parameters == pytest.approx(weights, rel=0.01)
        assert planned.gradients == storage_bytes(buffer.grad_data for buffer in gradient_buffers(trained))
    assert stage_bytes(placement, 0, model, ComputeConfig(), lora).optimizer == pytest.approx(
        optimizer_bytes(policy), rel=0.02
    )
    assert num_trained_parameters(policy.arch, LoraConfig(**EVERY)) > num_parameters(policy.arch) / 100
