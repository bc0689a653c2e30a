from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_mega.config import ParallelConfig
from dapo_mega.errors import InputError
from dapo_mega.models import Architecture, ShardRule, load_architecture, merge_shards, take_shard
from dapo_mega.models.architecture import Experts, GatedDelta, LatentAttention


def architecture(heads=4, groups=2, head_dim=3, vocab=11):
    return Architecture(
        model_type="qwen2",
        num_layers=4,
        hidden_size=8,
        ffn_hidden_size=12,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=64,
        norm_epsilon=1e-6,
        rope_theta=1e4,
        tied_embeddings=True,
        qkv_bias=True,
    )


def hf_tensors(layout, arch, bias):
    q, kv = arch.num_attention_heads * arch.head_dim, arch.num_query_groups * arch.head_dim
    tail = () if bias else (arch.hidden_size,)
    shapes = {
        ShardRule.REPLICATED: [(arch.hidden_size,)],
        ShardRule.COLUMN: [(arch.ffn_hidden_size, arch.hidden_size)],
        ShardRule.ROW: [(arch.hidden_size, arch.ffn_hidden_size)],
        ShardRule.VOCAB: [(arch.vocab_size, arch.hidden_size)],
        ShardRule.QKV: [(q, *tail), (kv, *tail), (kv, *tail)],
        ShardRule.GATE_UP: [(arch.ffn_hidden_size, arch.hidden_size)] * 2,
        ShardRule.GATED_QKV: [(2 * q, *tail), (kv, *tail), (kv, *tail)],
        # 4 key heads of size 2 and 8 value heads of size 3: q, k, v; gates, betas and decays.
        ShardRule.DELTA: [(8 + 8 + 24, *tail), (24, *tail), (8, *tail), (8, *tail)],
        ShardRule.DELTA_BY_HEAD: [(8 + 8 + 24 + 24, *tail), (16, *tail)],
        ShardRule.FUSED_QKV: [(q + 2 * kv, *tail)],
        ShardRule.TRANSPOSED_ROW: [(arch.ffn_hidden_size, arch.hidden_size)],
        ShardRule.INTERLEAVED_GATE_UP: [(2 * arch.ffn_hidden_size, *tail)],
        ShardRule.TRANSPOSED_INTERLEAVED_GATE_UP: [(arch.hidden_size, 2 * arch.ffn_hidden_size)],
        ShardRule.FUSED_GATE_UP: [(2 * arch.ffn_hidden_size, arch.hidden_size)],
    }[layout]
    start = 0
    tensors = []
    for shape in shapes:
        numel = int(torch.tensor(shape).prod())
        tensors.append(torch.arange(start, start + numel, dtype=torch.float32).reshape(shape))
        start += numel
    return tensors


@given(
    layout=st.sampled_from(list(ShardRule)),
    tp_size=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([1, 2, 4]),
    per_group=st.integers(1, 3),
    bias=st.booleans(),
)
def test_cutting_and_merging_is_exact(layout, tp_size, groups, per_group, bias):
    delta = GatedDelta(frozenset({0}), 4, num_key_heads=4, num_value_heads=8, key_head_dim=2, value_head_dim=3)
    arch = replace(architecture(heads=4 * per_group, groups=groups, head_dim=4), gated_delta=delta)
    tensors = hf_tensors(layout, arch, bias)
    shards = [take_shard(tensors, layout, arch, rank, tp_size) for rank in range(tp_size)]
    assert len({shard.shape for shard in shards}) == 1
    for before, after in zip(tensors, merge_shards(shards, layout, arch), strict=True):
        assert torch.equal(before, after)


def test_gates_of_queries_follow_the_queries_of_their_group():
    # The heads of `test_qkv_...`, with gates g0 to g3 behind each query on disk.
    arch = architecture(head_dim=1)
    q = torch.tensor([0.0, 30, 1, 31, 2, 32, 3, 33])
    k, v = torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    expected = [0, 1, 30, 31, 10, 20, 2, 3, 32, 33, 11, 21]
    assert take_shard([q, k, v], ShardRule.GATED_QKV, arch, 0, 1).tolist() == expected
    assert take_shard([q, k, v], ShardRule.GATED_QKV, arch, 1, 2).tolist() == expected[6:]


