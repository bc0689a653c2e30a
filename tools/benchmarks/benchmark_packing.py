"""Packs a step of long-tailed responses for 8 to 512 ranks and reports how full and how even the plans are.

python tools/benchmark.py packing --budget 32768 --hidden-size 5120

Lengths are log-normal, drawn again where over the longest and scaled to the mean. `efficiency` is real tokens over
micro-batches x tokens of the longest one: nothing is padded, shorter ones wait. `budget fill` is real tokens over
micro-batches x budget; its bound is that of as few micro-batches as the tokens need, equally many on every rank.
`imbalance` is the most loaded rank's estimated cost / the mean, minus 1. `seconds` are CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dapo_mega.batching.plan import (
    PackingLayout,
    Plan,
    padded_lengths,
    plan_micro_batches,
    sample_costs,
)

_RANKS = (8, 16, 32, 64, 128, 256, 512)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark packing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(_RANKS))
    parser.add_argument("--budget", type=int, default=32768, help="tokens per micro-batch")
    parser.add_argument("--mean", type=float, default=4000.0, help="of the lengths")
    parser.add_argument("--longest", type=int, default=20000, help="length limit in tokens")
    parser.add_argument("--sigma", type=float, default=0.9, help="of the logarithms of the lengths")
    parser.add_argument("--hidden-size", type=int, default=5120, help="attention costs L / (12 x hidden size) more")
    parser.add_argument("--count-multiple", type=int, default=1, help="of micro-batches per rank")
    parser.add_argument("--segment-multiple", type=int, default=1, help="lengths are rounded up to it")
    parser.add_argument("--seed", type=int, default=0)
    print("\n".join(run(parser.parse_args(argv))))


def run(options: argparse.Namespace) -> list[str]:
    """The report's lines, a Markdown table."""
    lengths = draw_lengths(options)
    lines = [
        f"{len(lengths)} responses, {lengths.mean():.0f} tokens on average, {lengths.max()} at most; "
        f"{options.budget} tokens per micro-batch",
        f"padded to the longest of each micro-batch, in order of arrival: {_padded_share(lengths, options.budget):.1%} "
        f"real tokens",
        "",
        "| ranks | micro-batches per rank | fewest | efficiency | budget fill | its bound | imbalance | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_row(lengths, num_ranks, options) for num_ranks in options.ranks]


def draw_lengths(options: argparse.Namespace) -> npt.NDArray[np.int64]:
    """[responses] lengths in tokens, scaled to the mean."""
    rng = np.random.default_rng(options.seed)
    drawn = np.empty(0)
    while len(drawn) < options.responses:
        more = rng.lognormal(np.log(options.mean) - options.sigma**2 / 2, options.sigma, options.responses)
        drawn = np.append(drawn, more[more <= options.longest])
    drawn = drawn[: options.responses]
    return np.clip(drawn * (options.mean / drawn.mean()), 1, options.longest).astype(np.int64)


def _row(lengths: npt.NDArray[np.int64], num_ranks: int, options: argparse.Namespace) -> str:
    attention_cost = 1 / (12 * options.hidden_size)
    started = time.process_time()
    layout = PackingLayout(
        num_ranks,
        attention_cost=attention_cost,
        count_multiple=options.count_multiple,
        segment_multiple=options.segment_multiple,
    )
    plan = plan_micro_batches(lengths, layout, options.budget)
    seconds = time.process_time() - started
    sizes = padded_lengths(lengths, options.segment_multiple)
    num_tokens, count = int(lengths.sum()), len(plan[0])
    at_least = max(1, -(-int(sizes.sum()) // (options.budget * num_ranks)))
    fewest = -(-at_least // options.count_multiple) * options.count_multiple
    longest = max(int(sizes[indices].sum()) for rank in plan for indices in rank)
    costs = _rank_costs(plan, sample_costs(sizes, attention_cost))
    return (
        f"| {num_ranks} | {count} | {fewest} | {num_tokens / (num_ranks * count * longest):.2%} "
        f"| {num_tokens / (num_ranks * count * options.budget):.2%} "
        f"| {num_tokens / (num_ranks * fewest * options.budget):.2%} "
        f"| {costs.max() / costs.mean() - 1:.2%} | {seconds:.2f} |"
    )


def _rank_costs(plan: Plan, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.array([sum(float(costs[indices].sum()) for indices in rank) for rank in plan])


def _padded_share(lengths: npt.NDArray[np.int64], budget: int) -> float:
    """Real tokens over all tokens when rows of a micro-batch are padded to its longest and fill up the budget."""
    padded = rows = longest = 0
    for length in lengths.tolist():
        if (rows + 1) * max(longest, length) > budget:
            padded += rows * longest
            rows = longest = 0
        rows, longest = rows + 1, max(longest, length)
    return float(lengths.sum()) / (padded + rows * longest)


if __name__ == "__main__":
    main()
