"""A timeline as JSON that https://ui.perfetto.dev and chrome://tracing open.

The format is Chrome's "Trace Event Format": complete events (ph X) with `ts` and `dur` in microseconds, counters (ph
C), and metadata (ph M) that names processes and threads.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dapo_mega.atomic_files import replace_file
from dapo_mega.metrics.timeline.excerpt import Excerpt
from dapo_mega.metrics.timeline.records import Load, Span

_US = 1_000_000
_TRAINER, _ENGINES = 1, 2

Event = dict[str, Any]


def trace_events(excerpt: Excerpt) -> dict[str, Any]:
    """The JSON object. Its processes are the trainer, with a thread for each lane, and the engines, with one for each.

    Times with open requests are events named `busy`; their number is a counter as well.
    """
    events = [*_named_process(_TRAINER, "trainer"), *_named_process(_ENGINES, "engines")]
    for thread, (lane, spans) in enumerate({"steps": excerpt.steps, **excerpt.spans}.items(), start=1):
        events.append(_named_thread(_TRAINER, thread, lane))
        events += [_complete(span.name, span, _TRAINER, thread) for span in spans]
    scoring = len(excerpt.spans) + 2
    events.append(_named_thread(_TRAINER, scoring, "scoring"))
    events += _load_events("scoring", "responses", excerpt.scoring, _TRAINER, scoring)
    for thread, (name, loads) in enumerate(excerpt.engines.items(), start=1):
        events.append(_named_thread(_ENGINES, thread, name))
        events += _load_events(name, "open requests", loads, _ENGINES, thread)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(excerpt: Excerpt, output: Path) -> None:
    """Write the JSON to `output`, compressed if that ends in `.gz`; the file is replaced as a whole or not touched."""
    content = json.dumps(trace_events(excerpt), separators=(",", ":")).encode()
    replace_file(output, gzip.compress(content, mtime=0) if output.suffix == ".gz" else content)


def _named_process(process: int, name: str) -> list[Event]:
    return [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}},
    ]


def _named_thread(process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _complete(name: str, part: Span | Load, process: int, thread: int, **arguments: float) -> Event:
    start, end = round(part.start * _US), round(part.end * _US)
    event = {"ph": "X", "name": name, "ts": start, "dur": end - start, "pid": process, "tid": thread}
    return {**event, "args": arguments} if arguments else event


def _load_events(name: str, unit: str, loads: Sequence[Load], process: int, thread: int) -> Iterator[Event]:
    for load in loads:
        if load.mean:
            yield _complete("busy", load, process, thread, mean=load.mean)
        counter = {"ph": "C", "name": f"{name}: {unit}", "pid": process, "tid": thread}
        yield {**counter, "ts": round(load.start * _US), "args": {unit: load.mean}}
