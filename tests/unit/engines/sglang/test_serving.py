"""Engines are looked after: ready only when protected, started again with patience, ended with all they started."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dapo_mega.engines.sglang import serving
from dapo_mega.engines.sglang.engine_commands import Node
from dapo_mega.engines.sglang.registry import EngineRegistry, TrainerReply
from dapo_mega.engines.sglang.serving import Announcements, Engine, Router, ServingOptions, serve
from dapo_mega.errors import FleetError
from tests.distributed.launching import REPOSITORY, free_port

KEY = "the-key-of-this-run"
FAKE = Path(__file__).with_name("fake_sglang.py")
LIMIT_S = 60.0


@pytest.fixture
def python(tmp_path):
    """An interpreter whose `-m sglang.launch_server` is the fake one."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" -S -E "{FAKE}" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def make_engine(tmp_path, python, monkeypatch):
    """Makes engines that behave as told, and ends them."""
    monkeypatch.setattr(serving, "_LONGEST_BACK_OFF_S", 0.2)
    engines = []

    def make(behaviour, **changes):
        node = Node(python, tmp_path, 1, 1, "127.0.0.1", free_port(), "fp32", gpus=(), extra=("--as", behaviour))
        options = ServingOptions(api_key=KEY, api_key_env="A_KEY", log_folder=tmp_path)
        engines.append(Engine(node, 0, replace(options, **changes)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.end(time.monotonic())


def advance_until(engine, condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        engine.advance()
        time.sleep(0.02)


def children(log):
    lines = log.read_text().splitlines()
    return [psutil.Process(int(line.split()[1])) for line in lines if line.startswith("child ")]


def test_a_killed_engine_serves_again_as_another_instance(make_engine, capsys):
    engine = make_engine("well")
    advance_until(engine, lambda: engine.registration is not None)
    first = engine.registration
    assert first.url == engine.url
    os.kill(engine._group.pid, signal.SIGKILL)
    advance_until(engine, lambda: engine.registration is None)
    advance_until(engine, lambda: engine.registration is not None)
    assert engine.registration.instance != first.instance
    assert "ended with status -9 and starts again in 0.2 s" in capsys.readouterr().out


def test_an_engine_waits_longer_after_each_failure_and_not_forever(make_engine, monkeypatch, capsys):
    monkeypatch.setattr(serving, "_LONGEST_BACK_OFF_S", 60.0)
    engine = make_engine("well", max_restarts=3)
    advance_until(engine, lambda: engine.registration is not None)
    for _ in range(4):
        engine.registration = None
        os.kill(engine._group.pid, signal.SIGKILL)
        advance_until(engine, lambda: engine._group is None)
        if not engine.has_given_up:
            engine._start()
    assert [
        line.split(" and ")[1].split(";")[0] for line in capsys.readouterr().out.splitlines() if " and " in line
    ] == [
        "starts again in 1 s",
        "starts again in 2 s",
        "starts again in 4 s",
        "is not restarted any more",
    ]
    engine.advance()
    assert engine._group is None


def test_an_engine_that_failed_is_not_started_before_its_time(make_engine, monkeypatch):
    monkeypatch.setattr(serving, "_LONGEST_BACK_OFF_S", 60.0)
    engine = make_engine("well")
    advance_until(engine, lambda: engine.registration is not None)
    os.kill(engine._group.pid, signal.SIGKILL)
    advance_until(engine, lambda: engine._group is None)
    failed = time.monotonic()
    advance_until(engine, lambda: engine._group is not None)
    assert time.monotonic() - failed > 0.9


def test_an_engine_that_served_again_waits_no_longer_than_the_first_time(make_engine, monkeypatch, capsys):
    monkeypatch.setattr(serving, "_LONGEST_BACK_OFF_S", 60.0)
    engine = make_engine("well")
    for _ in range(2):
        advance_until(engine, lambda: engine.registration is not None)
        os.kill(engine._group.pid, signal.SIGKILL)
        advance_until(engine, lambda: engine.registration is None)
    assert capsys.readouterr().out.count("starts again in 1 s") == 2


@pytest.fixture
def serve_one(tmp_path, python):
    """Serves one engine that behaves well and announces it, until told; returns the trainer's registry."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    address = f"127.0.0.1:{free_port()}"
    registry = EngineRegistry(address, KEY)

    def run(when_registered, behaviour="well", **options):
        node = Node(python, tmp_path, 1, 1, "127.0.0.1", free_port(), "fp32", gpus=(), extra=("--as", behaviour))

        def wait_and_act():
            deadline = time.monotonic() + LIMIT_S
            while not registry.poll() and time.monotonic() < deadline:
                time.sleep(0.05)
            when_registered()

        threading.Thread(target=wait_and_act).start()
        late = threading.Timer(LIMIT_S, os.kill, (os.getpid(), signal.SIGTERM))
        late.start()
        try:
            serve(node, ServingOptions(KEY, "A_KEY", tmp_path, rendezvous=address, **options))
        finally:
            late.cancel()

    yield registry, run
    registry.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_engines_leave_and_end_at_a_signal(serve_one, capsys, number):
    registry, run = serve_one
    run(lambda: os.kill(os.getpid(), number))
    assert registry.poll() == []
    assert capsys.readouterr().out.endswith("all engines have ended\n")


def test_a_launcher_ends_when_its_engines_have_no_restarts_left(serve_one, capsys):
    registry, run = serve_one

    def kill_engine():
        os.kill(int(capsys.readouterr().out.split("(pid ")[1].split(",")[0]), signal.SIGKILL)

    with pytest.raises(FleetError, match="all engines died more than 0 times"):
        run(kill_engine, max_restarts=0)
    assert registry.poll() == []


def test_an_engine_that_never_served_is_an_error_with_its_last_words(make_engine):
    engine = make_engine("broken")
    with pytest.raises(FleetError, match="status 1 before it ever served: the model is too large; see "):
        advance_until(engine, lambda: False)


@pytest.mark.parametrize("behaviour", ["silent", "half ready"])
def test_an_engine_that_takes_too_long_is_an_error(make_engine, behaviour):
    engine = make_engine(behaviour, start_limit_s=2)
    with pytest.raises(FleetError, match=r"did not serve within 2 s before it ever served: it printed nothing"):
        advance_until(engine, lambda: False)
    assert engine._group is None


def test_an_engine_that_answers_without_the_key_is_refused(make_engine):
    engine = make_engine("open")
    with pytest.raises(FleetError, match="answers callers without the API key"):
        advance_until(engine, lambda: False)


def test_an_engine_that_does_not_end_is_killed_with_its_children(make_engine):
    engine = make_engine("stubborn")
    advance_until(engine, lambda: engine.registration is not None)
    processes = [psutil.Process(engine._group.pid), *children(engine.log)]
    assert len(processes) == 2
    engine.ask_to_end()
    engine.end(time.monotonic() + 0.3)
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left
    assert engine.registration is None


def test_an_engine_ends_with_a_launcher_that_is_killed(tmp_path):
    log = tmp_path / "engine.log"
    program = "echo child $$; sleep 600 & echo child $!; wait"
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, pathlib, sys, time\n"
            "from dapo_mega.engines.sglang.serving import ProcessGroup\n"
            "group = ProcessGroup(['/bin/sh', '-c', sys.argv[1]], dict(os.environ), pathlib.Path(sys.argv[2]))\n"
            "time.sleep(600)",
            program,
            log,
        ],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    deadline = time.monotonic() + LIMIT_S
    while not log.is_file() or len(children(log)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    _, left = psutil.wait_procs(children(log), timeout=10)
    assert not left


def test_a_launcher_killed_before_the_engines_guard_is_there_starts_nothing(tmp_path):
    program = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        "from dapo_mega.distributed.programs import ProcessGroup\n"
        "start, started = subprocess.Popen, []\n"
        "def killed_at_the_second(arguments, **options):\n"
        "    if started:\n"
        "        time.sleep(0.2)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    started.append(start(arguments, **options))\n"
        "    print(started[0].pid, flush=True)\n"
        "    return started[0]\n"
        "subprocess.Popen = killed_at_the_second\n"
        "ProcessGroup(['/bin/sh', '-c', 'echo it runs; sleep 600'], dict(os.environ), pathlib.Path(sys.argv[1]))\n"
    )
    log = tmp_path / "engine.log"
    command, environment = [sys.executable, "-c", program, log], {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    launcher = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert launcher.returncode == -signal.SIGKILL, launcher.stderr
    started = int(launcher.stdout)
    wait_limit = time.monotonic() + LIMIT_S
    while psutil.pid_exists(started):
        assert time.monotonic() < wait_limit
        time.sleep(0.05)
    assert log.read_text() == ""


def test_an_engine_that_answers_no_probe_any_more_is_started_again(make_engine, monkeypatch, capsys):
    monkeypatch.setattr(serving, "_WATCH_EVERY_S", 0.05)
    engine = make_engine("hanging", restart_hung_after_s=1.0)
    advance_until(engine, lambda: engine.registration is not None)
    first = engine.registration
    advance_until(engine, lambda: engine.registration is None)
    advance_until(engine, lambda: engine.registration is not None)
    assert engine.registration.instance != first.instance
    assert "answered no probe for 1 s and starts again in 0.2 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("behaviour", "limit_s", "is_restarted"), [("hanging", 60.0, True), ("well", 60.0, False), ("hanging", None, False)]
)
def test_a_trainer_may_have_an_engine_restarted_that_is_silent_and_may_be(
    serve_one, monkeypatch, capsys, behaviour, limit_s, is_restarted
):
    monkeypatch.setattr(serving, "_WATCH_EVERY_S", 0.05)
    monkeypatch.setattr(serving, "_SILENT_S", 0.5 if is_restarted else LIMIT_S)
    monkeypatch.setattr(serving, "_ANNOUNCE_EVERY_S", 0.1)
    registry, run = serve_one

    def complain():
        (first,) = registry.poll()
        registry.report_hung([first.instance, "another"])
        deadline = time.monotonic() + (LIMIT_S if is_restarted else 2.0)
        while registry.poll() in ([], [first]) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    run(complain, behaviour, restart_hung_after_s=limit_s)
    output = capsys.readouterr().out
    assert ("is hung, says the trainer, and answers no probe and starts again in 1 s" in output) == is_restarted
    assert output.count(" serves (pid ") == 1 + is_restarted


@pytest.mark.parametrize(("behaviour", "limit_s"), [("well", 2.5), ("hanging", None)])
def test_an_engine_that_answers_probes_or_may_hang_is_left_alone(make_engine, monkeypatch, behaviour, limit_s):
    monkeypatch.setattr(serving, "_WATCH_EVERY_S", 0.05)
    engine = make_engine(behaviour, restart_hung_after_s=limit_s)
    advance_until(engine, lambda: engine.registration is not None)
    served, deadline = engine.registration, time.monotonic() + 3.5
    advance_until(engine, lambda: time.monotonic() > deadline)
    assert engine.registration is served


def test_an_engine_that_ended_is_not_probed_any_more(make_engine, monkeypatch):
    monkeypatch.setattr(serving, "_WATCH_EVERY_S", 0.01)
    before = set(threading.enumerate())
    engine = make_engine("well", restart_hung_after_s=60.0)
    advance_until(engine, lambda: engine.registration is not None)
    (watch,) = set(threading.enumerate()) - before
    engine.end(time.monotonic())
    watch.join(LIMIT_S)
    assert not watch.is_alive()


def test_a_router_that_ends_is_started_again_after_a_while(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serving, "_LONGEST_BACK_OFF_S", 0.3)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    node = Node(python, tmp_path, 1, 1, "127.0.0.1", free_port(), "fp32", gpus=())
    router = Router(node, ServingOptions(KEY, "A_KEY", tmp_path), 1)
    try:
        router.advance()
        killed = router._group.pid
        os.kill(killed, signal.SIGKILL)
        advance_until(router, lambda: router._group is None)
        router.advance()
        assert router._group is None
        advance_until(router, lambda: router._group is not None)
        last = psutil.Process(router._group.pid)
    finally:
        router.end()
    assert last.pid != killed
    assert not last.is_running()
    assert "ended with status -9 and starts again in 0.3 s" in capsys.readouterr().out


def test_the_key_is_in_no_file_command_line_or_environment(make_engine, monkeypatch, tmp_path):
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = make_engine("silent")
    for _ in range(2):
        engine._start()
        process = psutil.Process(engine._group.pid)
        files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
        assert engine.log in files
        assert not any(KEY in path.read_text() for path in files)
        assert KEY not in " ".join(process.cmdline())
        assert KEY not in process.environ().values()
        assert stat.S_IMODE(engine.log.stat().st_mode) == 0o600
        num_files = psutil.Process().num_fds()
        engine.end(time.monotonic())
    assert psutil.Process().num_fds() < num_files
    assert list(tmp_path.rglob("*.yaml")) == []


def test_the_trainer_hears_at_once_of_changes_and_again_after_a_while(monkeypatch, tmp_path, capsys):
    said = []
    clock = [0.0]
    monkeypatch.setattr(
        serving, "announce", lambda address, key, engines, *, leaving: said.append((leaving, [*engines])) or replies[-1]
    )
    replies = [TrainerReply()]
    monkeypatch.setattr(serving.time, "monotonic", lambda: clock[0])
    first, second = (serving.Registration(f"http://host:{port}", "instance") for port in (1, 2))
    announcements = Announcements(ServingOptions(KEY, "A_KEY", tmp_path, rendezvous="trainer:1"))
    announcements.update([first])
    announcements.update([first])
    announcements.update([first, second])
    clock[0] += serving._ANNOUNCE_EVERY_S + 0.1
    announcements.update([first, second])
    announcements.update([second])
    announcements.update([])
    assert said == [
        (False, [first]),
        (False, [first, second]),
        (False, [first, second]),
        (True, [first]),
        (False, [second]),
        (True, [second]),
    ]
    assert capsys.readouterr().out == "the trainer at trainer:1 knows of the engines\n"
    for reply in (None, None, TrainerReply("refuses"), TrainerReply(hung=frozenset(["instance"]))):
        replies.append(reply)
        clock[0] += serving._ANNOUNCE_EVERY_S + 0.1
        announcements.update([first])
    assert announcements.hung == {"instance"}
    assert capsys.readouterr().out.splitlines() == [
        "the trainer at trainer:1 does not answer; trying again every 5 s",
        "the trainer at trainer:1 refuses; trying again every 5 s",
        "the trainer at trainer:1 knows of the engines",
    ]
