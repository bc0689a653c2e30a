import io
import logging
import math
import re

import pytest

from dapo_mega.cli import CurrentStandardError
from dapo_mega.metrics import ProgressDisplay

METRICS = {
    "rollout/reward_mean": -0.25,
    "rollout/accuracy_mean": 0.5,
    "rollout/response_length_mean": 1234.4,
    "policy/entropy": 0.875,
    "rollout/tokens_per_s": 5000.0,
    "policy/loss": 77.0,
}
SHOWN = ["reward=-0.250", "accuracy=0.500", "length=1234", "entropy=0.875", "tokens/s=5000"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def visible(output: str) -> str:
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", output)


@pytest.fixture
def wide_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")


def test_plain_output_has_no_control_codes(monkeypatch):
    # FORCE_COLOR makes rich colour any stream; a log file must stay plain all the same.
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with ProgressDisplay(3, 2, stream=stream) as progress:
        progress.update(2, METRICS)
        progress.message("checkpoint \x1b[31msaved\x1b[0m\r\x07")
        progress.update(3, {"policy/entropy": math.nan})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 2/3  " + "  ".join(SHOWN))
    assert lines[1] == "checkpoint saved"
    assert "reward=-  accuracy=-  length=-  entropy=nan" in lines[2]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", stream.getvalue())


def test_plain_output_is_a_line_per_ten_seconds_and_one_at_the_end():
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay(100, stream=stream, clock=clock) as progress:
        for step in range(1, 101):
            clock.now += 1.0
            progress.update(step, METRICS)
            if step == 15:
                progress.message("held-out evaluation")
    shown = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert shown == ["1/100", "11/100", "evaluation", *(f"{step}/100" for step in (*range(21, 100, 10), 100))]


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with ProgressDisplay(4, stream=stream) as progress:
        progress.update(1, METRICS)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_time_left_follows_the_steps_of_this_run():
    clock = Clock()
    stream = io.StringIO()
    progress = ProgressDisplay(100, 90, stream=stream, clock=clock)
    clock.now += 1000.0  # starting up: not part of any step
    with progress:
        for step in (91, 92):
            clock.now += 60.0
            progress.update(step, METRICS)
    # 8 steps are left at 60 seconds each.
    assert stream.getvalue().splitlines()[-1].endswith("ETA=0:08:00")


def test_a_terminal_shows_all_values_and_messages_without_markup(wide_terminal):
    stream = Terminal()
    with ProgressDisplay(10, stream=stream) as progress:
        progress.message("answer [bold]x[/bold] \x1b]0;title\x07")
        progress.update(1, METRICS)
    output = visible(stream.getvalue())
    assert "step 1/10" in output
    assert all(value in output for value in SHOWN)
    assert "answer [bold]x[/bold] " in output
    assert "\x1b]0;" not in stream.getvalue()
    assert "\x1b[?25l" in stream.getvalue()  # the live display hides the cursor ...
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")  # ... and shows it again


def test_log_lines_stand_once_above_a_terminals_bar(wide_terminal):
    stream = Terminal()
    handler = CurrentStandardError()
    with ProgressDisplay(10, stream=stream):
        handler.emit(
            logging.makeLogRecord({"name": "dapo_mega", "msg": "engine [b] is slow", "levelno": logging.WARNING})
        )
    assert visible(stream.getvalue()).count("engine [b] is slow") == 1


def test_the_console_shows_neither_names_of_modules_nor_a_line_twice(capsys):
    handler = CurrentStandardError()
    for name, level, message in (
        ("dapo_mega.training.build", logging.INFO, "ready"),
        ("dapo_mega.engines.health", logging.INFO, "ready"),
        ("dapo_mega.engines.health", logging.WARNING, "slow"),
        ("dapo_mega.training.build", logging.INFO, "ready"),
        ("torch.distributed", logging.ERROR, "broken"),
    ):
        handler.emit(
            logging.makeLogRecord(
                {"name": name, "msg": message, "levelno": level, "levelname": logging.getLevelName(level)}
            )
        )
    assert capsys.readouterr().err.splitlines() == [
        "ready",
        "WARNING: slow",
        "ready",
        "ERROR torch.distributed: broken",
    ]


def test_the_terminal_is_restored_after_an_exception(wide_terminal):
    stream = Terminal()

    def fail() -> None:
        with ProgressDisplay(10, stream=stream):
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        fail()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_impossible_counts_are_refused():
    for start_step in (6, -1):
        with pytest.raises(ValueError, match="start_step"):
            ProgressDisplay(5, start_step)


def test_a_run_that_is_already_complete_can_be_shown(wide_terminal):
    stream = Terminal()
    with ProgressDisplay(0, 0, stream=stream):
        pass
    assert "step 0/0" in stream.getvalue()
