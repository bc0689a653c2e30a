import pytest
import torch

from dapo_mega.config import ComputeConfig, ModelConfig, ParallelConfig
from dapo_mega.megatron import fused_logprobs, logprobs
from dapo_mega.megatron.core.packed_attention import packed_segments
from dapo_mega.planning import activations, memory
from dapo_mega.planning.activations import ActivationModel, MicroBatchShape, peak_activations
from dapo_mega.planning.rank_layout import Chunk, RankLayout

from .models import dense, latent, mixture, shared

BF16, FP32 = ModelConfig(path="m", dtype="bf16"), ModelConfig(path="m", dtype="fp32")
MIDDLE = Chunk(range(1, 3), False, False)


def kept(kind, *, arch=None, model=BF16, compute=None, world_size=8, lengths=(64,), **parallel):
    layout = RankLayout(arch or dense(), ParallelConfig(**parallel), world_size)
    shape = MicroBatchShape(lengths, sum(lengths))
    return ActivationModel(layout, model, ComputeConfig(**(compute or {})), shape, kind)


def test_a_transformer_engine_layer_keeps_what_korthikanti_counts():
    # Two norms: input, output (8 x 2 bytes each), root; q, k, v, output: 4 + 2 + 2 + 4 heads of size 2; row sums; MLP.
    per_token = 2 * (2 * 16 + 4) + 12 * 2 * 2 + 16 + 3 * 16 * 2
    assert kept("transformer_engine").whole_layer(0).total == 64 * per_token


def test_tensor_and_sequence_parallelism_cut_what_they_share():
    whole = kept("transformer_engine").whole_layer(0)
    tensor = kept("transformer_engine", tensor=2).whole_layer(0)
    sequence = kept("transformer_engine", tensor=2, sequence=True).whole_layer(0)
    assert (tensor.norm, tensor.attention, tensor.mlp) == (whole.norm, whole.attention / 2, whole.mlp / 2)
    assert sequence.total == whole.total / 2
    assert kept("transformer_engine", context=2).whole_layer(0).total == whole.total / 2


def test_full_recompute_keeps_the_input_of_every_group():
    rotary = 4 * 2 * 64
    for layers, inputs in ((1, 2), (2, 1)):
        model = kept("transformer_engine", compute={"recompute": "full", "recompute_layers": layers})
        assert model.chunk(MIDDLE) == inputs * 64 * 8 * 2 + rotary
        assert model.recomputed_peak(MIDDLE) == layers * model.whole_layer(0).total - 64 * 8 * 2


def test_recomputing_the_mlp_leaves_it_out_until_the_backward_pass():
    model = kept("transformer_engine", compute={"recompute": "selective", "recompute_modules": ["mlp"]})
    # With its norm, of which the input stays.
    layer = model.whole_layer(0)
    repeated = layer.mlp + layer.late_norm - model.hidden
    assert model.kept_layer(0).total == layer.total - repeated
    assert model.recomputed_peak(MIDDLE) == repeated


def test_recomputing_flash_attention_saves_less_than_it_keeps_instead():
    # Queries, keys, the product they were cut from, and the output, against queries, keys, values, output and row sums.
    model = kept("transformer_engine", compute={"recompute": "selective"})
    assert model.kept_layer(0).attention == 64 * 2 * 2 * (4 + 2 + 8 + 4)
    assert model.kept_layer(0).attention > model.whole_layer(0).attention - 64 * 16


def test_experts_keep_rows_for_every_chosen_one():
    per_row = 8 * 2 + 6 * 3 * 2 + 4
    routing = 2 * (2 * 8 + 4) + 4 * 5
    assert kept("transformer_engine", arch=mixture()).whole_layer(0).mlp == 64 * (2 * per_row + routing)


