"""Time and peak memory of the fused log-probs against the output layer followed by unfused ones.

    python tools/benchmark.py logprobs [--tokens N] [--hidden H] [--vocabulary V] [--dtype bf16] [--no-entropy]

One forward and backward pass each, on the GPU if there is one. Peak memory is what the passes allocate beyond the
hidden states, the weight and what lay there before.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.megatron.fused_logprobs import output_logprobs
from dapo_mega.megatron.logprobs import vocab_parallel_logprobs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIB = 1 << 20


def run(
    tokens: int = 4096,
    hidden: int = 512,
    vocabulary: int = 32768,
    dtype: str = "fp32",
    with_entropy: bool = True,
    repeats: int = 1,
    chunk_positions: int | None = None,
) -> list[str]:
    """One line each for unfused and fused, and one with their ratios (fused / unfused)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).to(device, DTYPES[dtype]).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=generator) * hidden**-0.5).to(device, DTYPES[dtype])
    weight.requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    rows = torch.arange(tokens, device=device)
    group = _single_process_group()

    def unfused() -> tuple[Tensor, ...]:
        return vocab_parallel_logprobs(
            states @ weight.t(),
            rows,
            targets,
            temperature=1.0,
            vocab_size=vocabulary,
            group=group,
            with_entropy=with_entropy,
        )

    def fused() -> tuple[Tensor, ...]:
        return output_logprobs(
            states,
            weight,
            targets,
            temperature=1.0,
            vocab_size=vocabulary,
            group=group,
            with_entropy=with_entropy,
            chunk_positions=chunk_positions,
        )

    def step(forward: Callable[[], tuple[Tensor, ...]]) -> None:
        logprobs, entropy = forward()
        torch.autograd.grad(logprobs.sum() + entropy.sum(), [states, weight])

    results = {}
    for name, forward in {"unfused": unfused, "fused": fused}.items():
        function = functools.partial(step, forward)
        results[name] = (seconds(function, repeats), peak_bytes(function))
    header = f"{tokens} tokens, hidden {hidden}, vocabulary {vocabulary}, {dtype}, {device.type}"
    lines = [
        f"{name:8} {1e3 * took:9.1f} ms {peak / MIB:9.1f} MiB   {header}" for name, (took, peak) in results.items()
    ]
    (time_before, peak_before), (time_after, peak_after) = results["unfused"], results["fused"]
    return [*lines, f"ratio    {time_after / time_before:9.2f}    {peak_after / peak_before:9.3f}"]


def seconds(function: Callable[[], None], repeats: int) -> float:
    """Best wall-clock time of `repeats` calls, after one that is not counted."""
    function()
    times = []
    for _ in range(repeats):
        _synchronise()
        start = time.perf_counter()
        function()
        _synchronise()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_bytes(function: Callable[[], None]) -> int:
    """The most bytes of tensors alive at once during the call, beyond those alive before it."""
    if torch.cuda.is_available():
        _synchronise()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        _synchronise()
        return torch.cuda.max_memory_allocated() - before
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        function()
    alive = peak = 0
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _single_process_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    return group


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--no-entropy", action="store_true")
    parser.add_argument("--repeats", type=int, default=1, help="timed passes; the best counts")
    parser.add_argument("--chunk-positions", type=int, help="positions per chunk instead of the default")
    options = parser.parse_args(arguments)
    lines = run(
        options.tokens,
        options.hidden,
        options.vocabulary,
        options.dtype,
        not options.no_entropy,
        options.repeats,
        options.chunk_positions,
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
