import json
from pathlib import Path

import pytest

from dapo_mega.config import ComputeConfig, ModelConfig, ParallelConfig
from dapo_mega.models.families import find_family
from dapo_mega.planning.parameters import (
    dense_numels,
    expert_numels,
    fp8_weight_bytes,
    num_active_parameters,
    num_parameters,
    stage_buffers,
    stage_bytes,
)
from dapo_mega.planning.rank_layout import RankLayout

from .models import dense, hybrid, latent, mixture, shared

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
BF16, FP32 = ModelConfig(path="m", dtype="bf16"), ModelConfig(path="m", dtype="fp32")

# Per layer: qkv 8 x 16 + 16, projection 64, MLP 3 x 8 x 16, two norms; ends: 2 x 20 x 8 and a norm.
DENSE = 4 * (128 + 16 + 64 + 384 + 16) + 320 + 8
# Per layer: qkv 128, projection 64, head norms 4, router 32, experts 4 x 3 x 8 x 6, norms; the same ends.
MIXTURE = 4 * (128 + 64 + 4 + 32 + 576 + 16) + 320 + 8
# Three layers with a shared expert of 3 x 8 x 10 and its gate, one with an MLP in place of experts and router.
SHARED = MIXTURE + 3 * (240 + 8) + 384 - 32 - 576
# Keys and values: 8 x (4 + 2) and 4 x 4 x (3 + 4), norm 4; queries 8 x 6 and 6 x 4 x 5, norm 6; output 4 x 4 x 8.
LATENT = MIXTURE + 4 * (48 + 112 + 4 + 48 + 120 + 6 + 128 - (128 + 64 + 4))
# Gated attention: 8 x (16 + 8) for q, gates, k, v, projection 64, head norms 4. A gated delta layer: 8 x (4 + 4 + 12 +
# 12 + 4 + 4) into it and 12 x 8 out of it, a convolution of 20 x 4, decays 4 + 4, a norm of 3.
HYBRID = DENSE + (8 * 24 + 64 + 4 - (128 + 16 + 64)) + 3 * (320 + 96 + 80 + 8 + 3 - (128 + 16 + 64))


def test_a_models_size_is_what_its_tensors_add_up_to():
    assert num_parameters(dense()) == DENSE
    assert num_parameters(dense(tied_embeddings=True)) == DENSE - 160
    assert num_parameters(mixture()) == MIXTURE
    assert num_active_parameters(mixture()) == MIXTURE - 4 * 288
    assert num_active_parameters(dense()) == DENSE
    assert num_parameters(shared()) == SHARED
    assert num_active_parameters(shared()) == SHARED - 3 * 288
    assert num_parameters(latent()) == LATENT
    assert num_parameters(latent(None)) == LATENT - 4 * (48 + 120 + 6 - 160)
    assert num_parameters(hybrid()) == HYBRID
    assert num_parameters(dense(output_bias=True, mlp_bias=True)) == DENSE + 4 * (8 + 2 * 16 + 8)


def test_the_papers_model_has_the_size_its_checkpoint_has():
    raw = json.loads((CONFIGS / "architectures" / "qwen2.5-32b.json").read_text())
    # metadata.total_size of the published safetensors index is twice this: 65,527,752,704 bytes of bf16.
    assert num_parameters(find_family("qwen2").read(raw)) * 2 == 65_527_752_704


@pytest.mark.parametrize(
    ("arch", "parallel", "world_size", "copies"),
    [
        # Held by several tensor-parallel processes: norms, of experts the router as well.
        (dense(), {"pipeline": 2}, 2, 0),
        (dense(), {"pipeline": 2, "virtual_pipeline": 2}, 2, 0),
        (dense(), {"tensor": 2}, 2, 4 * 16 + 8),
        (dense(), {"tensor": 2, "pipeline": 2}, 4, 4 * 16 + 8),
        # The biases behind attention and MLP as well.
        (dense(output_bias=True, mlp_bias=True), {"tensor": 2}, 2, 4 * (16 + 8 + 8) + 8),
        (hybrid(), {"tensor": 2, "sequence": True}, 2, 4 * 16 + 4 + 3 * 3 + 8),
        (mixture(), {"expert": 2}, 2, MIXTURE - 4 * 576),
        (mixture(), {"tensor": 2, "sequence": True, "expert_tensor": 2}, 2, 4 * (16 + 4 + 32) + 8),
        (shared(), {"tensor": 2, "sequence": True, "expert_tensor": 2}, 2, 4 * (16 + 4) + 3 * (32 + 8) + 8),
        # Down-projections and norms of latent vectors.
        (latent(), {"tensor": 2, "sequence": True, "expert_tensor": 2}, 2, 4 * (16 + 32 + 48 + 4 + 48 + 6) + 8),
    ],
)
def test_a_replica_holds_every_weight_once_beside_what_is_shared(arch, parallel, world_size, copies):
    layout = RankLayout(arch, ParallelConfig(**parallel), world_size)
    per_stage = world_size // layout.parallel.pipeline
    held = sum(
        sum(dense_numels(layout, chunk)) + sum(expert_numels(layout, chunk))
        for stage in range(layout.parallel.pipeline)
        for chunk in layout.chunks(stage)
    )
    assert held * per_stage == num_parameters(arch) + copies * (per_stage - 1)


