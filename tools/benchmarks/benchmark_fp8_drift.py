"""How far a trainer's log-probs in bf16 and FP8 are from those of an engine in bf16 or FP8 with the same weights.

python tools/benchmark.py fp8_drift --widths 256 1024 --depths 2 8        # needs a GPU with Transformer Engine
python -m tests.te_cpu tools/benchmark.py fp8_drift                       # or an emulated one

For each width and depth a random Qwen2-shaped model, whose logits have a standard deviation of 3, generates responses
as an engine: transformers in bf16, or in SGLang's block-wise FP8 (weights as this project sends them, inputs of the
projections rounded in groups of 128 per token). Trainers with each kind of FP8 scaling score them. Columns, over all
response tokens, w being exp(trainer's log-prob - engine's):

- mean |log w|, in nats: what `rollout/logprob_abs_diff_mean` shows
- KL(engine || trainer) per token, estimated by mean(w - 1 - log w)
- effective share of the tokens, (sum w)^2 / (n sum w^2), and of the responses, with w their product over tokens: what
  the corrections `algorithm.importance_cap` by tokens and by sequences leave of the samples
- share of tokens whose w is over importance_cap's default, which then counts as the cap, and of responses that
  `algorithm.sequence_mask`'s default leaves out
- what the corrections are for: how far the expected policy gradient is from that of samples of the trainer's own, with
  none and with importance_cap. It is exact: over the whole vocabulary at each place, with respect to the logits there,
  for rewards that are a coin per token.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark_workload import lone_policy
from torch import Tensor

from dapo_mega.algorithms.ratios import effective_share, within_bounds
from dapo_mega.cli import quiet_libraries, run_command
from dapo_mega.distributed import accelerator
from dapo_mega.errors import InputError

VOCABULARY = 512
PROMPT_TOKENS = 16
# The defaults where trainer and engine differ ("auto").
IMPORTANCE_CAP = 2.0
SEQUENCE_MASK = (0.5, 2.0)
# Kind of scaling, FP8 parameters, layers at both ends in bf16.
TRAINERS: dict[str, tuple[Any, bool, int]] = {
    "bf16": ("none", False, 0),
    "delayed": ("delayed", False, 0),
    "tensorwise": ("tensorwise", False, 0),
    "blockwise": ("blockwise", False, 0),
    "blockwise, ends in bf16": ("blockwise", False, 1),
    "blockwise, FP8 parameters": ("blockwise", True, 0),
}


def run(options: argparse.Namespace) -> None:
    """Measure and print a Markdown table, row by row."""
    if not accelerator.has_gpu():
        raise InputError(
            "fp8_drift needs a CUDA device, and this machine has none; python -m tests.te_cpu tools/benchmark.py "
            "fp8_drift emulates one"
        )
    from dapo_mega.config import ParallelConfig
    from dapo_mega.megatron.processes import start_processes

    processes = start_processes(ParallelConfig(), 0)
    print(
        "| width | layers | engine | trainer | mean abs. log w | KL per token | effective tokens | "
        "effective responses | capped tokens | masked responses | gradient's error | with the cap |\n|" + "---|" * 12
    )
    for width in options.widths:
        for depth in options.depths:
            with tempfile.TemporaryDirectory() as folder:
                write_model(Path(folder), width, depth)
                for engine in ("bf16", "fp8"):
                    samples = generate(Path(folder), engine == "fp8", options)
                    for trainer in TRAINERS:
                        if "ends" in trainer and depth <= 2:
                            continue
                        own = score(Path(folder), trainer, samples.tokens, processes)
                        figures = " | ".join(drift(samples, own))
                        print(f"| {width} | {depth} | {engine} | {trainer} | {figures} |", flush=True)


@dataclass(frozen=True)
class Samples:
    """`tokens` [responses, prompt and response]; the engine's log-probs of the whole vocabulary at each response token
    [responses, response tokens, vocabulary]."""

    tokens: Tensor
    logprobs: Tensor

    def chosen(self, logprobs: Tensor) -> Tensor:
        """Those of the response tokens [responses, response tokens]."""
        return logprobs.gather(2, self.tokens[:, PROMPT_TOKENS:, None])[:, :, 0]


def write_model(folder: Path, width: int, depth: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=3.0 * width**-0.5)
    model.to(torch.bfloat16).save_pretrained(folder)


@torch.no_grad()
def generate(folder: Path, fp8: bool, options: argparse.Namespace) -> Samples:
    """What the engine answers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(accelerator.device())
    if fp8:
        _quantise_projections(model)
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (options.responses, PROMPT_TOKENS), generator=random)
    tokens = tokens.to(accelerator.device())
    past, chosen, logprobs = None, tokens, []
    for _ in range(options.response_tokens):
        output = model(chosen, past_key_values=past, use_cache=True)
        past = output.past_key_values
        scores = output.logits[:, -1].float().log_softmax(-1)
        chosen = torch.multinomial(scores.exp().cpu(), 1, generator=random).to(scores.device)
        logprobs.append(scores.cpu())
        tokens = torch.cat([tokens, chosen], 1)
    return Samples(tokens.cpu(), torch.stack(logprobs, 1))