def test_each_process_has_its_heads_of_every_part_of_a_gated_delta_layer():
    # Two key heads and four value heads of size 1; the numbers' tens are q, k, v, gate, beta, decay.
    delta = GatedDelta(frozenset({0}), 4, num_key_heads=2, num_value_heads=4, key_head_dim=1, value_head_dim=1)
    arch = replace(architecture(), gated_delta=delta)
    mine = [1, 11, 22, 23, 32, 33, 42, 43, 52, 53]
    by_part = [[0, 1, 10, 11, 20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43], [50, 51, 52, 53]]
    by_head = [[0, 10, 20, 21, 30, 31, 1, 11, 22, 23, 32, 33], [40, 41, 50, 51, 42, 43, 52, 53]]
    for layout, tensors in ((ShardRule.DELTA, by_part), (ShardRule.DELTA_BY_HEAD, by_head)):
        assert take_shard([torch.tensor(rows) for rows in tensors], layout, arch, 1, 2).tolist() == mine
    # The convolution has the first three parts.
    assert take_shard([torch.tensor(by_part[0])], ShardRule.DELTA, arch, 1, 2).tolist() == mine[:4]


def test_qkv_is_interleaved_by_query_group_as_megatron_reads_it():
    # 4 query heads in 2 groups of head_dim 1: group 0 holds q0 q1 k0 v0, group 1 holds q2 q3 k1 v1.
    arch = architecture(head_dim=1)
    q, k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    assert take_shard([q, k, v], ShardRule.QKV, arch, 0, 1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert take_shard([q, k, v], ShardRule.QKV, arch, 1, 2).tolist() == [2, 3, 11, 21]
    # With more ranks than groups, ranks hold equal runs of their group's rows, whatever heads these belong to.
    shards = [take_shard([q, k, v], ShardRule.QKV, arch, rank, 4).tolist() for rank in range(4)]
    assert shards == [[0, 1], [10, 20], [2, 3], [11, 21]]
    one_group = [torch.tensor(rows) for rows in ([0.0, 1, 2, 3, 4, 5], [10.0, 11, 12], [20.0, 21, 22])]
    shards = [
        take_shard(one_group, ShardRule.QKV, architecture(heads=2, groups=1), rank, 2).tolist() for rank in (0, 1)
    ]
    assert shards == [[0, 1, 2, 3, 4, 5], [10, 11, 12, 20, 21, 22]]


def test_vocabulary_padding_is_zero_and_dropped_again():
    arch = architecture(vocab=5)
    tensors = hf_tensors(ShardRule.VOCAB, arch, False)
    last = take_shard(tensors, ShardRule.VOCAB, arch, 1, 2)
    assert last.shape == (3, 8)
    assert last[-1].abs().sum() == 0


EXPERTS = Experts(number=6, per_token=2, ffn_hidden_size=5, normalised=True)


@pytest.mark.parametrize(
    ("layout", "experts", "message"),
    [
        ({"tensor": 3}, None, r"parallel.tensor=3 does not divide.*num_attention_heads=4; choose one of \[1, 2, 4\]"),
        ({"pipeline": 2, "virtual_pipeline": 3}, None, r"virtual_pipeline=3 = 6 chunks are more.*num_hidden_layers=4"),
        (
            {"pipeline": 3, "pipeline_layout": "Et|tt|L"},
            None,
            r"=\[1, 2, 0\] has 3 layers.*give for example \[1, 2, 1\]",
        ),
        ({"expert": 2}, None, r"parallel.expert=2 .* need a mixture-of-experts model"),
        ({"expert": 4}, EXPERTS, r"parallel.expert=4 does not divide.*experts 6; choose one of \[1, 2, 3, 6\]"),
        (
            {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2},
            EXPERTS,
            r"parallel.expert_tensor=2 does not divide.*moe_intermediate_size=5",
        ),
        ({"tensor": 2, "expert": 2}, EXPERTS, r"needs parallel.sequence=true"),
        (
            {"tensor": 2, "sequence": True, "expert": 2},
            replace(EXPERTS, shared_ffn_hidden_size=9),
            r"parallel.tensor=2 does not divide the shared expert's inner size 9; choose one of \[1\]",
        ),
        ({"tensor": 2, "sequence": True}, EXPERTS, r"needs parallel.expert >= 2; set parallel.expert_tensor=2"),
    ],
)
def test_layouts_that_do_not_fit_the_model_are_refused_with_those_that_do(layout, experts, message):
    arch = replace(architecture(), experts=experts)
    with pytest.raises(InputError, match=message):
        arch.check_layout(ParallelConfig(**layout))


def test_a_model_of_other_sizes_beside_a_policy_fits_into_its_layout():
    given = ParallelConfig(
        tensor=2, sequence=True, pipeline=2, pipeline_layout=[2, 4], expert=2, expert_tensor=2, world_size=8
    )
    dense, mixture = architecture(), replace(architecture(), num_layers=6, experts=EXPERTS)
    assert mixture.layout_beside(given) == given
    found = dense.layout_beside(given)
    dense.check_layout(found)
    assert found == ParallelConfig(tensor=2, sequence=True, pipeline=2, world_size=8)
    # Both ways of mixtures with tensor parallelism are refused for the policy, so neither is advised.
    with pytest.raises(InputError, match=r"cannot stand .*parallel.tensor=2; set parallel.tensor=1, or serve it"):
        mixture.layout_beside(found)
    assert mixture.layout_beside(ParallelConfig(pipeline=2)) == ParallelConfig(pipeline=2)


def test_blocks_of_fp8_that_sequence_parallelism_would_cut_are_refused():
    sequence = ParallelConfig(tensor=2, sequence=True)
    latent = LatentAttention(256, 512, 128, 64, 128)
    whole = replace(architecture(), hidden_size=256, latent_attention=latent)
    for arch, width in (
        (replace(whole, hidden_size=192), "hidden_size=192"),
        (replace(whole, latent_attention=replace(latent, query_rank=64)), "q_lora_rank=64"),
        (replace(whole, latent_attention=replace(latent, key_value_rank=96)), "kv_lora_rank=96"),
    ):
        with pytest.raises(InputError, match=rf"multiples of 128, but the model has {width}; set .*=tensorwise"):
            arch.check_fp8(sequence, "blockwise")
        for parallel, scaling in ((sequence, "tensorwise"), (sequence, "none"), (ParallelConfig(), "blockwise")):
            assert arch.check_fp8(parallel, scaling) is None
    for fitting in (whole, replace(whole, latent_attention=replace(latent, query_rank=None))):
        assert fitting.check_fp8(sequence, "blockwise") is None


@pytest.mark.parametrize(
    ("sizes", "tensor", "message"),
    [
        # 12 query heads in 4 groups of 5 heads of 3 rows, in 2 of 8 x 3, in 3 of 6 x 3, and in 1 of 14 x 4.
        ({"groups": 4}, 3, r"tensor=3 neither divides .*_heads=4 nor is a multiple.*choose one of \[1, 2, 4, 12\]"),
        ({"groups": 4}, 12, None),
        ({"groups": 2}, 4, None),
        ({"groups": 2}, 6, None),
        ({"groups": 2}, 3, r"tensor=3 neither divides"),
        ({"groups": 3}, 12, r"tensor=12 makes 4 processes share each .*=3, whose 18 rows.*choose one of \[1, 3, 6\]"),
        ({"groups": 1, "head_dim": 4}, 4, None),
        ({"groups": 1, "head_dim": 4}, 3, r"tensor=3 makes 3 processes share each .*=1, whose 56 rows"),
    ],
)
def test_processes_share_key_heads_if_their_rows_can_be_cut(sizes, tensor, message):
    arch = architecture(heads=12, **sizes)
    if message is None:
        assert arch.check_layout(ParallelConfig(tensor=tensor)) is None
        return
    with pytest.raises(InputError, match=message):
        arch.check_layout(ParallelConfig(tensor=tensor))


def test_layouts_that_fit_the_model_are_accepted():
    for layout in ({}, {"tensor": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {"pipeline": 4, "context": 3}):
        assert architecture().check_layout(ParallelConfig(**layout)) is None
    arch = replace(architecture(), experts=EXPERTS)
    for layout in ({}, {"expert": 3}, {"tensor": 2, "sequence": True, "expert": 6}, {"context": 2, "expert": 2}):
        assert arch.check_layout(ParallelConfig(**layout)) is None


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}]
)
def test_rope_theta_is_read_as_transformers_4_and_5_write_it(tmp_path, rope):
    import json

    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 11,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        **rope,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_architecture(tmp_path)[1].rope_theta == 5e5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json"),
        ("{", "not valid JSON"),
        ("[1]", "holds no JSON object"),
        (
            '{"model_type": "gpt9"}',
            "'gpt9' is not supported; nearest is .*supported: .*mistral, olmo2, olmo3, phi3, qwen2",
        ),
        ('{"model_type": "qwen2"}', "lacks the key"),
    ],
)
def test_a_folder_that_is_no_supported_checkpoint_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        load_architecture(tmp_path)
