"""Share of the device's peak that a policy update reaches: model FLOPs utilisation (MFU), packed sequences, one GPU.

python tools/benchmark.py mfu --shape 7b --tokens 16384 --segment 8192
python tools/benchmark.py mfu --shape 1.5b --tokens 32768 --segment 2048 --fp8 blockwise --peak 1979e12
python tools/benchmark.py mfu --device cpu --shape tiny --tokens 256 --segment 64 --peak 1e11    # shows that it works

The model has the widths of Qwen2.5 in the given shape and as many of its layers as fit (or --layers). An update is
`MegatronPolicy.update`: forward, log-probs of the response tokens, DAPO loss, backward, clipping, AdamW.

Counted FLOPs, as in PaLM's appendix B with causal attention halved; nothing is counted for recomputation:

- 6 x parameters of the layers' matrices per token (2 forward, 4 backward)
- 6 x hidden x vocabulary per response token, for the output layer; the embedding is a lookup
- 6 x layers x heads x head size x S per token of a segment of S tokens: scores and weighted values, 12 without mask
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark_workload import lone_policy

from dapo_mega.cli import quiet_libraries, run_command
from dapo_mega.distributed import accelerator
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.repairs import cpu_accelerator

_BYTES_PER_PARAMETER = 18
"""bf16 weight, float32 gradient, main weight and two moments."""

_MEMORY_FOR_STATE = 0.6
"""Share of the free memory that weights and optimizer may take; the rest is for activations."""

_PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Shape:
    """Sizes of one member of the Qwen2.5 family."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def matrix_parameters(self) -> int:
        """Of one layer: query, key, value, output; gate, up, down."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn

    @property
    def embedding_parameters(self) -> int:
        return self.hidden * self.vocab * (1 if self.tied else 2)

    def update_flops(self, num_layers: int, segments: Sequence[int], num_responses: int) -> float:
        """FLOPs of one update over packed segments with `num_responses` response tokens; see the module's text."""
        matrices = 6.0 * self.matrix_parameters * num_layers * sum(segments)
        attention = 6.0 * num_layers * self.heads * self.head_dim * sum(length**2 for length in segments)
        output = 6.0 * self.hidden * self.vocab * num_responses
        return matrices + attention + output


SHAPES = {
    "7b": Shape(3584, 18944, 28, 28, 4, 152064, tied=False),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151936, tied=True),
    "tiny": Shape(128, 384, 2, 4, 2, 512, tied=True),
}


