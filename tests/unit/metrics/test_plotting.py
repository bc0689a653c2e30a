import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from dapo_mega.metrics import plot_run
from dapo_mega.metrics.jsonl import encode_line
from dapo_mega.metrics.plotting import _draw, _load_runs

ROOT = Path(__file__).parents[3]


def write_run(run_dir: Path, num_steps: int = 8) -> Path:
    run_dir.mkdir(parents=True)
    lines = []
    for step in range(num_steps):
        metrics = {
            "rollout/reward_mean": -0.5 + step / 10,
            "rollout/accuracy_reward_mean": -0.4 + step / 10,
            "rollout/accuracy_mean": 0.3 + step / 20,
            "rollout/response_length_mean": 500.0 + 40 * step,
            "rollout/mean_token_probability": 0.8,
            "policy/entropy": math.nan if step == 3 else 0.5,
            "groups/kept_share": 0.6,
            "groups/all_right_share": 0.3,
            "groups/all_wrong_share": 0.1,
        }
        if step % 4 == 0:
            metrics["evaluation/avg_at_k"] = 0.25 + step / 20
        lines.append(encode_line(step, metrics))
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    return run_dir


def run_tool(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "plot_run.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_curves_hold_the_recorded_points(tmp_path):
    figure = _draw(_load_runs([write_run(tmp_path / "run")]))
    panels = {axes.get_title(): axes for axes in figure.axes}
    accuracy = {line.get_label(): line for line in panels["Accuracy"].lines}
    assert list(accuracy) == ["training", "evaluation avg@k"]
    assert list(accuracy["evaluation avg@k"].get_xdata()) == [0, 4]
    assert list(accuracy["evaluation avg@k"].get_ydata()) == [0.25, 0.45]
    assert list(accuracy["training"].get_xdata()) == list(range(8))


def write_records(run_dir: Path, *records: dict[str, float]) -> Path:
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("".join(encode_line(step, record) for step, record in enumerate(records)))
    return run_dir


def test_parts_of_the_reward_and_held_out_reward_are_drawn_of_every_run_that_has_them(tmp_path):
    own = write_records(
        tmp_path / "own",
        {"evaluation/reward_mean": 0.1, "evaluation/part_a_b": 0.5},
        {"rollout/reward_mean": 0.2, "reward/part_a_b": 0.6, "reward/part_long$": 7.0},
    )
    other = write_records(tmp_path / "other", {}, {"rollout/reward_mean": 0.3, "reward/part_a_b": 0.9})
    sft = write_records(tmp_path / "sft", {"policy/loss": 2.0})
    panels = {axes.get_title(): axes for axes in _draw(_load_runs([own, other, sft])).axes}
    assert list(panels) == ["Reward", "Loss", "Reward: a_b", "Reward: long$"]
    drawn = {
        title: [(line.get_color(), line.get_label(), list(line.get_ydata())) for line in axes.lines]
        for title, axes in panels.items()
    }
    assert drawn["Reward"] == [("C0", "training", [0.2]), ("C0", "evaluation", [0.1]), ("C1", "training", [0.3])]
    assert drawn["Loss"] == [("C2", "loss", [2.0])]
    assert drawn["Reward: a_b"] == [("C0", "training", [0.6]), ("C0", "evaluation", [0.5]), ("C1", "training", [0.9])]
    assert drawn["Reward: long$"] == [("C0", "training", [7.0])]


def test_a_value_that_is_not_finite_is_marked_at_its_step(tmp_path):
    figure = _draw(_load_runs([write_run(tmp_path / "run")]))
    (panel,) = (axes for axes in figure.axes if axes.get_title() == "Generation entropy")
    entropy, marks = panel.lines
    assert math.isnan(entropy.get_ydata()[3])
    assert list(marks.get_xdata()) == [3]
    assert marks.get_label() == "not finite"


def test_a_curve_of_infinities_alone_can_be_drawn(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text(encode_line(0, {"policy/entropy": math.inf}))
    plot_run([run_dir], tmp_path / "curves.png")
    assert imread(tmp_path / "curves.png").std() > 0


def test_compared_runs_are_named_as_they_are_written(tmp_path):
    run_dirs = [write_run(tmp_path / name / "run") for name in ("a$x$", "b")]
    figure = _draw(_load_runs(run_dirs))
    # Both have the same folder name, so they are named by their paths.
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [str(path) for path in run_dirs]
    assert not any(text.get_parse_math() for text in figure.legends[0].get_texts())


def test_a_failed_drawing_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    run_dir = write_run(tmp_path / "run")
    output = tmp_path / "curves.png"
    output.write_bytes(b"old")

    def fail(self: object, path: Path, **options: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plot_run([run_dir], output)
    assert output.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "run"]


def bad_run(tmp_path: Path, content: str | None) -> Path:
    run_dir = tmp_path / "bad"
    run_dir.mkdir()
    if content is not None:
        (run_dir / "metrics.jsonl").write_text(content)
    return run_dir


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no metrics.jsonl"),
        ("", "no complete step"),
        ('{"step": 0, "pol', "no complete step"),
        ('{"step": 0, "a/b": 1.0}\n', "none of the metrics"),
        ("damaged\n" + '{"step": 0, "policy/entropy": 1.0}\n', "line 1"),
    ],
)
def test_a_run_without_metrics_is_refused_in_one_line(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        plot_run([write_run(tmp_path / "good"), bad_run(tmp_path, content)], tmp_path / "curves.png")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "curves.png").exists()


def test_a_bad_output_is_refused(tmp_path):
    run_dir = write_run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"end in \.png"):
        plot_run([run_dir], tmp_path / "curves.pdf")
    with pytest.raises(ValueError, match="does not exist"):
        plot_run([run_dir], tmp_path / "missing" / "curves.png")
    with pytest.raises(ValueError, match="given twice"):
        plot_run([run_dir, run_dir / "."], tmp_path / "curves.png")


def test_the_tool_draws_and_compares(tmp_path):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", num_steps=50)
    result = run_tool(first, second, "--compare", write_records(tmp_path / "own", {"evaluation/reward_mean": 0.5}))
    assert result.returncode == 0
    *summary, last = result.stdout.splitlines()
    assert last == f"curves: {first / 'curves.png'}"
    assert [line for line in summary if line.endswith(":")] == [
        f"{tmp_path / name}:" for name in ("first", "second", "own")
    ]
    assert any(line.startswith("held-out accuracy (avg@k)") and "0.250 -> 0.450" in line for line in summary)
    assert summary[-1].split()[-7:-3] == ["0.500", "->", "0.500", "(steps"]
    assert imread(first / "curves.png").shape == (960, 1800, 4)


@pytest.mark.parametrize(("kind", "message"), [("missing", "does not exist"), ("empty", "holds no metrics.jsonl")])
def test_the_tool_ends_with_code_2_and_one_line(tmp_path, kind, message):
    run_dir = tmp_path / kind
    if kind == "empty":
        run_dir.mkdir()
    result = run_tool(run_dir)
    assert result.returncode == 2
    assert result.stderr == f"error: run folder {run_dir} {message}\n"
    assert result.stdout == ""
    assert not (run_dir / "curves.png").exists()