def _quantise_projections(model: torch.nn.Module) -> None:
    """As SGLang's block-wise FP8 engine: E4M3 weights with a scale per 128 x 128, inputs with one per 128."""
    from dapo_mega.weight_sync.fp8 import BLOCK, quantise

    def rounded(module: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        groups = inputs[0].float().unflatten(-1, (-1, BLOCK))
        scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
        values = (groups / scales).to(torch.float8_e4m3fn).float() * scales
        return (values.flatten(-2).to(inputs[0].dtype),)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            assert isinstance(module, torch.nn.Linear)
            values, scales = quantise(module.weight.data)
            spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            module.weight.data = (values.float() * spread).to(module.weight.dtype)
            module.register_forward_pre_hook(rounded)


def score(folder: Path, trainer: str, tokens: Tensor, processes: Any) -> Tensor:
    """The trainer's log-probs of the whole vocabulary [responses, response tokens, vocabulary]."""
    from dapo_mega.batching.microbatch import pack
    from dapo_mega.batching.plan import PackingLayout
    from dapo_mega.batching.samples import flatten, single_turn
    from dapo_mega.config import ComputeConfig, Fp8Config
    from dapo_mega.megatron.core.decoder import unwrapped

    scaling, params, ends = TRAINERS[trainer]
    fp8 = Fp8Config(scaling=scaling, params=params, bf16_layers_at_ends=ends)
    policy = lone_policy(folder, "bf16", processes, ComputeConfig(fp8=fp8, fused_output_layer=False))
    rows = tokens.numpy().astype(np.int32)
    flat = flatten([single_turn(row[:PROMPT_TOKENS], row[PROMPT_TOKENS:], advantage=1.0) for row in rows])
    num_tokens = tokens.shape[1] - PROMPT_TOKENS
    batch = pack(flat, PackingLayout(multiple_of=policy.token_multiple), max_response_tokens=num_tokens)
    logits: list[Tensor] = []
    output_layer: Any = unwrapped(policy.chunks[-1]).output_layer
    output_layer.register_forward_hook(lambda layer, inputs, output: logits.append(output[0]))
    policy.score([batch])
    # The last pass, as delayed scaling makes some before it.
    whole = logits[-1][batch.response_rows(), 0, :VOCABULARY].float().log_softmax(-1).cpu()
    return whole.unflatten(0, (len(rows), num_tokens))


def drift(samples: Samples, own: Tensor) -> Iterator[str]:
    """The table's columns, of the engine's samples and the trainer's own log-probs of the whole vocabulary."""
    log_weights = (samples.chosen(own) - samples.chosen(samples.logprobs)).double()
    weights = log_weights.exp()
    yield f"{log_weights.abs().mean():.4f}"
    yield f"{(weights - 1 - log_weights).mean():.1e}"
    for each in (weights.flatten(), log_weights.sum(1).exp()):
        yield f"{effective_share(float(each.sum()), float(each.square().sum()), len(each)):.1%}"
    yield f"{(weights > IMPORTANCE_CAP).double().mean():.2%}"
    sums = torch.stack([log_weights.sum(1), torch.full_like(log_weights[:, 0], log_weights.shape[1])])
    yield f"{(~within_bounds(sums, SEQUENCE_MASK)).double().mean():.1%}"
    for cap in (None, IMPORTANCE_CAP):
        yield f"{gradient_error(own, samples.logprobs, cap):.2%}"


def gradient_error(own: Tensor, engine: Tensor, cap: float | None) -> float:
    """Norm of the expected gradient's error over its norm; both log-probs are [..., vocabulary].

    With the trainer's p and the engine's q, tokens drawn from q, and advantages A weighted by w = min(p / q, cap), the
    expected gradient with respect to the logits is q w A - p sum(q w A); with tokens drawn from p it is p A.
    """
    p, q = own.double().exp(), engine.double().exp()
    rewards = torch.randint(0, 2, p.shape, generator=torch.Generator().manual_seed(2)).double() * 2 - 1
    advantages = rewards - (p * rewards).sum(-1, keepdim=True)
    weighted = q * advantages if cap is None else q * (p / q).clamp(max=cap) * advantages
    exact = p * advantages
    return float((weighted - p * weighted.sum(-1, keepdim=True) - exact).norm() / exact.norm())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark.py fp8_drift", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024], help="multiples of 128")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 8], help="layers")
    parser.add_argument("--responses", type=int, default=32)
    parser.add_argument("--response-tokens", type=int, default=64)
    options = parser.parse_args(argv)
    if any(width % 128 for width in options.widths):
        raise InputError(f"--widths {options.widths}: give multiples of 128, the size of FP8's blocks")
    quiet_libraries()
    run(options)


if __name__ == "__main__":
    run_command(main)
