"""A rehearsal with Transformer Engine's layers does what processes with them do, and holds what was planned."""

import pytest
from transformers import GptOssConfig, Qwen2MoeConfig, Qwen3MoeConfig, Qwen3NextConfig

from dapo_mega.megatron.core.layers import attends_with_sinks
from dapo_mega.planning.memory import activation_parts
from dapo_mega.rehearsal import device, report
from dapo_mega.rehearsal.run import rehearse_run
from tests.distributed.launching import run_distributed
from tests.distributed.tables import marked
from tests.distributed.test_rehearsal import LONG, compare, config_of, really
from tests.distributed.tiny import has_delta, make_qwen3_model, save_random
from tests.te_cpu.emulated import delta_kernels

SEQUENCE = {"tensor": 2, "sequence": True}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "vocab_size": 2048,
    "num_attention_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
SHORT = {"data.max_prompt_tokens": 64, "rollout.max_response_tokens": 192, "batch.tokens_per_microbatch": 256}
"""Enough where nothing small has to vanish beside activations."""
CASE = {"parallel": {**SEQUENCE, "context": 2}, "dtype": "bf16", **SHORT}
TWO = {"dtype": "bf16", **LONG}
FP8 = {
    "tensorwise": {**TWO, "parallel": {"context": 2}, "compute.fp8.scaling": "tensorwise"},
    "blockwise": {**TWO, **SHORT, "parallel": {}, "compute.fp8.scaling": "blockwise", "compute.fp8.params": True},
    # Last, as its scales are reduced as long as a process lives.
    "delayed": {**TWO, "parallel": SEQUENCE, "compute.fp8.scaling": "delayed"},
}
HISTORIES = 1024 * 5 * 4 * 4
"""Bytes of a layer's largest values of 1,024 passes: three and two tensors of each of four products, in float32."""


def test_transformer_engines_layers_are_rehearsed_as_they_run(tmp_path):
    model = make_qwen3_model(tmp_path, **SIZES)
    models = {False: str(model)}
    real = run_distributed(really, 4, {"one": CASE}, models)
    rehearsal = compare(CASE, "one", models, real)
    assert "with Transformer Engine's layers" in next(report.report(rehearsal))
    played = rehearsal.played.values()
    # The context rank with no prompts scores as many tokens as the plan's.
    held = max(rank.peaks["update"].num_bytes - sum(rank.always.values()) for rank in played)
    parts = activation_parts(rehearsal.workload, rehearsal.workload.placement, 0)
    assert held == pytest.approx(sum(parts), rel=0.03)
    for rank, found in rehearsal.played.items():
        planned = report.planned_flops(rehearsal, rank)
        assert {phase: found.flops[phase] for phase in planned} == pytest.approx(planned, rel=0.0001)
    assert_sends_as_planned(rehearsal)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory, request):
    chosen = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    cases = {name: case for name, case in FP8.items() if name in chosen}
    models = {False: str(make_qwen3_model(tmp_path_factory.mktemp("fp8"), **SIZES | {"intermediate_size": 1024}))}
    return models, run_distributed(really, 2, cases, models, timeout_s=600)


@pytest.mark.parametrize("name", [pytest.param("tensorwise", marks=pytest.mark.whole_table), "blockwise", "delayed"])
def test_fp8_is_rehearsed_as_it_runs(name, fp8):
    rehearsal = compare(FP8[name], name, *fp8)
    assert "FP8 off" not in next(report.report(rehearsal))
    workload, played = rehearsal.workload, rehearsal.played.values()
    parts = activation_parts(workload, workload.placement, 0)
    histories = (name == "delayed") * workload.placement.arch.num_layers * HISTORIES
    for rank in played:
        assert rank.always == pytest.approx(report.planned_always(rehearsal, 0), rel=0.03)
        # Passes that find scales keep nothing for a backward pass.
        assert rank.peaks.get("scales", rank.peaks["score"]).num_bytes < 1.1 * rank.peaks["score"].num_bytes
    held = max(rank.peaks["update"].num_bytes - sum(rank.always.values()) for rank in played)
    assert held == pytest.approx(sum(parts) + histories, rel=0.03)
    for rank, found in rehearsal.played.items():
        planned = report.planned_flops(rehearsal, rank)
        assert {phase: found.flops[phase] for phase in planned} == pytest.approx(planned, rel=0.0001)
    assert_sends_as_planned(rehearsal)


def assert_sends_as_planned(rehearsal):
    for name, (sent, planned) in report.traffic(rehearsal).items():
        assert sent == pytest.approx(planned, rel=0.01), name


GATHERING = {
    "adapters": {"parallel": SEQUENCE, "lora": {"rank": 2}},
    "shared expert, recomputed": {
        "parallel": {**SEQUENCE, "expert": 2},
        "compute.recompute": "full",
        "compute.fp8.params": True,
    },
    # Megatron reads them back to save them.
    "scales of experts": {"parallel": {"expert": 2}, "compute.fp8.scaling": "delayed"},
    "parameters of experts": {"parallel": {"expert": 2}, "compute.fp8.params": True},
    "ends in bf16": {"parallel": SEQUENCE, "compute.fp8.bf16_layers_at_ends": 1},
}