def run(options: argparse.Namespace) -> list[str]:
    """Measure and return the report's lines."""
    if options.device == "cuda" and not accelerator.has_gpu():
        raise InputError(
            "mfu needs a CUDA device and this machine has none; --device cpu --shape tiny shows the method"
        )
    if options.device == "cpu" and accelerator.has_gpu():
        raise InputError("--device cpu needs a process without CUDA devices; set CUDA_VISIBLE_DEVICES= for it")
    if options.segment <= _PROMPT_TOKENS // 4:
        raise InputError(f"--segment {options.segment} is too short; give more than {_PROMPT_TOKENS // 4}")
    cpu_accelerator.install()
    shape = SHAPES[options.shape]
    num_layers = options.layers or _layers_that_fit(shape, options.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_hollow_checkpoint(folder, shape, num_layers, options.segment)
        policy = _build_policy(folder, options)
    _randomise(policy)
    batch, segments, num_responses = _make_batch(policy, shape, options)
    update = _make_update(policy, batch)
    for _ in range(options.warmup):
        _timed(update)
    seconds = [_timed(update) for _ in range(options.rounds)]
    flops = shape.update_flops(num_layers, segments, num_responses)
    median = statistics.median(seconds)
    tokens = sum(segments)
    lines = [
        f"one policy update: {options.shape}, {num_layers} of {shape.layers} layers, {tokens} packed tokens in "
        f"{options.micro_batches} micro-batch(es), segments of {options.segment}, "
        f"{'FP8 ' + options.fp8 if options.fp8 != 'none' else options.dtype}, recompute {options.recompute}",
        f"{median:.4f} s, median of {len(seconds)} ({min(seconds):.4f} to {max(seconds):.4f}); "
        f"{tokens / median:,.0f} tokens/s",
        f"{flops / 1e12:.3f} TFLOPs, {flops / median / 1e12:.2f} TFLOP/s, MFU {flops / median / options.peak:.1%} of "
        f"{options.peak / 1e12:g} TFLOP/s",
    ]
    if torch.cuda.is_available():
        lines.append(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return lines


def _layers_that_fit(shape: Shape, device: str) -> int:
    if device == "cpu":
        return shape.layers
    room = torch.cuda.mem_get_info()[0] * _MEMORY_FOR_STATE / _BYTES_PER_PARAMETER - shape.embedding_parameters
    return max(1, min(shape.layers, int(room / shape.matrix_parameters)))


def write_hollow_checkpoint(folder: Path, shape: Shape, num_layers: int, longest: int) -> None:
    """A Hugging Face checkpoint of zeros that takes no room on the disk: the tensors are a hole in the file."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(longest, 4096),
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        tensors = Qwen2ForCausalLM(config).state_dict()
    if shape.tied:
        del tensors["lm_head.weight"]
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)


def _build_policy(folder: Path, options: argparse.Namespace) -> Any:
    from dapo_mega.config import ComputeConfig, Fp8Config, ParallelConfig
    from dapo_mega.megatron.processes import start_processes

    compute = ComputeConfig(fp8=Fp8Config(scaling=options.fp8), recompute=options.recompute)
    return lone_policy(folder, options.dtype, start_processes(ParallelConfig(), 0), compute)


def _randomise(policy: Any) -> None:
    """Give the zeros values: a GPU is faster on zeros than on numbers."""
    with torch.no_grad():
        for chunk in policy.chunks:
            for name, parameter in chunk.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.02)
                elif "norm" in name:
                    parameter.fill_(1.0)
    policy.optimizer.reload_model_params()


def _make_batch(policy: Any, shape: Shape, options: argparse.Namespace) -> tuple[list[Any], list[int], int]:
    """Micro-batches with old log-probs, the lengths of all segments, the number of response tokens."""
    from dapo_mega.batching.microbatch import pack
    from dapo_mega.batching.plan import PackingLayout
    from dapo_mega.batching.samples import flatten, single_turn
    from dapo_mega.megatron.objectives import TokenBatch

    rng = np.random.default_rng(0)
    per_batch = max(1, options.tokens // options.segment)
    segments = [options.segment] * (per_batch * options.micro_batches)
    prompt = min(_PROMPT_TOKENS, options.segment // 4)
    samples = [
        single_turn(
            rng.integers(0, shape.vocab, prompt).astype(np.int32),
            rng.integers(0, shape.vocab, length - prompt).astype(np.int32),
            advantage=1.0 if i % 2 else -1.0,
        )
        for i, length in enumerate(segments)
    ]
    layout = PackingLayout(multiple_of=policy.token_multiple)
    micro_batches = [
        pack(flatten(samples[start : start + per_batch]), layout, max_response_tokens=options.segment)
        for start in range(0, len(samples), per_batch)
    ]
    scores = policy.score(micro_batches)
    batches = [TokenBatch(b, score.logprobs) for b, score in zip(micro_batches, scores, strict=True)]
    return batches, segments, len(samples) * (options.segment - prompt)


def _make_update(policy: Any, batches: list[Any]) -> Callable[[], object]:
    from dapo_mega.config import AlgorithmConfig
    from dapo_mega.megatron.objectives import PolicyGradient

    objective = PolicyGradient(AlgorithmConfig())
    return lambda: policy.update(batches, objective)


def _timed(action: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark.py mfu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="7b")
    parser.add_argument("--layers", type=int, help="layers (default: as many as fit)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--fp8", choices=("none", "delayed", "tensorwise", "blockwise"), default="none")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--tokens", type=int, default=16384, help="per micro-batch (default: %(default)s)")
    parser.add_argument("--segment", type=int, default=8192, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=1, help="per update (default: %(default)s)")
    parser.add_argument(
        "--peak", type=float, default=989e12, help="FLOP/s (default: H100 and H200, bf16, dense; FP8 has 1979e12)"
    )
    parser.add_argument("--warmup", type=int, default=3, help="updates before measuring (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="updates measured (default: %(default)s)")
    options = parser.parse_args(argv)
    quiet_libraries()
    print("\n".join(run(options)))


if __name__ == "__main__":
    run_command(main)
