"""How long the page of samples takes to open, and each of its filters, in a headless browser.

python tools/benchmark.py page

Samples are made up, in steps of 200 responses. Opening ends when the list and the first response can be read, a filter
when the browser has drawn. CPU is the page's thread, which other programs on the machine hardly disturb.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from headless_browser import MISSING, Browser, find_browser
from made_samples import make_run

from dapo_mega.cli import run_command
from dapo_mega.commands.show_samples import main as show_samples
from dapo_mega.errors import InputError

_FILTERS = {
    "correct": {"correct": "true"},
    "truncated": {"finish": "length"},
    "kept": {"outcome": "kept"},
    "length": {"low": "50", "high": "150"},
    "score part": {"part": "part format", "least": "0.5"},
    "text, the first time": {"search": "remainder"},
    "text": {"search": "equations"},
    "expression": {"search": "/wait.*?zero/"},
    "order": {"order": "-gap"},
}
_CLEAR = "document.getElementById('clear').click(); new Promise((done) => setTimeout(done, 400))"
# Sets the filters and waits until the browser has drawn; milliseconds.
_SET = """(async (values) => {
    const started = performance.now();
    for (const [name, value] of Object.entries(values)) document.getElementById(name).value = value;
    document.getElementById(Object.keys(values).at(-1)).dispatchEvent(new Event('%s'));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
    return performance.now() - started;
})"""
_Times = tuple[float, float]
"""Milliseconds by the clock, and of the processor in the page's thread."""


def run(options: argparse.Namespace) -> list[str]:
    """Measure and return the report's lines."""
    program = find_browser()
    if program is None:
        raise InputError(MISSING)
    with tempfile.TemporaryDirectory() as name:
        folder = make_run(
            Path(name) / "run", num_steps=-(-options.responses // 200), num_groups=25, mean_tokens=options.mean
        )
        started = time.process_time()
        show_samples([str(folder)])
        made = time.process_time() - started
        page = folder / "samples.html"
        opened = [_open(program, page) for _ in range(options.rounds)]
        filters = _filters(program, page, options.rounds)
    return [
        f"the page was made in {made:.1f} CPU s; medians of {options.rounds} rounds",
        "| action | ms | CPU ms |",
        "|---|---|---|",
        *(f"| {name} | {wall:.0f} | {cpu:.0f} |" for name, (wall, cpu) in {_OPEN: _median(opened), **filters}.items()),
    ]


_OPEN = "open, until it can be read"


def _median(times: Sequence[_Times]) -> _Times:
    return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)


def _open(program: str, page: Path) -> _Times:
    with Browser(program) as browser:
        browser.call("Performance.enable", timeDomain="threadTicks")
        browser.open(page)
        return float(browser.evaluate("document.body.dataset.ready")), _processor_ms(browser)


def _processor_ms(browser: Browser) -> float:
    metrics = browser.call("Performance.getMetrics")["metrics"]
    return 1000 * next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


def _filters(program: str, page: Path, num_rounds: int) -> dict[str, _Times]:
    with Browser(program) as browser:
        browser.call("Performance.enable", timeDomain="threadTicks")
        browser.open(page)
        browser.evaluate("document.querySelector('#steps .step').click()")
        times: dict[str, list[_Times]] = {name: [] for name in _FILTERS}
        for _ in range(num_rounds):
            for name, values in _FILTERS.items():
                browser.evaluate(_CLEAR)
                before = _processor_ms(browser)
                event = "input" if set(values) & {"low", "least", "search"} else "change"
                wall = float(browser.evaluate(f"{_SET % event}({json.dumps(values)})"))
                times[name].append((wall, _processor_ms(browser) - before))
    return {name: rounds[0] if "first" in name else _median(rounds) for name, rounds in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark.py page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=10_000, help="in all (default: %(default)s)")
    parser.add_argument("--mean", type=int, default=120, help="mean response tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each action (default: %(default)s)")
    print("\n".join(run(parser.parse_args(argv))))


if __name__ == "__main__":
    run_command(main)
