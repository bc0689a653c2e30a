"""Planned times against published and measured ones that no constant was fitted to, and against the machine's rates."""

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


def times(capsys, config, *arguments):
    """(scoring, updates) of a plan, in seconds."""
    plan.main([str(CONFIGS / config), *arguments])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step time"))
    return [float(value.replace(",", "")) for value in re.findall(r"([\d.,]+) (?:scoring|updates)", line)]


ONE_UPDATE = [
    *("batch.groups_per_step=2", "batch.mini_batch_groups=2", "batch.group_size=2", "batch.generation_groups=2"),
    *("batch.tokens_per_microbatch=16384", "data.max_prompt_tokens=8", "rollout.max_response_tokens=4088"),
    *("rollout.placement=embedded", "rollout.fleet.rendezvous=null", "parallel=null", "--gpus=1", "compute=null"),
    *("--mean-prompt-tokens=8", "--mean-response-tokens=4088"),
]


def test_an_update_takes_as_long_as_on_one_h100(capsys):
    """tools/benchmarks/README.md: 16,384 tokens of the 1.5B model, of 28 layers, in one micro-batch."""
    print(times(capsys, "gsm8k-qwen2.5-0.5b-1gpu.yaml", *ONE_UPDATE))
