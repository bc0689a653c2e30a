"""What TensorBoard shows besides curves, read back from the event files."""

import itertools
import re
from random import Random

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from dapo_mega.metrics import Example, Histogram, MetricsWriter, RunDescription
from dapo_mega.metrics.catalogue import describe
from dapo_mega.metrics.figures import FIGURES
from dapo_mega.metrics.run_text import code_block, examples_as_markdown, shortened, without_credentials
from dapo_mega.metrics.tensorboard import _WATCHED, drop_events_from

HOSTILE = (
    "</code></pre><script>alert(1)</script>\n# heading\n```\n\n\n<img src=x onerror=alert(1)>\u2028<script>x</script>"
)


def description(learning_rate=0.5):
    return RunDescription(
        name="mine",
        config_text=f"learning_rate: {learning_rate}\n",
        hyper_parameters={"learning_rate": learning_rate, "dynamic": True, "preset": "dapo"},
        versions={"torch": "2.13.0"},
        prompts="first prompt\n  | 1+1?",
    )


def record(folder, steps, start_step=0, learning_rate=0.5):
    with MetricsWriter(folder, start_step, description(learning_rate)) as writer:
        for step in steps:
            examples = [Example("1+1=", f"answer of start {start_step}", "2", False)] if step % 2 else []
            histograms = {"rollout/reward": Histogram(-1.0, 1.0, (start_step, step))}
            writer.write(step, {"policy/entropy": float(step)}, histograms, examples)


def read(folder):
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0, "histograms": 0})
    events.Reload()
    return events


def texts(folder, tag):
    return {e.step: e.tensor_proto.string_val[0].decode() for e in read(folder).Tensors(f"{tag}/text_summary")}


def plugin_data(folder, tag):
    (content,) = (read(folder).PluginTagToContent("hparams")[tag],)
    return HParamsPluginData.FromString(content)


def test_a_run_is_described_by_texts(tmp_path):
    record(tmp_path, [0])
    assert texts(tmp_path, "run/configuration") == {0: "    learning_rate: 0.5"}
    assert "| torch | 2.13.0 |" in texts(tmp_path, "run/versions")[0]
    assert texts(tmp_path, "run/prompts") == {0: "    first prompt\n      | 1+1?"}
    assert describe("policy/entropy").meaning in texts(tmp_path, "run/metrics")[0]


def test_the_layout_has_the_figures_that_are_plotted(tmp_path):
    record(tmp_path, [0])
    (event,) = read(tmp_path).Tensors("custom_scalars__config__")
    (category,) = Layout.FromString(event.tensor_proto.string_val[0]).category
    assert [chart.title for chart in category.chart] == [figure.title for figure in FIGURES]
    recorded = {"rollout/reward_mean", "evaluation/reward_mean", "reward/part_a.b", "evaluation/part_a.b", "batch/x"}
    drawn = {
        chart.title: {name for name in recorded if any(re.match(tag, name) for tag in chart.multiline.tag)}
        for chart in category.chart
    }
    assert drawn.pop("Reward") == {"rollout/reward_mean", "evaluation/reward_mean"}
    assert drawn.pop("Reward: <name>") == {"reward/part_a.b", "evaluation/part_a.b"}
    assert not any(drawn.values())


def test_what_to_watch_comes_first(tmp_path):
    record(tmp_path, [0, 1])
    record(tmp_path, [1], start_step=1)
    events = read(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["_watch/policy/entropy", "policy/entropy"]
    assert [(e.step, e.value) for e in events.Scalars("_watch/policy/entropy")] == [(0, 0.0), (1, 1.0)]
    assert [name for name in _WATCHED if describe(name) is None] == []


def test_the_hyper_parameters_name_what_to_compare_by(tmp_path):
    record(tmp_path, [0])
    values = plugin_data(tmp_path, SESSION_START_INFO_TAG).session_start_info.hparams
    assert values["learning_rate"].number_value == 0.5
    assert values["dynamic"].bool_value is True
    assert values["preset"].string_value == "dapo"
    metrics = plugin_data(tmp_path, EXPERIMENT_TAG).experiment.metric_infos
    assert "policy/entropy" in {metric.name.tag for metric in metrics}
    assert all(describe(metric.name.tag).text() == metric.description for metric in metrics)


def test_a_histogram_is_read_back_as_it_was_counted(tmp_path):
    counted = Histogram.of_values([0.0, 1.0, 1.0, 2.0], num_bins=4)
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {}, {"rollout/reward": counted})
    (event,) = read(tmp_path).Histograms("rollout/reward")
    value = event.histogram_value
    assert (value.min, value.max, value.num) == (0.0, 2.0, 4)
    assert dict(zip(value.bucket_limit, value.bucket, strict=True)) == {0.5: 1, 1.0: 0, 1.5: 2, 2.0: 1}


