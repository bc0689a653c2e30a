import json
import math

import pytest

from dapo_mega.metrics import read_metrics
from dapo_mega.metrics.jsonl import drop_from_step, encode_line


def refuse_constant(text: str) -> float:
    raise AssertionError(f"{text} is not strict JSON")


def test_non_finite_values_survive_a_round_trip_as_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = {"a/nan": math.nan, "a/inf": math.inf, "a/minus_inf": -math.inf, "a/third": 1 / 3, "a/int": 2}
    path.write_text(encode_line(4, metrics))
    assert json.loads(path.read_text(), parse_constant=refuse_constant)["a/minus_inf"] == "-Infinity"
    (record,) = read_metrics(path)
    assert math.isnan(record.pop("a/nan"))
    assert record == {"step": 4, "a/inf": math.inf, "a/minus_inf": -math.inf, "a/third": 1 / 3, "a/int": 2.0}
    assert type(record["step"]) is int
    assert type(record["a/int"]) is float


def test_a_torn_last_line_is_ignored_wherever_it_breaks(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first, last = encode_line(0, {"a/b": 1.0}), encode_line(1, {"a/b": 2.25})
    found = {}
    for lost in range(1, len(last) + 1):
        path.write_text((first + last)[:-lost])
        found[lost] = [record["step"] for record in read_metrics(path)]
    # Without its newline alone the last record is whole: no proper prefix of an object is valid JSON.
    assert found == {1: [0, 1], **{lost: [0] for lost in range(2, len(last) + 1)}}


@pytest.mark.parametrize("tail", [b"\0\0\0\0", b"\0\0\n", b"\xff\xfe", b'{"step": 2, "a/b'])
def test_debris_in_the_last_line_is_ignored(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_line(0, {"a/b": 1.0}).encode() + tail)
    assert [record["step"] for record in read_metrics(path)] == [0]


@pytest.mark.parametrize(
    "line", ['{"step": 1, "a/', "[1]", '{"a/b": 1.0}', '{"step": 1.5}', '{"step": 1, "a/b": "x"}', ""]
)
def test_a_damaged_line_before_the_last_is_named_in_the_error(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(encode_line(0, {"a/b": 1.0}) + line + "\n" + encode_line(2, {"a/b": 1.0}))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: ") as caught:
        read_metrics(path)
    assert "\n" not in str(caught.value)


def test_what_became_known_later_is_read_and_dropped_with_its_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    late = [
        (2, {"a/b": 2.0}),
        (3, {"a/b": 3.0}),
        (2, {"c/d": 2.5}),
        (4, {"a/b": 4.0}),
        (3, {"c/d": 3.5}),
        (1, {"c/d": 1}),
    ]
    path.write_text("".join(encode_line(step, metrics) for step, metrics in late))
    whole = [{"step": 1, "c/d": 1.0}, *({"step": s, "a/b": float(s), "c/d": s + 0.5} for s in (2, 3))]
    assert read_metrics(path) == [*whole, {"step": 4, "a/b": 4.0}]
    assert drop_from_step(path, 3) == 3
    assert read_metrics(path) == whole[:2]


def test_drop_keeps_the_bytes_of_earlier_steps_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    odd_but_valid = '{"a/b":1e0,   "step":0}\n'
    path.write_text(odd_but_valid + encode_line(5, {}) + encode_line(6, {}) + '{"step": 7, "a')
    assert drop_from_step(path, 5) == 2
    assert path.read_text() == odd_but_valid
    assert list(tmp_path.iterdir()) == [path]


def test_drop_gives_a_whole_last_record_its_missing_newline(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(encode_line(0, {"a/b": 1.0}).rstrip("\n"))
    assert drop_from_step(path, 9) == 0
    assert path.read_text() == encode_line(0, {"a/b": 1.0})


def test_drop_leaves_the_old_file_whole_when_replacing_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    content = encode_line(0, {"a/b": 1.0}) + encode_line(1, {"a/b": 1.0})
    path.write_text(content)

    def crash(source: object, target: object) -> None:
        raise OSError("crash")

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(OSError, match="crash"):
        drop_from_step(path, 1)
    assert path.read_text() == content
