"""Planned times against published and measured ones that no constant was fitted to, and against the machine's rates."""

import json
import re
from pathlib import Path

import pytest

from dapo_mega.commands import plan
from dapo_mega.config import ParallelConfig
from dapo_mega.planning.memory import GIB, EngineLayout
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.step_time import Machine, decoding_speed, token_flops

from .models import dense

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
A100 = Machine(312e12, 0.5, 300e9, 25e9, 8, 80 * GIB, 2039e9, 0.8)
H100 = Machine(989e12, 0.5, 350e9, 45e9, 8, 80 * GIB, 3350e9, 0.8)


def qwen(layers, hidden, inner, heads, keys, **others):
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": inner, "num_attention_heads": heads}
    sizes |= {"num_query_groups": keys, "head_dim": 128, "vocab_size": 152064, **others}
    return dense(**sizes)


SMALL = {"vocab_size": 151936, "tied_embeddings": True}
QWEN = {
    "0.5B": qwen(24, 896, 4864, 14, 2, **(SMALL | {"head_dim": 64})),
    "1.5B": qwen(28, 1536, 8960, 12, 2, **SMALL),
    "3B": qwen(36, 2048, 11008, 16, 2, **SMALL),
    "7B": qwen(28, 3584, 18944, 28, 4),
    "14B": qwen(48, 5120, 13824, 40, 8),
    "32B": qwen(64, 5120, 27648, 40, 8),
    "72B": qwen(80, 8192, 29568, 64, 8),
}


def speed(size, machine, tensor=1, *, embedded=False, places=1):
    layout = EngineLayout(tensor, 0 if embedded else tensor, "bf16", places)
    return decoding_speed(RankLayout(QWEN[size], ParallelConfig(), 1), layout, machine, 1024.0, places)


@pytest.mark.parametrize(
    ("size", "machine", "tensor", "embedded", "tokens_per_s", "within"),
    [
        # docs/source/benchmark/speed_benchmark.rst of Qwen2.5, one response: vLLM, then transformers.
        ("1.5B", A100, 1, False, 183.33, 0.1),
        ("3B", A100, 1, False, 127.61, 0.1),
        ("14B", A100, 1, False, 46.30, 0.1),
        ("32B", A100, 1, False, 22.13, 0.1),
        ("72B", A100, 4, False, 31.37, 0.1),
        ("1.5B", A100, 1, True, 39.68, 0.1),
        ("14B", A100, 1, True, 24.74, 0.4),
        # github.com/tenstorrent/tt-inference-server/issues/143, two H100.
        ("72B", H100, 2, False, 1000 / 30.9, 0.2),
    ],
)
def test_one_response_decodes_as_fast_as_published(size, machine, tensor, embedded, tokens_per_s, within):
    planned = 1 / speed(size, machine, tensor, embedded=embedded).step_s(1)
    assert planned == pytest.approx(tokens_per_s, rel=within)


@pytest.mark.parametrize("size", QWEN)
@pytest.mark.parametrize("places", [1, 16, 256, 4096, 10**9])
def test_no_engine_is_faster_than_its_memory_and_its_arithmetic(size, places):
    found = speed(size, H100, 8, places=places)
    arch = QWEN[size]
    operations = found.tokens_per_s * token_flops(RankLayout(arch, ParallelConfig(), 1), 1024)
    assert operations <= 8 * H100.flops
    read = 2 * arch.num_layers * 3 * arch.hidden_size * arch.ffn_hidden_size  # Of its MLPs alone.
    assert read / found.step_s(places) <= 8 * H100.memory_rate


def times(capsys, *arguments):
    """(scoring, updates, a round of decoding) in seconds, of the 0.5B run on one GPU with other sizes."""
    plan.main([str(CONFIGS / "gsm8k-qwen2.5-0.5b-1gpu.yaml"), *arguments])
    text = capsys.readouterr().out
    numbers = re.search(r"about ([\d.,]+) s\n.*= ([\d.,]+) scoring \+ ([\d.,]+) updates", text, re.DOTALL).groups()
    decoding, scoring, updates = (float(number.replace(",", "")) for number in numbers)
    return scoring, updates, decoding


def batch(groups, size, updates, tokens, prompt, response, longest):
    return [
        *(f"batch.groups_per_step={groups}", f"batch.mini_batch_groups={groups // updates}"),
        *(f"batch.generation_groups={groups}", f"batch.group_size={size}", f"batch.tokens_per_microbatch={tokens}"),
        *(f"data.max_prompt_tokens={4 * prompt}", f"rollout.max_response_tokens={longest}"),
        *("reward.overlong_punishment=false", f"--mean-prompt-tokens={prompt}", f"--mean-response-tokens={response}"),
    ]


@pytest.mark.parametrize(
    ("layers", "hidden", "inner", "heads", "keys", "seconds"),
    # tools/benchmarks/README.md, "On one H100".
    [(28, 1536, 8960, 12, 2, 0.457), (7, 3584, 18944, 28, 4, 0.507)],
    ids=["1.5B", "7 layers of 7B"],
)
def test_an_update_takes_hardly_longer_than_on_one_h100(capsys, tmp_path, layers, hidden, inner, heads, keys, seconds):
    """16,384 tokens in one micro-batch, in two sequences."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": 151936, "rms_norm_eps": 1e-6}
    sizes |= {"model_type": "qwen2", "max_position_embeddings": 32768, "tie_word_embeddings": layers == 28}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    one = batch(1, 2, 1, 16384, prompt=8, response=8184, longest=16000)
    _, updates, _ = times(capsys, f"model.architecture={tmp_path / 'config.json'}", *one)
    assert 1.0 < updates / seconds < 1.25


def test_a_small_models_step_takes_what_a_published_one_takes_within_a_factor(capsys):
    """github.com/verl-project/verl/issues/1208: Qwen2.5-0.5B on 4 GH200, with FSDP and all logits in memory."""
    published = (3.57, 14.3)
    run = batch(1024, 5, 4, 16384, prompt=103, response=325, longest=1024)
    planned = times(capsys, *run, "--gpus=4", "compute.recompute=full", "--memory-gbps=4000")
    for ours, theirs in zip(planned, published, strict=False):
        assert 0.4 < ours / theirs < 1