def test_tied_embeddings_are_two_copies_on_two_stages():
    tied = RankLayout(dense(tied_embeddings=True), ParallelConfig(pipeline=2), 2)
    held = sum(sum(dense_numels(tied, chunk)) for stage in range(2) for chunk in tied.chunks(stage))
    assert held == DENSE


def test_an_optimizer_shard_has_moments_and_in_bf16_main_weights_too():
    arch = dense(hidden_size=64, head_dim=16, ffn_hidden_size=128, vocab_size=512, qkv_bias=False)
    elements = num_parameters(arch)
    assert elements % 128 == 64  # Nothing but the end of the bucket is padded.
    for model, shards, per_element in ((FP32, 1, 8), (FP32, 4, 8), (BF16, 1, 12), (BF16, 2, 12)):
        held = stage_bytes(RankLayout(arch, ParallelConfig(), shards), 0, model, ComputeConfig())
        assert held.gradients == (elements + 64) * 4
        assert held.parameters == (elements + 64) * (4 if model is FP32 else 2)
        assert held.optimizer == (elements + 64) // shards * per_element


def test_offloading_takes_its_share_of_the_moments_off_the_gpu():
    layout = RankLayout(dense(), ParallelConfig(), 1)
    kept, moved = (
        stage_bytes(layout, 0, BF16, ComputeConfig(optimizer_offload=share)).optimizer for share in (0.0, 0.75)
    )
    assert moved == pytest.approx(kept * (4 + 8 / 4) / (4 + 8), abs=1)


def test_spread_experts_share_their_state_over_fewer_processes():
    layout = RankLayout(mixture(), ParallelConfig(expert=2), 4)
    shared, spread = stage_buffers(layout, 0, FP32, ComputeConfig())
    assert (layout.optimizer_shards, layout.expert_shards) == (4, 2)
    assert shared.optimizer == shared.gradients * 2 // 4
    assert spread.optimizer == spread.gradients * 2 // 2
    # Two of four experts, 2 x (96 + 48) weights a layer, each padded to a multiple of 64.
    assert spread.gradients == 4 * 2 * (128 + 64) * 4


def test_fp8_weights_replace_or_accompany_those_in_bf16():
    layout = RankLayout(dense(), ParallelConfig(), 1)
    linear = 4 * (128 + 16 + 64 + 384)
    scaling = {"scaling": "tensorwise"}
    assert fp8_weight_bytes(layout, 0, ComputeConfig()) == 0
    assert fp8_weight_bytes(layout, 0, ComputeConfig(fp8=scaling)) == 2 * linear
    assert fp8_weight_bytes(layout, 0, ComputeConfig(fp8={**scaling, "bf16_layers_at_ends": 1})) == linear
    assert fp8_weight_bytes(layout, 0, ComputeConfig(fp8={**scaling, "params": True})) == 0


def test_a_critic_has_a_head_in_place_of_the_output_layer():
    for tied in (False, True):
        layout = RankLayout(dense(tied_embeddings=tied), ParallelConfig(), 1)
        assert num_parameters(layout.of_critic.arch) == DENSE - 160 + 8
    layout = RankLayout(dense(tied_embeddings=True), ParallelConfig(pipeline=2), 2).of_critic
    assert sum(dense_numels(layout, layout.chunks(1)[0])) == 2 * 608 + 8 + 8, "no copy of the embedding"
