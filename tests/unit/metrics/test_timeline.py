"""The timeline of a run: what is recorded, that it survives restarts, and what is made of it."""

import gzip
import json
import logging

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.image import imread

from dapo_mega.commands import plot
from dapo_mega.errors import InputError
from dapo_mega.metrics.timeline import Load, LoadHistory, Span, StepTimeline
from dapo_mega.metrics.timeline.excerpt import load_excerpt
from dapo_mega.metrics.timeline.file import FILE_NAME, TimelineWriter, encode_timeline, read_timeline
from dapo_mega.metrics.timeline.picture import timeline_figure
from dapo_mega.metrics.timeline.trace_events import trace_events

UNIX_S = 1_764_000_000.0
"""When the clock of the made-up runs says 0."""


def level_at(segments, time):
    return next(segment.mean for segment in segments if segment.start <= time < segment.end)


@pytest.mark.parametrize("most", [3, 16])
def test_a_load_has_few_segments_without_gaps_and_the_exact_mean(most):
    random = np.random.default_rng(most)
    history, now, opened, is_exact = LoadHistory(0.0), 0.0, 0.0, []
    for _ in range(20):
        began, opened = now, 0.0
        for _ in range(int(random.integers(1, 400))):
            seconds = float(random.exponential())
            opened, now = opened + seconds * history.num_open, now + seconds
            history.change(now, -1 if history.num_open > 5 else 1)
        segments = history.pop(now, most)
        assert len(segments) <= most
        assert [segment.start for segment in segments] == [began, *(segment.end for segment in segments[:-1])]
        assert segments[-1].end == now
        assert sum((s.end - s.start) * s.mean for s in segments) == pytest.approx(opened)
        is_exact += [segment.mean == round(segment.mean) for segment in segments]
    assert not all(is_exact), "the case has too few changes"


def test_long_phases_of_a_load_keep_their_edges():
    history = LoadHistory(0.0)
    for i in range(500):  # Two calls that take turns, in 1 s.
        history.change(i / 1000, 1 if i % 2 == 0 else -1)
    history.change(10.0, 3)
    history.change(70.0, -3)
    segments = history.pop(100.0)
    assert [level_at(segments, time) for time in (10.01, 69.99, 70.01, 99.9)] == [3, 3, 0, 0]
    assert level_at(segments, 9.99) < 0.5


def timeline(step, num_engines=2, num_requests=8.0):
    """A step of 10 s: rollout, update and weights, then the checkpoint, which the next step records."""
    t = 10.0 * step
    trainer = [Span("rollout", t, t + 6), Span("update", t + 6, t + 9), Span("weight_sync", t + 9, t + 9.5)]
    checkpoint = [Span("checkpoint", t - 0.5, t)] if step > 1 else []
    return StepTimeline(
        step,
        t - 0.5,
        t + 9.5,
        {"trainer": [*checkpoint, *trainer], "weights": [Span(f"version {step}", t + 9, t + 9.5)]},
        [Load(t - 0.5, t + 5, 0.0), Load(t + 5, t + 6, 4.0), Load(t + 6, t + 9.5, 0.0)],
        {
            f"http://host:{i}": [Load(t - 0.5, t, 0.0), Load(t, t + 5, num_requests), Load(t + 5, t + 9.5, 0.0)]
            for i in range(num_engines)
        },
    )


def write_run(folder, steps, first_step=0, is_on=True, **shape):
    folder.mkdir(exist_ok=True)
    writer = TimelineWriter(folder, first_step, is_on=is_on, clock=lambda: 50.0, unix_clock=lambda: UNIX_S + 50.0)
    for step in steps:
        writer.write(timeline(step, **shape))
    return folder


