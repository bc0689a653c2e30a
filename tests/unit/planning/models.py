"""Architectures whose sizes can be worked out by hand."""

from dataclasses import replace

from dapo_mega.models import Architecture
from dapo_mega.models.architecture import Experts, GatedDelta, LatentAttention


def dense(**changes):
    """4 layers, hidden 8, 4 query heads and 2 key heads of size 2, MLP 16, vocabulary 20."""
    sizes = {
        "model_type": "qwen2",
        "num_layers": 4,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "head_dim": 2,
        "vocab_size": 20,
        "max_positions": 4096,
        "norm_epsilon": 1e-6,
        "rope_theta": 1e4,
        "tied_embeddings": False,
        "qkv_bias": True,
    }
    return Architecture(**{**sizes, **changes})


def mixture():
    """The same with 4 experts of inner size 6, two of them per token, and norms on queries and keys."""
    return dense(
        model_type="qwen3_moe",
        qkv_bias=False,
        qk_norm=True,
        experts=Experts(number=4, per_token=2, ffn_hidden_size=6, normalised=True),
    )


def shared():
    """The mixture with a gated shared expert of inner size 10, and a dense first layer."""
    arch = mixture()
    experts = replace(arch.experts, shared_ffn_hidden_size=10, gates_shared=True, dense_layers=frozenset({0}))
    return replace(arch, model_type="qwen2_moe", experts=experts)


def latent(query_rank=6):
    """Latent vectors of 6 (queries) and 4 numbers; heads of 3 + 2 for queries and keys and 4 for values."""
    sizes = LatentAttention(
        query_rank=query_rank, key_value_rank=4, unrotated_head_dim=3, rotated_head_dim=2, value_head_dim=4
    )
    return replace(mixture(), head_dim=5, num_query_groups=4, qk_norm=False, latent_attention=sizes)


def hybrid():
    """The dense model with output gates and norms on q and k, whose first three layers have a gated delta rule of 2 key
    heads of size 2 and 4 value heads of size 3, with a convolution over 4 tokens."""
    delta = GatedDelta(frozenset({0, 1, 2}), 4, num_key_heads=2, num_value_heads=4, key_head_dim=2, value_head_dim=3)
    return dense(qkv_bias=False, qk_norm=True, output_gate=True, gated_delta=delta)