@pytest.mark.parametrize("lengths", [(64,), (50, 30, 20, 5), (9, 6, 4, 3, 2), (10, 7, 6)])
def test_padding_is_that_of_the_local_attention(lengths):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    plan = packed_segments(cu_seqlens, max(lengths), plan_attention=True)
    assert MicroBatchShape(lengths, 0).padded_tokens == sum(rows * length for rows, length in plan.buckets)


def test_a_first_stage_holds_one_micro_batch_per_stage():
    model = kept("local", pipeline=4)
    one = [model.chunk(model.placement.chunks(stage)[0]) for stage in range(4)]
    assert [peak_activations(model, stage, 8)[0] for stage in range(4)] == [4 * one[0], 3 * one[1], 2 * one[2], one[3]]
    # Every stage but the last hands hidden states on and is given their gradient, and every one but the first sends a
    # gradient; what a stage is given is kept by its first norm.
    hidden = 64 * 8 * 2
    beside = [peak_activations(model, stage, 8)[1] / hidden for stage in range(4)]
    assert beside == [4 + 1, 3 + 2, 2 + 2, 1]


def test_the_output_layers_sizes_are_those_of_the_policy():
    assert fused_logprobs.CHUNK_BYTES["cuda"] == memory.CHUNK_BYTES
    assert memory.MIN_CHUNK_POSITIONS == fused_logprobs.MIN_CHUNK_POSITIONS
    assert memory.MAX_CHUNK_POSITIONS == fused_logprobs.MAX_CHUNK_POSITIONS
    assert memory.UNFUSED_POSITIONS == logprobs.CHUNK_POSITIONS


def test_the_fused_output_layer_never_holds_all_logits():
    arch = dense(vocab_size=150_000, hidden_size=64)
    layout = RankLayout(arch, ParallelConfig(), 1)
    fused, unfused = (
        memory.output_layer_bytes(layout, ComputeConfig(fused_output_layer=fused), 2, 32_768) for fused in (True, False)
    )
    rows = 2**30 // (4 * 150_000)
    assert fused == rows * 150_000 * 2 + 32_768 * 64 * 2 + 150_000 * 64 * 2
    assert unfused == 32_768 * 150_000 * 2 + 1024 * 150_000 * 6


def test_a_shared_expert_keeps_a_dense_mlps_activations_and_its_gate():
    model = kept("local", arch=shared())
    routed = kept("local", arch=mixture()).whole_layer(1).mlp
    # Gate and up together, silu(gate), its product with up; the output and one gate for each token.
    assert model.whole_layer(1).mlp == routed + 64 * 2 * (4 * 10 + 8 + 1)
    assert model.whole_layer(0).mlp == 64 * 2 * 4 * 16


@pytest.mark.parametrize("pads", [False, True])
def test_latent_attention_keeps_latent_vectors_and_the_heads_projected_from_them(monkeypatch, pads):
    monkeypatch.setattr(activations, "megatron_pads_values", lambda: pads)
    layer = kept("transformer_engine", arch=latent()).whole_layer(0)
    # Products of 6 and 4 + 2 numbers, 6 and 4 behind their norms, two roots; cosines and sines of size 2, twice.
    # Where values and output are padded to 5, also the output of size 4.
    assert layer.around_attention == 64 * (2 * (6 + 6 + 6 + 4) + 2 * 4 + 2 * 4 * 2 + pads * 4 * 4 * 2)
    # Queries and keys of size 5, values and output of size 4; row sums.
    assert layer.attention == 64 * (4 * 2 * (5 + 5 + 2 * (4 + pads)) + 4 * 4)
    without = kept("transformer_engine", arch=latent(None)).whole_layer(0)
    assert layer.around_attention - without.around_attention == 64 * (2 * (6 + 6) + 4)
    # The norm is not a part of the two products that it goes to.
    recomputed = kept(
        "transformer_engine", arch=latent(), compute={"recompute": "selective", "recompute_modules": ["layernorm"]}
    )
    assert recomputed.kept_layer(0).norm == 64 * 8 * 2