def test_records_come_back_with_unix_times(tmp_path):
    (found,) = read_timeline(write_run(tmp_path / "run", [2]) / FILE_NAME)
    expected = timeline(2)
    assert found.step == 2
    assert (found.start - UNIX_S, found.end - UNIX_S) == pytest.approx((expected.start, expected.end))
    assert {lane: [span.name for span in spans] for lane, spans in found.spans.items()} == {
        "trainer": ["checkpoint", "rollout", "update", "weight_sync"],
        "weights": ["version 2"],
    }
    for got, wanted in zip(found.spans["trainer"], expected.spans["trainer"], strict=True):
        assert (got.start - UNIX_S, got.end - UNIX_S) == pytest.approx((wanted.start, wanted.end), abs=1e-6)
    for name, wanted in {"": expected.scoring, **expected.engines}.items():
        got = found.engines[name] if name else found.scoring
        assert [load.mean for load in got] == [load.mean for load in wanted]
        assert [load.end - UNIX_S for load in got] == pytest.approx([load.end for load in wanted], abs=1e-6)


@pytest.mark.parametrize("is_on", [True, False])
def test_a_resumed_run_has_the_spans_of_no_step_twice(tmp_path, is_on):
    run = write_run(tmp_path / "run", [1, 2, 3, 4])
    with (run / FILE_NAME).open("a") as file:
        file.write(encode_timeline(timeline(5))[:-20])  # Killed.
    write_run(run, [3, 4], first_step=3, is_on=is_on)
    assert [record.step for record in read_timeline(run / FILE_NAME)] == ([1, 2, 3, 4] if is_on else [1, 2])
    write_run(run, [], first_step=0)
    assert (run / FILE_NAME).read_bytes() == b""


