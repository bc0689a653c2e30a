"""Adapters beside Transformer Engine's layers learn what they learn beside the local ones."""

import pytest
import torch
import transformers
from transformers import Qwen2Config

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten
from dapo_mega.config import LoraConfig, ParallelConfig
from dapo_mega.megatron.core.layers import attends_with_sinks
from dapo_mega.megatron.megatron_policy import WithoutAdapters
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from tests.distributed.test_lora import make_adapter
from tests.distributed.three_updates import learnt, relative_error, three_updates
from tests.distributed.tiny import make_samples, save_random
from tests.gpu.device_policy import DEVICE_SIZES, device_policy

from .test_layouts import BF16, MODELS

pytestmark = pytest.mark.timeout(600)

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
SP = {"tensor": 2, "sequence": True}


def make(folder, kind):
    from transformers import GptOssConfig, Qwen3Config, Qwen3MoeConfig

    if kind == "dense":
        return save_random(Qwen3Config(**SIZES), folder)
    if kind == "stacked":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.5, "sliding_window": 128}
        return save_random(GptOssConfig(**SIZES, **experts), folder)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False}
    return save_random(Qwen3MoeConfig(**SIZES, **experts), folder, scale=0.08)


@pytest.mark.parametrize(
    "kind",
    [
        "dense",
        "experts",
        pytest.param(
            "stacked",
            marks=pytest.mark.skipif(not attends_with_sinks()[0], reason="Transformer Engine's layers refuse it"),
        ),
    ],
)
def test_adapters_learn_beside_transformer_engine_what_they_learn_beside_local_layers(tmp_path, kind):
    model, lora = make(tmp_path / "model", kind), {"rank": 4, "alpha": 8.0}
    lora["path"] = str(make_adapter(tmp_path / "adapter", model, LoraConfig(**lora)))
    with_adapter = {"lora": lora, "budget": 512}
    alone = {"local": {**with_adapter, "layers": "local"}, "one": with_adapter}
    spread = {"parallel": SP if kind == "dense" else {**SP, "expert": 2}, **with_adapter}
    results = three_updates(1, alone, dict.fromkeys(alone, model), tmp_path)
    results |= three_updates(2, {"tp2": spread}, {"tp2": model}, tmp_path)
    expected = results.pop("local")
    for name, got in results.items():
        frozen = [weight for weight, change in learnt(expected).items() if not bool(change.any())]
        assert frozen
        assert all(torch.equal(got["after"][weight], got["before"][weight]) for weight in frozen)
        assert relative_error(learnt(got), learnt(expected)) < 1e-4, name


@pytest.mark.parametrize(
    ("kind", "scaling", "params"),
    [
        pytest.param("dense", "tensorwise", False, marks=pytest.mark.whole_table),
        pytest.param("dense", "blockwise", False, marks=pytest.mark.whole_table),
        ("dense", "blockwise", True),
        ("dense", "delayed", False),
        pytest.param("dense", "delayed", True, marks=pytest.mark.whole_table),
        ("experts", "delayed", True),
    ],
)
def test_adapters_learn_beside_fp8_layers_within_their_precision_and_resume_to_the_bit(tmp_path, kind, scaling, params):
    config, sizes = MODELS[kind]
    model = save_random(getattr(transformers, config)(**sizes), tmp_path / "model", scale=0.03)
    lora = {"rank": 4, "alpha": 8.0}
    lora["path"] = str(make_adapter(tmp_path / "adapter", model, LoraConfig(**lora)))
    # With fewer samples, one that crosses a limit of the loss changes it by percents.
    with_adapter = {"lora": lora, "budget": 512, "samples": (17, 29, 41)}
    with_adapter["parallel"] = {"expert": 2} if kind == "experts" else {}
    fp8 = {**BF16, **with_adapter, "compute": {"fp8": {"scaling": scaling, "params": params, "amax_history": 16}}}
    cases = {
        "local": {**with_adapter, "layers": "local"},
        "whole": {**fp8, "save_after": 2},
        "resumed": {**fp8, "resume": "whole"},
    }
    results = three_updates(1 + (kind == "experts"), cases, dict.fromkeys(cases, model), tmp_path)
    local, whole, resumed = results.values()
    for mine, expected in zip(whole["metrics"], local["metrics"], strict=True):
        assert mine["policy/loss"] == pytest.approx(expected["policy/loss"], rel=0.08, abs=1e-3)
        assert mine["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=0.12)
    assert relative_error(whole["after"], local["after"]) < (0.04 if params else 0.005)
    changed = {name.split(".")[-2] for name, change in learnt(whole).items() if bool(change.any())}
    assert changed == {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    assert resumed["metrics"] == whole["metrics"][2:]
    assert all(torch.equal(resumed["after"][key], tensor) for key, tensor in whole["after"].items())
    if (kind, scaling) == ("dense", "delayed"):  # Scales go with their layers to other processes.
        layouts = {"pp2": {"pipeline": 2}, "tp2": SP}
        spread = {name: {**fp8, "parallel": layout, "resume": "whole"} for name, layout in layouts.items()}
        pp2, tp2 = three_updates(2, spread, dict.fromkeys(spread, model), tmp_path).values()
        assert all(torch.equal(pp2["after"][key], tensor) for key, tensor in whole["after"].items())
        assert relative_error(tp2["after"], whole["after"]) < (0.04 if params else 0.002)


def test_the_reference_beside_delayed_scaling_is_the_start_within_its_precision(tmp_path):
    """It is scored with the scales of the policy, which later updates change."""
    model = save_random(Qwen2Config(**DEVICE_SIZES), tmp_path / "model", scale=0.03)
    processes = start_processes(ParallelConfig(), 0)
    fp8 = {"scaling": "delayed", "amax_history": 16}
    policy = device_policy(model, processes, learning_rate=1e-2, lora=LoraConfig(rank=4, alpha=8.0), fp8=fp8)
    batch = pack(flatten(make_samples(8, all_in_loss=True)), policy.packing_layout, max_response_tokens=64)

    def scores(model):
        return model.score([batch])[0].logprobs

    reference, start = WithoutAdapters(policy), scores(policy)
    assert torch.equal(scores(reference), start)
    in_bf16 = scores(device_policy(model, processes))
    for _ in range(3):
        policy.update([TokenBatch(batch)], SupervisedLoss())
    learnt, stays = scores(policy), scores(reference)
    assert (stays - in_bf16).abs().mean() < 1.2 * (start - in_bf16).abs().mean()
    assert (learnt - start).abs().mean() > 10 * (stays - start).abs().mean()
    stop_processes()
