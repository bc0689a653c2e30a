"""The planned bytes against what Megatron allocates on the CPU, category by category, within 3 %."""

from pathlib import Path

import pytest
import torch

from dapo_mega.config import ComputeConfig, ModelConfig, ParallelConfig
from dapo_mega.models import load_architecture
from dapo_mega.planning.activations import ActivationModel, MicroBatchShape, peak_activations
from dapo_mega.planning.parameters import stage_bytes
from dapo_mega.planning.rank_layout import RankLayout

from .allocations import allocated
from .launching import run_distributed
from .tables import run_now
from .tiny import add_trainable_mtp_layer, has_delta

TOLERANCE = 0.03
# Multiples of 4 for two context-parallel processes; the local attention makes three blocks of them.
LENGTHS = [300, 240, 208, 204, 48]
# Here it copies less.
ONE_LENGTH = [240, 240, 240, 240]
ALL_DENSE = {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}
ALL_EXPERTS = {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "moe"]}
ALL_MIXED = {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp", "moe"]}
SHARED_EXPERT = {"recompute": "selective", "recompute_modules": ["shared_experts"]}
UNFUSED = {"fused_output_layer": False}
FULL = {"recompute": "full"}

# (model, dtype, parallel, compute)
ONE_PROCESS = {
    "one": ("wide", "fp32", {}, {}),
    "one_bf16": ("wide", "bf16", {}, {}),
    "tied": ("narrow", "fp32", {}, {}),
    "attention_recomputed": ("wide", "bf16", {}, {"recompute": "selective"}),
    "much_recomputed": ("narrow", "fp32", {}, ALL_DENSE),
    "much_recomputed_bf16": ("wide", "bf16", {}, ALL_DENSE),
    "all_recomputed": ("wide", "fp32", {}, FULL),
    "all_recomputed_in_twos": ("narrow", "bf16", {}, {**FULL, "recompute_layers": 2}),
    "unfused": ("wide", "fp32", {}, UNFUSED),
    "unfused_bf16_recomputed": ("narrow", "bf16", {}, {**FULL, **UNFUSED}),
    "one_length": ("narrow", "fp32", {}, {}),
    "one_length_bf16": ("narrow", "bf16", {}, {}),
    "one_length_recomputed": ("narrow", "fp32", {}, {"recompute": "selective"}),
    "one_length_experts": ("experts", "fp32", {}, {}),
    "windowed": ("windowed", "fp32", {}, {}),
    "windowed_bf16_recomputed": ("windowed", "bf16", {}, ALL_DENSE),
    "sinks": ("sinks", "fp32", {}, {}),
    "one_length_sinks": ("sinks", "fp32", {}, {}),
    "sinks_recomputed": ("sinks", "bf16", {}, ALL_EXPERTS),
    "norms_behind": ("olmo", "fp32", {}, {}),
    "norms_behind_recomputed": ("olmo", "bf16", {}, ALL_DENSE),
    "norms_around": ("gemma", "fp32", {}, {}),
    "norms_around_recomputed": ("gemma", "bf16", {}, ALL_DENSE),
    "experts": ("experts", "fp32", {}, {}),
    "experts_recomputed": ("experts", "bf16", {}, ALL_EXPERTS),
    "shared_expert": ("shared", "fp32", {}, {}),
    "shared_expert_recomputed": ("shared", "bf16", {}, SHARED_EXPERT),
    "experts_and_mlps_recomputed": ("shared", "fp32", {}, ALL_MIXED),
    "latent": ("latent", "fp32", {}, {}),
    "latent_recomputed": ("latent", "bf16", {}, ALL_MIXED),
    "one_length_latent": ("latent", "fp32", {}, {}),
    "one_length_latent_recomputed": ("latent", "fp32", {}, {"recompute": "selective"}),
    "one_length_latent_lite": ("latent_lite", "fp32", {}, {}),
    "one_length_latent_lite_recomputed": ("latent_lite", "fp32", {}, {"recompute": "selective"}),
    "latent_lite_all_recomputed": ("latent_lite", "bf16", {}, FULL),
    "mtp": ("latent", "fp32", {}, {}),
    "mtp_recomputed": ("latent", "bf16", {}, {**FULL, **UNFUSED}),
    "critic": ("narrow", "fp32", {}, {}),
    "critic_bf16": ("wide", "bf16", {}, {}),
    "critic_recomputed": ("narrow", "bf16", {}, FULL),
    "critic_experts": ("experts", "fp32", {}, {}),
}
TWO_PROCESSES = {
    "tensor": ("wide", "fp32", {"tensor": 2}, {}),
    "sequence": ("wide", "bf16", {"tensor": 2, "sequence": True}, {}),
    "sequence_biased": ("biased", "fp32", {"tensor": 2, "sequence": True}, {}),
    # Two processes share one key head and gather queries, keys and values.
    "shared_key_recomputed": ("one_key", "bf16", {"tensor": 2, "sequence": True}, {"recompute": "selective"}),
    "shared_key_normed": ("one_key_normed", "fp32", {"tensor": 2}, {}),
    "shared_key_normed_recomputed": ("one_key_normed", "bf16", {"tensor": 2, "sequence": True}, ALL_DENSE),
    "one_length_shared_key": ("one_key_each", "fp32", {"tensor": 2, "sequence": True}, {}),
    "sequence_unfused": ("narrow", "fp32", {"tensor": 2, "sequence": True}, {**UNFUSED, **ALL_DENSE}),
    "pipeline": ("wide", "bf16", {"pipeline": 2}, {}),
    "pipeline_tied_recomputed": ("narrow", "bf16", {"pipeline": 2}, FULL),
    "interleaved_uneven": ("wide", "fp32", {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": [0, 3, 1, 0]}, {}),
    "interleaved": ("wide", "fp32", {"pipeline": 2, "virtual_pipeline": 2}, {}),
    "interleaved_recomputed": ("narrow", "bf16", {"pipeline": 2, "virtual_pipeline": 2}, {"recompute": "selective"}),
    "context": ("wide", "bf16", {"context": 2}, {}),
    "context_recomputed": ("narrow", "fp32", {"context": 2}, {"recompute": "selective"}),
    "context_sinks": ("sinks", "bf16", {"context": 2}, {}),
    "sinks_spread_sequence": ("sinks", "fp32", {"tensor": 2, "sequence": True, "expert": 2}, {}),
    "norms_behind_sequence": ("olmo", "fp32", {"tensor": 2, "sequence": True}, {}),
    "norms_around_sequence": ("gemma", "bf16", {"tensor": 2, "sequence": True}, {}),
    "data": ("narrow", "fp32", {}, {}),
    "data_bf16": ("wide", "bf16", {}, {}),
    "experts_spread": ("experts", "bf16", {"expert": 2}, {}),
    # All layers at once: single ones differ in how many tokens a process's experts get.
    "experts_spread_recomputed": ("experts", "fp32", {"expert": 2}, {**FULL, "recompute_layers": 4}),
    "shared_expert_cut": ("shared", "fp32", {"tensor": 2, "sequence": True, "expert_tensor": 2}, {}),
    "shared_expert_pipeline": ("shared", "bf16", {"pipeline": 2}, {}),
    "experts_cut": ("experts", "fp32", {"tensor": 2, "sequence": True, "expert_tensor": 2}, {}),
    "experts_spread_sequence": ("experts", "bf16", {"tensor": 2, "sequence": True, "expert": 2}, {}),
    "latent_sequence": ("latent", "fp32", {"tensor": 2, "sequence": True, "expert_tensor": 2}, {}),
    "latent_lite_pipeline": ("latent_lite", "bf16", {"pipeline": 2}, {"recompute": "selective"}),
    "latent_context": ("latent", "bf16", {"context": 2}, {}),
    "mtp_sequence": ("latent", "bf16", {"tensor": 2, "sequence": True, "expert_tensor": 2}, ALL_MIXED),
    "mtp_pipeline": ("latent", "fp32", {"pipeline": 2}, {}),
    "critic_sequence": ("wide", "bf16", {"tensor": 2, "sequence": True}, {}),
    "critic_tensor": ("narrow", "fp32", {"tensor": 2}, {}),
    "critic_pipeline": ("narrow", "fp32", {"pipeline": 2}, {}),
    "critic_context": ("wide", "bf16", {"context": 2}, {}),
}
if has_delta():
    ONE_PROCESS["hybrid"] = ("hybrid", "fp32", {}, {})
    ONE_PROCESS["hybrid_recomputed"] = ("hybrid", "fp32", {}, ALL_EXPERTS)
    TWO_PROCESSES["hybrid_cut"] = ("hybrid", "fp32", {"tensor": 2, "sequence": True, "expert_tensor": 2}, {})
    TWO_PROCESSES["hybrid_context"] = ("hybrid", "fp32", {"context": 2}, {})
# What the gate has in another case, with a switch more or in the other precision.
WHOLE_TABLE = {
    "attention_recomputed", "much_recomputed", "all_recomputed", "unfused", "one_length_bf16", "one_length_recomputed",
    "windowed", "sinks", "norms_behind", "norms_around", "experts", "shared_expert", "latent",
    "one_length_latent_recomputed", "critic", "tensor", "shared_key_normed", "interleaved", "pipeline",
    "data", "experts_spread", "critic_sequence", "critic_context", "mtp", "mtp_pipeline",
    "norms_behind_sequence", "critic_tensor", "shared_expert_pipeline", "context_recomputed", "latent_lite_pipeline",
    "interleaved_recomputed", "one_length_latent_lite_recomputed", "critic_bf16", "context_sinks", "experts_cut",
    "shared_key_recomputed", "experts_spread_sequence", "tied", "one_bf16", "one_length_sinks",
    "norms_behind_recomputed", "shared_expert_recomputed", "one_length_latent", "one_length_latent_lite", "hybrid",
    "norms_around_sequence", "latent_context", "critic_pipeline",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


def make_models(folder):
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GptOssConfig,
        GptOssForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Olmo3Config,
        Olmo3ForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )

    torch.manual_seed(0)
    shared = {"num_hidden_layers": 4, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
    wide = Qwen2Config(
        vocab_size=2003,
        hidden_size=256,
        intermediate_size=704,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        **shared,
    )
    narrow = Qwen2Config(
        vocab_size=3001,
        hidden_size=128,
        intermediate_size=448,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        **shared,
    )
    mixture = {
        "vocab_size": 1501,
        "hidden_size": 128,
        "num_experts_per_tok": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        **shared,
    }
    of_experts = {"intermediate_size": 320, "moe_intermediate_size": 96, "num_experts": 8, **mixture}
    experts = Qwen3MoeConfig(head_dim=32, tie_word_embeddings=False, **of_experts)
    mixed = Qwen2MoeConfig(shared_expert_intermediate_size=192, mlp_only_layers=[1], **of_experts)
    sizes = {"kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "first_k_dense_replace": 1}
    sizes |= {"num_local_experts": 8, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    sizes |= {"intermediate_size": 320, "moe_intermediate_size": 96, **mixture, "num_key_value_heads": 8}
    for name, values in (
        ("latent", {"q_lora_rank": 64, "v_head_dim": 24}),
        ("latent_lite", {"q_lora_rank": None, "v_head_dim": 48}),
    ):
        DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **values)).save_pretrained(folder / name)
    add_trainable_mtp_layer(folder / "latent")
    sinks = GptOssConfig(
        intermediate_size=96,
        num_local_experts=8,
        head_dim=32,
        sliding_window=205,
        tie_word_embeddings=False,
        **mixture,
    )
    hybrid = Qwen3NextConfig(
        shared_expert_intermediate_size=192,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=48,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        **of_experts,
    )
    Qwen3NextForCausalLM(hybrid).save_pretrained(folder / "hybrid")
    of_llama = {"vocab_size": 2003, "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, **shared}
    biased = LlamaConfig(num_key_value_heads=2, attention_bias=True, mlp_bias=True, **of_llama)
    windowed = MistralConfig(num_key_value_heads=6, sliding_window=205, **of_llama)
    olmo = Olmo3Config(num_key_value_heads=2, sliding_window=205, **of_llama)
    gemma = Gemma3TextConfig(num_key_value_heads=2, head_dim=40, sliding_window=205, **of_llama)
    Olmo3ForCausalLM(olmo).save_pretrained(folder / "olmo")
    Gemma3ForCausalLM(gemma).save_pretrained(folder / "gemma")
    one_key = LlamaConfig(num_key_value_heads=1, **of_llama)
    one_key_each = LlamaConfig(num_key_value_heads=1, **{**of_llama, "num_attention_heads": 2})
    one_key_normed = Qwen3Config(num_key_value_heads=1, head_dim=24, attention_bias=True, **of_llama)
    LlamaForCausalLM(one_key).save_pretrained(folder / "one_key")
    LlamaForCausalLM(one_key_each).save_pretrained(folder / "one_key_each")
    Qwen3ForCausalLM(one_key_normed).save_pretrained(folder / "one_key_normed")
    GptOssForCausalLM(sinks).save_pretrained(folder / "sinks")
    LlamaForCausalLM(biased).save_pretrained(folder / "biased")
    MistralForCausalLM(windowed).save_pretrained(folder / "windowed")
    Qwen2ForCausalLM(wide).save_pretrained(folder / "wide")
    Qwen2ForCausalLM(narrow).save_pretrained(folder / "narrow")
    Qwen3MoeForCausalLM(experts).save_pretrained(folder / "experts")
    Qwen2MoeForCausalLM(mixed).save_pretrained(folder / "shared")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("cases", "world_size"), [(ONE_PROCESS, 1), (TWO_PROCESSES, 2)], ids=["one", "two"])
def test_planned_bytes_are_those_that_megatron_allocates(cases, world_size, models, pytestconfig):
    (cases,) = run_now({world_size: cases}, WHOLE_TABLE, pytestconfig).values()
    described = [
        {
            "name": name,
            "model": str(models / model),
            "dtype": dtype,
            "parallel": parallel,
            "compute": compute,
            "lengths": ONE_LENGTH if name.startswith("one_length") else LENGTHS,
            # Enough for every stage to work forward and backward by turns.
            "num_micro_batches": 4 if "pipeline" in parallel else 1,
            "is_critic": name.startswith("critic"),
            "mtp": name.startswith("mtp"),
        }
        for name, (model, dtype, parallel, compute) in cases.items()
    ]
    by_rank = run_distributed(allocated, world_size, described)
    rows = [row for case in described for row in compared(case, [of_rank[case["name"]] for of_rank in by_rank])]
    print(
        "\n".join(
            f"{name:45} {measured:>12,} {planned:>14,.0f} {planned / measured - 1:+.2%}"
            for name, measured, planned in rows
        )
    )
    wrong = [row for row in rows if abs(row[2] / row[1] - 1) > TOLERANCE]
    assert not wrong, wrong


def compared(case, measured):
    """(what, measured, planned) for every category on every pipeline stage, the largest or mean of its processes."""
    model = ModelConfig(path=case["model"], dtype=case["dtype"])
    parallel, compute = ParallelConfig(**case["parallel"]), ComputeConfig(**case["compute"])
    family, arch = load_architecture(Path(case["model"]))
    placement = RankLayout(family.with_mtp(arch) if case["mtp"] else arch, parallel, len(measured))
    if case["is_critic"]:
        placement = placement.of_critic
    for stage in range(parallel.pipeline):
        on_stage = [result for result in measured if result["stage"] == stage]
        planned = stage_bytes(placement, stage, model, compute)
        name = f"{case['name']} stage {stage}"
        for category in ("parameters", "gradients", "optimizer"):
            yield f"{name} {category}", max(r[category] for r in on_stage), getattr(planned, category)
        shape = MicroBatchShape(tuple(case["lengths"]), on_stage[0]["num_scored"])
        kept = ActivationModel(placement, model, compute, shape, "local")
        # Which experts a random router prefers differs between processes; their sum does not.
        for number, chunk in enumerate(placement.chunks(stage)):
            mean = sum(result["activations"][number] for result in on_stage) // len(on_stage)
            yield f"{name} activations of chunk {number}", mean, kept.chunk(chunk) + kept.handed_on(chunk)
        peak = sum(result["peak_activations"] for result in on_stage) // len(on_stage)
        yield f"{name} peak of the schedule", peak, peak_activations(kept, stage, case["num_micro_batches"])[0]