def test_a_timeline_that_cannot_be_written_ends_with_one_warning(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    (tmp_path / "run").mkdir()
    writer = TimelineWriter(tmp_path / "run", 1)
    (tmp_path / "run" / FILE_NAME).symlink_to("/dev/full")
    for step in (1, 2):
        writer.write(timeline(step))
    (warning,) = caplog.messages
    assert "No space left" in warning


def test_the_trace_is_of_the_trace_event_format(tmp_path):
    excerpt = load_excerpt(write_run(tmp_path / "run", [1, 2, 3]), 2, 2)
    trace = json.loads(json.dumps(trace_events(excerpt), allow_nan=False))
    names, slices = {}, {}
    for event in trace["traceEvents"]:
        assert event["ph"] in {"M", "X", "C"}
        assert {type(event[key]) for key in ("pid", "tid")} == {int}
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = event["args"].get("name")
            continue
        assert type(event["ts"]) is int
        assert event["name"]
        assert event["ts"] > UNIX_S * 1e6
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            slices.setdefault((event["pid"], event["tid"]), []).append(event)
        else:
            assert all(isinstance(value, float) for value in event["args"].values())
    assert {names["process_name", process, 0] for process in (1, 2)} == {"trainer", "engines"}
    lanes = {}
    for place, events in slices.items():
        lanes[names["thread_name", *place]] = [(e["name"], e["ts"] - UNIX_S * 1e6, e["dur"]) for e in events]
        ends = [event["ts"] + event["dur"] for event in events]
        assert all(event["ts"] >= end for event, end in zip(events[1:], ends, strict=False)), "slices may not overlap"
    assert lanes == {
        "steps": [("step 2", 19.5e6, 10e6)],
        "trainer": [
            ("checkpoint", 19.5e6, 0.5e6),
            ("rollout", 20e6, 6e6),
            ("update", 26e6, 3e6),
            ("weight_sync", 29e6, 0.5e6),
        ],
        "weights": [("version 2", 29e6, 0.5e6)],
        "scoring": [("busy", 25e6, 1e6)],
        "http://host:0": [("busy", 20e6, 5e6)],
        "http://host:1": [("busy", 20e6, 5e6)],
    }
    counted = [
        e["args"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == "http://host:1: open requests"
    ]
    assert counted == [{"open requests": 0.0}, {"open requests": 8.0}, {"open requests": 0.0}]


def bars_of(axes):
    """The lanes of the picture: their names with the bars in them, as (left, right) in seconds, and their colours."""
    lanes = {label.get_text(): [] for label in axes.get_yticklabels()}
    for collection in axes.collections:
        colors = collection.get_facecolors()
        for i, path in enumerate(collection.get_paths()):
            (left, bottom), (right, top) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            lane = list(lanes)[round((bottom + top) / 2)]
            lanes[lane].append((round(left, 3), round(right, 3), tuple(colors[i % len(colors)])))
    return lanes


def test_the_picture_has_a_lane_for_everything(tmp_path):
    run = write_run(tmp_path / "run", [1, 2, 3])
    axes = timeline_figure(load_excerpt(run, 2, 3), "Run").axes[0]
    lanes = bars_of(axes)
    assert list(lanes) == ["trainer", "scoring", "weights", "http://host:0", "http://host:1"]
    stages = {text.get_text(): i for i, text in enumerate(axes.get_legend().get_texts())}
    assert list(stages) == ["rollout", "update", "weight_sync", "checkpoint"]
    rollouts = [bar[:2] for bar in lanes["trainer"] if bar[2] == to_rgba("C0")]
    assert rollouts == [(0.5, 6.5), (10.5, 16.5)]
    assert [bar[:2] for bar in lanes["http://host:1"]] == [(0.5, 5.5), (10.5, 15.5)]
    assert [bar[:2] for bar in lanes["scoring"]] == [(5.5, 6.5), (15.5, 16.5)]
    assert axes.get_xlim() == (0, 20)


def test_many_engines_are_drawn_as_one_lane_with_their_sum(tmp_path):
    run = write_run(tmp_path / "run", [1], num_engines=40)
    figure = timeline_figure(load_excerpt(run), "Run")
    lanes = bars_of(figure.axes[0])
    assert list(lanes) == ["trainer", "scoring", "weights", "all 40 engines"]
    assert [bar[:2] for bar in lanes["all 40 engines"]] == [(0.5, 5.5)]
    open_requests = next(axes for axes in figure.axes if axes.get_ylabel() == "open requests")
    assert open_requests.get_ylim()[1] == 320


def test_the_command_draws_the_last_steps_and_writes_traces(tmp_path, capsys):
    run = write_run(tmp_path / "run", [1, 2, 3, 4, 5, 6, 6])
    plot.main([str(run), "--timeline"])
    assert capsys.readouterr().out == f"timeline: {run / 'timeline.png'}\n"
    assert imread(run / "timeline.png").std() > 0
    steps = {}
    for name, arguments in {"a.json": ["--steps", ":2"], "b.json.gz": ["--step", "4"], "c.json": []}.items():
        plot.main([str(run), "--timeline", *arguments, "--out", str(tmp_path / name)])
        content = (tmp_path / name).read_bytes()
        events = json.loads(gzip.decompress(content) if name.endswith(".gz") else content)["traceEvents"]
        steps[name] = [event["name"] for event in events if "step " in event["name"]]
    last = ["step 4", "step 5", "step 6", "after step 6"]
    assert steps == {"a.json": ["step 1", "step 2"], "b.json.gz": ["step 4"], "c.json": last}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--timeline", "--step", "9"], r"steps 9 to 9 are not in .*, which holds 1 to 3"),
        (["run", "--timeline", "--steps", "3:2"], "steps 3 to 2 are not in"),
        (["run", "--timeline", "--steps", "2-3"], "--steps 2-3 is not of the form A:B"),
        (["run", "--timeline", "--steps", "1:2", "--step", "1"], "exclude each other"),
        (["run", "--timeline", "--compare", "run"], "one run"),
        (["run", "--timeline", "--output", "x.pdf"], r"output x\.pdf must end in \.png, \.json or \.json\.gz"),
        (["run", "--timeline", "--output", "missing/x.json"], "the folder of the output missing/x.json does not exist"),
        (["run", "--step", "1"], "add --timeline"),
        (["missing", "--timeline"], "run folder missing does not exist"),
        (["old", "--timeline"], "run folder old holds no timeline.jsonl; train with tracking.timeline=true"),
        (["begun", "--timeline"], "holds no complete step yet"),
        (["damaged", "--timeline"], r"timeline\.jsonl, line 1: not a record of a timeline"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", [1, 2, 3])
    for name, content in {"begun": b'{"step": 1, "sta', "damaged": b"{}\n" + (run / FILE_NAME).read_bytes()}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE_NAME).write_bytes(content)
    (tmp_path / "old").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message) as caught:
        plot.main(arguments)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