@pytest.mark.parametrize("case", marked(GATHERING, {"adapters", "parameters of experts", "ends in bf16"}))
def test_what_is_gathered_in_fp8_was_planned(case, tmp_path):
    case = GATHERING[case]
    if "expert" in case["parallel"]:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": [1]}
        sizes = SIZES | experts | {"intermediate_size": 1024, "num_key_value_heads": 8, "num_hidden_layers": 4}
        model = save_random(Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=256), tmp_path)
    else:
        model = make_qwen3_model(tmp_path, **SIZES | {"intermediate_size": 1024})
    config = config_of({**TWO, **SHORT, "compute.fp8.scaling": "blockwise", **case}, {False: str(model)}, 2)
    assert_sends_as_planned(rehearse_run(config, 2, 80 * 2**30))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_what_is_offloaded_is_not_on_the_device(share, tmp_path, monkeypatch):
    """Also of tensors so large that rehearsals do not make them on the host."""
    monkeypatch.setattr(device, "_SMALL", 2**12)
    model = make_qwen3_model(tmp_path, **SIZES)
    case = {"parallel": {}, "dtype": "bf16", **LONG, "compute.optimizer_offload": share}
    rehearsal = rehearse_run(config_of(case, {False: str(model)}, 1), 1, 80 * 2**30)
    found, planned = rehearsal.played[0].always, report.planned_always(rehearsal, 0)
    assert found == pytest.approx(planned, rel=0.001)
    assert found["optimizer"] == pytest.approx(found["parameters"] * (6 - 4 * share), rel=0.001)


REPEATS = {"compute.recompute": "selective"}
ACTIVATIONS = {
    "adapters": {"parallel": SEQUENCE, "lora": {"rank": 32, "targets": ["v_proj", "down_proj"], "dropout": 0.1}},
    "experts' adapters": {"parallel": {"expert": 2}, "lora": {"rank": 32}},
    # A history of many updates, which is not planned, would hide what is kept of activations.
    "adapters, delayed scales": {
        "parallel": SEQUENCE,
        "lora": {"rank": 32, "targets": ["o_proj"]},
        "compute.fp8": {"scaling": "delayed", "amax_history": 1},
    },
    "virtual stages": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    "cut experts": {"parallel": {**SEQUENCE, "expert_tensor": 2}},
    "an MLP again": {"parallel": SEQUENCE, **REPEATS, "compute.recompute_modules": ["mlp"]},
    "experts again": {"parallel": {"expert": 2}, **REPEATS, "compute.recompute_modules": ["layernorm", "moe"]},
    "a layer again": {"parallel": SEQUENCE, "compute.recompute": "full"},
}
# gpt-oss: clamped experts with biases, and a sink of each head.
DELTA = {
    "shared_expert_intermediate_size": 256,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
BIASED = {
    "biased experts": {"parallel": {"expert": 2}},
    "biased experts again": {"parallel": {"expert": 2}, "compute.recompute": "full"},
    "adapters beside biased experts": {"parallel": {"expert": 2}, "lora": {"rank": 32}},
}
ACTIVATIONS |= BIASED
ACTIVATIONS["delta rule"] = {"parallel": {"expert": 2}}
IN_WHOLE_TABLE = {
    "experts' adapters",
    "adapters, delayed scales",
    "cut experts",
    "experts again",
    "a layer again",
    "virtual stages",
    *BIASED,
    "delta rule",
} - {"biased experts again"}


@pytest.mark.parametrize("name", marked(ACTIVATIONS, IN_WHOLE_TABLE))
def test_activations_are_what_was_planned(name, tmp_path, monkeypatch):
    case = ACTIVATIONS[name]
    sizes = SIZES | {"num_experts_per_tok": 2, "num_key_value_heads": 8, "num_hidden_layers": 6}
    if name in BIASED:
        if not attends_with_sinks()[0]:
            pytest.skip("Transformer Engine's layers refuse it")
        sizes = sizes | {"intermediate_size": 256, "num_local_experts": 4, "sliding_window": 128}
        model = save_random(GptOssConfig(**sizes), tmp_path)
    elif name == "delta rule":
        if not has_delta():
            pytest.skip("this Megatron-Core has no gated delta layers for packs")
        delta_kernels.stand_in(monkeypatch)
        sizes = sizes | {"num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 128} | DELTA
        model = save_random(Qwen3NextConfig(**sizes), tmp_path)
    elif "expert" in str(case["parallel"]):
        model = save_random(Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=128), tmp_path)
    else:
        model = make_qwen3_model(tmp_path, **SIZES, num_hidden_layers=4)
    rehearsal = rehearse_run(config_of({**TWO, **case}, {False: str(model)}, 2), 2, 80 * 2**30)
    for stage in range(case["parallel"].get("pipeline", 1)):
        ranks = [rank for number, rank in rehearsal.played.items() if rehearsal.roles.place(number)[3] == stage]
        held = max(rank.peaks["update"].num_bytes - sum(rank.always.values()) for rank in ranks)
        planned = sum(activation_parts(rehearsal.workload, rehearsal.workload.placement, stage))
        assert held == pytest.approx(planned, rel=0.03)
    assert_sends_as_planned(rehearsal)
