"""Grades answers as training does: ordinary ones per second, and how long hostile ones are waited for.

python tools/benchmark.py answers --responses 4000 --workers 1

Ordinary responses are solutions that end in numbers, fractions, lists, intervals, roots and expressions; most differ
from each other, as nothing is compared twice. They are counted against the wall time of caller and workers, without the
workers' start. Hostile answers keep an algebra system busy or exceed its bounds, with numbers drawn anew for each; each
is given alone. Where one had its worker ended, the next one waits for a new worker before its time counts.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence

from dapo_mega.rewards import AnswerVerifier

_ENDINGS = (
    "Therefore the answer is $\\boxed{{{}}}$.",
    "**Final Answer**\n\n\\[\n\\boxed{{{}}}\n\\]",
    "Answer: ${}$",
    "The final answer is ${}$. I hope it is correct.",
    "Putting both together, we get $x = {}$.",
)
_HOSTILE = (
    r"\binom{10000000NN}{5000000NN}",
    r"\frac{(x+1)^{NN}(x+2)^{80}-1}{x^{70}+\sin(x)^{60}}",
    r"\int_0^{NN} \sin(x^x)\cos(x^{x^2})dx",
    r"\sum_{n=1}^{999999NN} \frac{1}{n^{n}}",
    r"\prod_{n=1}^{999999NN} (1+\frac{1}{n^2})",
    r"\sqrt{\sqrt{\sqrt{x+1}+\sqrt{x+2}}+\sqrt{\sqrt{x+3}+\sqrt{x+NN}}}",
    r"\lim_{x \to 0} \frac{\sin(\tan x)-\tan(\sin x)}{x^7} + NN",
    r"((((x+NN)^9+1)^9+1)^9+1)^9",
    r"NN^{9^{9^{9^9}}}",
    r"\frac{" * 300 + "NN",
    "(" * 140 + "NN" + ")" * 140,
    "NN" * 500_000,
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark answers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=4000)
    parser.add_argument("--hostile", type=int, default=24, help="hostile answers (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--extraction", default="auto")
    parser.add_argument("--time-limit-s", type=float, default=2.0, help="of one comparison")
    parser.add_argument("--seed", type=int, default=0)
    print("\n".join(run(parser.parse_args(argv))))


def run(options: argparse.Namespace) -> list[str]:
    """The report's lines, a Markdown table."""
    draw = random.Random(options.seed)
    items = [_ordinary(draw) for _ in range(options.responses)]
    with AnswerVerifier(options.workers, options.time_limit_s, options.extraction) as verifier:
        verifier.verify([("Answer: x+x", "2x")])
        begin = time.perf_counter()
        verdicts = verifier.verify(items)
        seconds = time.perf_counter() - begin
        waits = [_wait(verifier, hostile, str(draw.randint(10, 99))) for hostile in _hostile(options.hostile)]
    right = sum(verdict.correct for verdict in verdicts)
    return [
        "| what | figure |",
        "|---|---|",
        f"| ordinary answers per second, {options.workers} workers | {len(items) / seconds:.0f} |",
        f"| of them right | {right / len(items):.3f} |",
        f"| {len(waits)} hostile answers, median wait | {statistics.median(waits):.2f} s |",
        f"| 99th percentile | {sorted(waits)[math.ceil(0.99 * len(waits)) - 1]:.2f} s |",
        f"| longest wait | {max(waits):.2f} s |",
        f"| limit of one comparison | {options.time_limit_s:.2f} s |",
    ]


def _hostile(count: int) -> list[str]:
    return [_HOSTILE[index % len(_HOSTILE)] for index in range(count)]


def _wait(verifier: AnswerVerifier, hostile: str, number: str) -> float:
    # Takes a worker, a new one if the last answer had its worker ended.
    verifier.verify([(f"Answer: \\sin(x)^2+\\cos(x)^2-{number}", "1")])
    begin = time.perf_counter()
    verifier.verify([(f"Answer: {hostile.replace('NN', number)}", "x+1")])
    return time.perf_counter() - begin


def _ordinary(draw: random.Random) -> tuple[str, str]:
    """A response and its ground truth."""
    a, b, c = draw.randint(2, 97), draw.randint(2, 97), draw.randint(2, 9)
    kinds = (
        (str(a * b), f"{a * b:,}"),
        (f"{a * b}", f"{a * b}\\text{{ cm}}"),
        (f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}"),
        (f"{a}, {b}", f"{b}, {a}" if a != b else f"{a}, {b}"),
        (f"({a}, \\infty)", f"x > {a}"),
        (f"{a}\\sqrt{{{c}}}", f"{a} \\sqrt {c}"),
        (f"\\text{{({'ABCDE'[c % 5]})}}", "ABCDE"[c % 5]),
        (f"{a}x + {b}", f"{b} + {a}x"),
    )
    truth, other = draw.choice(kinds)
    steps = " ".join(f"Step {step}: ${draw.randint(1, 9)} + {step}$ is next." for step in range(40))
    answer = other if draw.random() < 0.5 else truth.replace(str(a), str(a + 1), 1)
    return f"{steps}\n\n{draw.choice(_ENDINGS).format(answer)}", truth
