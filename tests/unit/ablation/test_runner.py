"""Runs as child processes: in the plan's order, past failures, until a signal; by scripts that stand for trainers."""

import itertools
import os
import re
import signal
import sys
import threading
import time

import psutil
import pytest

from dapo_mega.ablation.runner import Runner, Stop, make_cold_start
from dapo_mega.ablation.tasks import Task
from dapo_mega.errors import InputError

from .fake_runs import plan_of, train

# Leaves what a trainer leaves. At SIGTERM it saves, which takes a moment, and ends.
TRAINER = r"""
import json, pathlib, signal, sys, time
folder, kind, num_steps = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
def leave(state, status):
    content = {"state": state, "exit_status": status, "message": kind if status else ""}
    (folder / "status.json").write_text(json.dumps(content))
    sys.exit(status)
def stop(*_):
    time.sleep(0.3)
    leave("stopped", 75)
signal.signal(signal.SIGTERM, stop)
if kind == "dies":
    sys.exit("first line\nsecond line")
with (folder / "metrics.jsonl").open("a") as file:
    begun = sum(1 for _ in (folder / "metrics.jsonl").open())
    for step in range(begun, num_steps + 1):
        file.write(json.dumps({"step": step, "rollout/reward_mean": 0.5, "evaluation/avg_at_k": 0.5}) + "\n")
        file.flush()
        if step == 2 and kind == "starves":
            leave("failed", 3)
        while step == 2 and kind == "waits":
            time.sleep(0.01)
leave("finished", 0)
"""


@pytest.fixture
def started():
    return []


def runner_of(plan, kinds, started, **settings):
    """`kinds`: how runs behave, by arm; the others finish. `started` gets the names of runs in order."""

    def command(run):
        started.append(run.name)
        kind = kinds.get(run.arm.name, "finishes")
        return [sys.executable, "-c", TRAINER, str(run.folder), kind, str(run.config.num_steps)]

    return Runner(plan, settings.pop("stop", Stop()), command=command, **settings)


def states(runner):
    return {name: (outcome.state, outcome.step) for name, outcome in runner.outcomes.items()}


def test_a_failed_run_does_not_stop_the_others(tmp_path, started, capsys):
    plan = plan_of(tmp_path, rows=("naive_grpo", "clip_higher"), methods=("grpo",))
    ended = itertools.count()
    runner = runner_of(plan, {"naive_grpo": "dies", "clip_higher": "starves"}, started, on_end=lambda: next(ended))
    runner.work()
    assert started == ["naive_grpo seed 0", "clip_higher seed 0", "grpo seed 0"]
    assert list(states(runner).values()) == [("failed", 0), ("starved", 2), ("finished", 4)]
    assert next(ended) == 3
    shown = capsys.readouterr().out
    assert "run 1 of 3, naive_grpo seed 0: failed after step 0: second line\n" in shown
    assert "run 2 of 3, clip_higher seed 0: starved after step 2: starves\n" in shown
    assert re.search(r"run 3 of 3, grpo seed 0  step 4/4  reward=0\.500 .* ETA=", shown)


def test_settled_runs_are_not_started_again_and_others_continue(tmp_path, started, capsys):
    plan = plan_of(tmp_path, rows=("naive_grpo", "clip_higher", "token_level_loss"), methods=("dapo", "grpo"))
    for run, (steps, state, status) in zip(
        plan.runs, [(4, "finished", 0), (2, "failed", 3), (2, "stopped", 75), (1, "failed", 2)], strict=False
    ):
        train(run, steps=steps, state=state, exit_status=status)
    runner = runner_of(plan, {}, started)
    runner.work()
    assert started == ["token_level_loss seed 0", "dapo seed 0", "grpo seed 0"]
    assert [state for state, _ in states(runner).values()] == ["finished", "starved", *["finished"] * 3]
    shown = capsys.readouterr().out
    assert "run 3 of 5, token_level_loss seed 0: continues after step 2, log" in shown
    assert "run 5 of 5, grpo seed 0: begins, log" in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_children_after_they_have_saved(tmp_path, started, number):
    plan = plan_of(tmp_path, rows=("naive_grpo", "clip_higher", "token_level_loss"))
    stop = Stop()
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    stop.listen()
    earlier = set(psutil.Process().children(recursive=True))  # Of other tests: a server that forks, for example.
    children = []

    def interrupt():
        deadline = time.monotonic() + 30
        while not all((run.folder / "metrics.jsonl").is_file() for run in plan.runs[:2]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.2)  # Until both have been looked at.
        children.extend(set(psutil.Process().children(recursive=True)) - earlier)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    runner = runner_of(plan, {"naive_grpo": "waits", "clip_higher": "waits"}, started, stop=stop, parallel=2)
    try:
        runner.work()
    finally:
        thread.join()
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert stop.number == number
    assert len(started) == 2
    assert list(states(runner).values()) == [("begun", 2), ("begun", 2), ("absent", 0)]
    assert all('"stopped"' in (run.folder / "status.json").read_text() for run in plan.runs[:2])
    assert len(children) >= 2
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


class ScriptedTask(Task):
    """Its commands leave marks; the last one fails while there is no file `ready`."""

    def commands(self, folder, processes):
        mark = f"open({str(folder / 'marks')!r}, 'a').write('x')"
        fail = f"import pathlib, sys; sys.exit(not pathlib.Path({str(folder / 'ready')!r}).exists())"
        return [[sys.executable, "-c", mark], [sys.executable, "-c", fail]]


def test_the_cold_start_is_made_once_and_its_failure_ends_the_command(tmp_path):
    plan = plan_of(tmp_path, rows=("naive_grpo",))
    plan = type(plan)(plan.output, ScriptedTask("", ()), plan.arms, plan.seeds, plan.runs, 1)
    with pytest.raises(InputError, match=r"the cold start in .*cold_start failed; the lines above say why"):
        make_cold_start(plan, Stop())
    (plan.cold_start / "ready").touch()
    assert make_cold_start(plan, Stop())
    assert make_cold_start(plan, Stop())
    assert (plan.cold_start / "marks").read_text() == "xx"