def test_a_resumed_run_has_each_step_and_each_session_once(tmp_path):
    record(tmp_path, range(6))
    record(tmp_path, range(3, 5), start_step=3, learning_rate=0.25)
    histograms = [(e.step, e.histogram_value.bucket[0]) for e in read(tmp_path).Histograms("rollout/reward")]
    assert histograms == [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3)]
    samples = texts(tmp_path, "samples/evaluation")
    assert [(step, "start 3" in text) for step, text in samples.items()] == [(1, False), (3, True)]
    events = read(tmp_path).Tensors("samples/evaluation/text_summary")
    assert [event.step for event in events] == [1, 3]
    assert texts(tmp_path, "run/configuration") == {0: "    learning_rate: 0.5", 3: "    learning_rate: 0.25"}
    for tag in ("custom_scalars__config__", EXPERIMENT_TAG, SESSION_START_INFO_TAG):
        assert len(read(tmp_path).Tensors(tag)) == 1


def test_a_torn_event_is_cut_off_at_a_resume(tmp_path):
    record(tmp_path, range(4))
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes()[:-5])
    record(tmp_path, [3, 4], start_step=3)
    assert [event.step for event in read(tmp_path).Scalars("policy/entropy")] == [0, 1, 2, 3, 4]


def test_a_wrong_byte_costs_what_it_hits_and_no_start(tmp_path, caplog):
    record(tmp_path, range(4))
    (events,) = (tmp_path / "tensorboard").iterdir()
    whole = events.read_bytes()
    random = Random(0)
    for place in [3, 9, 14, *(random.randrange(len(whole)) for _ in range(12))]:
        caplog.clear()
        content = bytearray(whole)
        content[place] ^= random.randrange(1, 256)
        events.write_bytes(content)
        drop_events_from(events, 3)
        assert str(events) in caplog.text, place
        told, left = len(caplog.records), events.read_bytes()
        drop_events_from(events, 3)  # What is left is whole.
        assert (len(caplog.records), events.read_bytes()) == (told, left), place


def test_what_became_known_later_is_shown_at_its_step_also_after_a_resume(tmp_path):
    record(tmp_path, range(6))
    with MetricsWriter(tmp_path, 6) as writer:
        writer.write(6, {"policy/entropy": 6.0})
        writer.add(2, {"evaluation/avg_at_k": 0.25}, [Example("1+1=", "late", "2", True)])
        writer.write(7, {"policy/entropy": 7.0})
        writer.add(6, {"evaluation/avg_at_k": 0.5})
    evaluated = [(event.step, event.value) for event in read(tmp_path).Scalars("evaluation/avg_at_k")]
    assert evaluated == [(2, 0.25), (6, 0.5)]
    assert "late" in texts(tmp_path, "samples/evaluation")[2]
    record(tmp_path, [4], start_step=4)
    assert [event.step for event in read(tmp_path).Scalars("evaluation/avg_at_k")] == [2]
    assert [event.step for event in read(tmp_path).Scalars("policy/entropy")] == [0, 1, 2, 3, 4]


def test_what_a_model_wrote_is_shown_and_not_interpreted():
    page = markdown_to_safe_html(examples_as_markdown([Example(HOSTILE, HOSTILE, HOSTILE, True, HOSTILE)]))
    assert page.count("<h3>") == 1
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 4


@pytest.mark.parametrize("text", ["", "\n", "a\x1b[31mb", "a\u202eb", "a\ud83db"])
def test_any_text_makes_an_indented_block(text):
    block = code_block(text)
    assert all(line.startswith("    ") for line in block.splitlines())
    assert not set("\x1b\u202e\ud83d") & set(block)


def test_long_texts_lose_their_middle():
    assert shortened("a" * 10, 10) == "a" * 10
    text = shortened("b" * 50 + "e" * 51, 10)
    assert text.startswith("bbbbb\n")
    assert text.endswith("\neeeee")
    assert "91 characters" in text


def test_credentials_in_addresses_are_removed_at_any_depth():
    given = {"a": ["https://user:secret@host/x", {"b": "s3://token@bucket"}], "c": "mail@host", "d": 1}
    assert without_credentials(given) == {
        "a": ["https://***@host/x", {"b": "s3://***@bucket"}],
        "c": "mail@host",
        "d": 1,
    }


def test_histograms_span_their_values_and_leave_out_what_is_not_finite():
    found = Histogram.of_values([1.0, 3.0, float("nan"), float("inf")], num_bins=2)
    assert (found.low, found.high, found.counts) == (1.0, 3.0, (1, 1))
    assert Histogram.of_values([float("nan")]) is None
    same = Histogram.of_values([7.0] * 3)
    assert same.low < 7.0 < same.high
    assert same.total == 3
    assert all(low < high for low, high in itertools.pairwise(same.edges()))
