"""Programs as environments: what they ask and post is the trajectory, what fails is no number, and none outlives it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from dapo_mega.config import RunConfig
from dapo_mega.config.files import configured
from dapo_mega.engines.lockstep import LockstepLoop
from dapo_mega.environments.base import Begun, Progress, TrajectoryFailure
from dapo_mega.environments.programs import check_command
from dapo_mega.errors import InputError
from dapo_mega.trajectory_records import pack_trajectories, unpack_trajectories
from dapo_mega.types import GenerationFailure, Trajectory

from .programs import assert_exact, programs, prompt_of, request_of, scripted

AGENT = """
import json, os, pathlib, signal, subprocess, sys, time, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

def ask(*messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, {"messages": messages})["choices"][0]["message"]

def play(turns=1, reward=None):
    messages = []
    for i in range(turns):
        messages += [{"role": "user", "content": str(i)}]
        messages += [ask(*messages)]
    if reward is not None:
        post(os.environ["DAPO_MEGA_REWARD_URL"], {"reward": reward, "correct": reward > 0, "parts": {"played": turns}})
    return messages

def note(*what):
    with open("log", "a") as file:
        file.write(json.dumps(what) + "\\n")

note("start", os.getpid(), os.environ["DAPO_MEGA_SEED"])
"""


@pytest.fixture
def agent(tmp_path):
    """Makes programs of this code behind the helpers; all have ended with the test."""
    made = []

    def make(code, arguments="", **keys):
        (tmp_path / "agent.py").write_text(AGENT + code)
        keys = {"retries": 0, "max_failed_share": 1, **keys}
        made.append(programs(f"{sys.executable} -S agent.py {arguments}", tmp_path, **keys))
        return made[-1]

    yield make
    for each in made:
        each.close()
    until(lambda: not left(tmp_path))


def left(folder):
    """Processes that work in the folder, or any that it started there."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                found.append(process)
    return found


def until(holds, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def entries(folder):
    log = folder / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


PROMPT = prompt_of("nothing of it")


def run(environment, *texts, prompt=PROMPT, request=None, progress=None):
    generate, asked = scripted(*texts)
    request = request or request_of(prompt)
    found = asyncio.run(environment.run(prompt, request, generate, progress or Progress()))
    assert_exact(found, prompt, asked)
    return found, asked


def test_what_a_program_asks_and_posts_is_its_trajectory(agent, tmp_path):
    environment = agent("""
task = json.loads(os.environ["DAPO_MEGA_TASK"])
note(task["ground_truth"], task["fields"], task["messages"][0]["content"])
play(3, 0.5)
""")
    progress = Progress()
    found, asked = run(environment, "a", "b", "c", progress=progress)
    assert (len(asked), len(found.turns), found.stop) == (3, 3, "done")
    assert [dict(turn.parts) for turn in found.turns] == [{}, {}, {"reward": 0.5, "correct": 1, "played": 3}]
    assert entries(tmp_path)[1] == ["42", {"level": 3}, "Q"]
    assert progress.begun.trajectory.num_rows == found.num_rows
    metrics = environment.pop_metrics()
    assert metrics["environment/trajectories_finished"] == 1
    assert metrics["environment/trajectories_open"] == 0
    run(environment, request=request_of(PROMPT, number=9))
    seeds = {entry[2] for entry in entries(tmp_path) if entry[0] == "start"}
    assert len(seeds) == 1  # One for a group.


def test_one_that_posts_nothing_earns_nothing(agent):
    assert [dict(turn.parts) for turn in run(agent("play(2)"))[0].turns] == [{}, {}]


def test_a_task_that_is_too_long_for_a_variable_is_a_file(agent, tmp_path):
    code = "task = json.load(open(os.environ['DAPO_MEGA_TASK'])); note(len(task['fields']['long'])); play()"
    environment, prompt = agent(code), prompt_of("other")
    object.__setattr__(prompt, "fields", {"long": "x" * 300_000})
    asyncio.run(environment.run(prompt, request_of(prompt), scripted()[0], Progress()))
    assert entries(tmp_path)[1] == [300_000]


FAILURES = [
    ("play(); sys.exit(3)", {}, "exit status 3"),
    ("play(); raise OSError('the server is gone')", {}, "exit status 1"),
    ("play(1, 1.0); os.kill(os.getpid(), 9)", {}, "SIGKILL"),
    ("play(); time.sleep(60)", {"program_limit_s": 1.5}, "longer than 1.5 s"),
    ("play(); signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(os.getppid(), signal.SIGSTOP); time.sleep(60)",
     {"program_limit_s": 1.5}, "longer than 1.5 s"),
    ("play(); bytearray(2**30)", {"memory_limit_mib": 256}, "exit status 1"),
    ("", {}, "without a turn"),
    ("post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', {'messages': 1})", {}, "exit status 1"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "keys", "reason"), FAILURES)
def test_a_failure_is_no_number(agent, caplog, code, keys, reason):
    environment = agent(code, **keys)
    with pytest.raises(TrajectoryFailure, match=reason) as caught:
        run(environment)
    assert caught.value.trajectory is None or caught.value.trajectory.stop == "failed"
    assert reason in caplog.text
    if "OSError" in code:
        assert "the server is gone" in caplog.text
    metrics = environment.pop_metrics()
    assert metrics["environment/trajectories_failed"] == 1


def test_one_that_fails_is_started_anew_and_asks_nothing_twice(agent, tmp_path):
    environment = agent("play(2)\nif len(open('log').readlines()) < 2: sys.exit(1)\nplay(3)", retries=1)
    _, asked = run(environment)  # Which finds every request in the trajectory, once.
    assert len(asked) == 5
    metrics = environment.pop_metrics()
    assert metrics["environment/retries"] == metrics["environment/replays"] == len(entries(tmp_path)) - 1 == 1


PIECES = """
play(2)
play(2)  # The same once more: a piece of its own.
messages = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "shorter"}]
ask(*messages, {"role": "user", "content": "a rewritten history"})
post(os.environ["DAPO_MEGA_REWARD_URL"], {"reward": 0.5})
"""


async def interrupted(environment, prompt, progress, num_turns):
    """Begin a trajectory, and give it up when it asks for a turn behind so many; what it asked before."""
    generate, asked = scripted()
    reached = asyncio.Event()

    async def until_then(request):
        if len(asked) == num_turns:
            reached.set()
            await asyncio.sleep(60)
        return await generate(request)

    task = asyncio.create_task(environment.run(prompt, request_of(prompt), until_then, progress))
    await asyncio.wait_for(reached.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return asked


@pytest.mark.parametrize("text", ["nothing of it", "<s>user: 0</s>\n"])
def test_a_trajectory_goes_on_behind_every_turn(agent, text):
    prompt = prompt_of(text)
    undisturbed, asked = run(agent(PIECES), prompt=prompt)
    (whole,), arrays = pack_trajectories([undisturbed], "begun")
    assert len(asked) == 5
    assert len(undisturbed.pieces) == 3
    assert undisturbed.pieces[0][2] == (text != "nothing of it")
    assert len(undisturbed.version_spans) > 2
    for num_turns in range(1, 5):
        environment, progress = agent(PIECES), Progress()
        served = asyncio.run(interrupted(environment, prompt, progress, num_turns))
        (record,), saved = pack_trajectories([progress.begun.trajectory], "begun")
        (begun,) = unpack_trajectories([json.loads(json.dumps(record))], saved, "begun", Trajectory)
        generate, more = scripted()
        found = asyncio.run(environment.run(prompt, request_of(prompt), generate, Progress(Begun(begun, ()))))
        assert [request.seed for request in (*served, *more)] == [request.seed for request in asked]
        (again,), arrays_again = pack_trajectories([found], "begun")
        assert again == whole
        assert all(np.array_equal(arrays_again[name], arrays[name]) for name in arrays)
        assert environment.pop_metrics()["environment/replays"] == 1


@pytest.mark.parametrize("code", ["ask({'role': 'user', 'content': str(time.time())})", "if lives > 1: sys.exit(0)"])
def test_one_that_asks_for_something_else_begins_anew(agent, tmp_path, caplog, code):
    environment = agent(f"lives = len(open('log').readlines())\n{code}\nplay(2)\nif lives < 2: sys.exit(1)", retries=1)
    if "exit" in code:
        with pytest.raises(TrajectoryFailure, match="without a turn"):
            run(environment)
    else:
        generate, asked = scripted()
        found = asyncio.run(environment.run(PROMPT, request_of(PROMPT), generate, Progress()))
        assert_exact(found, PROMPT, asked[3:])
        assert len(asked) == 6
    assert environment.pop_metrics()["environment/differing"] == 1
    assert "a trajectory begins anew" in caplog.text


def test_too_many_failures_end_the_run(agent):
    with pytest.raises(InputError, match=r"agent.py.*more than environment.max_failed_share=0.5.*exit status 4"):
        run(agent("sys.exit(4)", max_failed_share=0.5))


def test_a_limit_of_the_run_is_no_failure(agent):
    found, asked = run(agent("play(5)", max_turns=2))
    assert (found.stop, len(asked)) == ("turns", 2)


CHILDREN = """
for command in ("sleep 300 & disown; sleep 300", "trap '' TERM; setsid sleep 300 & sleep 300"):
    subprocess.Popen(["bash", "-c", command], start_new_session=True)
if not os.fork():
    os.setsid()
    if os.fork(): os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)
time.sleep(0.5)
note("ready")
"""


@pytest.mark.parametrize("end", ["play()", "play(); sys.exit(1)", "play(); time.sleep(300)"])
def test_nothing_that_it_started_outlives_it(agent, tmp_path, end):
    environment = agent(CHILDREN + end, program_limit_s=4)
    with pytest.raises(TrajectoryFailure) if end != "play()" else contextlib.nullcontext():
        run(environment)
    assert len(entries(tmp_path)) == 2
    until(lambda: not left(tmp_path))


@pytest.mark.parametrize("at", ["cancelled", "request failed", "closed"])
def test_one_that_is_given_up_ends_with_all_it_started(agent, tmp_path, at):
    environment = agent(CHILDREN + "play(); time.sleep(300)")

    counted = asyncio.Event()

    async def failing(request):
        await counted.wait()
        raise GenerationFailure(request.request_id, "no engine")

    async def given_up():
        generate = failing if at == "request failed" else scripted()[0]
        task = asyncio.create_task(environment.run(PROMPT, request_of(PROMPT), generate, Progress()))
        while len(entries(tmp_path)) < 2:
            await asyncio.sleep(0.02)
        assert len(left(tmp_path)) >= 5
        counted.set()
        if at == "closed":
            await asyncio.to_thread(environment.close)
        elif at == "cancelled":
            task.cancel()
        await task

    with pytest.raises((asyncio.CancelledError, GenerationFailure)):
        asyncio.run(given_up())
    until(lambda: not left(tmp_path))
    metrics = environment.pop_metrics()
    assert metrics["environment/trajectories_open"] == 0
    assert metrics[f"environment/trajectories_{'cancelled' if at == 'cancelled' else 'failed'}"] == 1


def test_all_end_when_the_trainer_is_killed(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT + CHILDREN + "time.sleep(300)")
    code = f"""
import asyncio, sys
sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
from environments.programs import *
from dapo_mega.environments.base import Progress
environment = programs("{sys.executable} -S agent.py", {str(tmp_path)!r})
asyncio.run(environment.run(prompt_of(), request_of(prompt_of()), scripted()[0], Progress()))
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(entries(tmp_path)) == 2, 60)
        assert len(left(tmp_path)) >= 5
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    until(lambda: not left(tmp_path))


def test_many_play_at_once_within_their_places(agent, tmp_path):
    environment = agent("play(3, 1.0); note('end')", max_programs=8)

    async def all_of_them():
        works = [scripted() for _ in range(50)]
        requests = [request_of(PROMPT, number=i) for i in range(50)]
        coroutines = [environment.run(PROMPT, r, w[0], Progress()) for r, w in zip(requests, works, strict=True)]
        return await asyncio.gather(*coroutines), works

    found, works = asyncio.run(all_of_them())
    for trajectory, (_, asked) in zip(found, works, strict=True):
        assert_exact(trajectory, PROMPT, asked)
        assert len(trajectory.turns) == 3
    assert [trajectory.id for trajectory in found] == list(range(50))
    is_open = [1 if entry[0] == "start" else -1 for entry in entries(tmp_path)]
    assert max(sum(is_open[: i + 1]) for i in range(100)) <= 9
    assert environment._shared.places._value == 8


def test_embedded_engines_step_when_all_programs_wait_for_them(agent):
    environment = agent("play(2); time.sleep(0.3); play(1, 1.0)", max_programs=2)
    waiting, batches = [], []

    def step():
        batch, waiting[:] = list(waiting), []
        batches.append(len(batch))
        for request, future in batch:
            if not future.done():
                future.set_result(request)
        return bool(batch)

    loop = LockstepLoop(step)

    async def play(number):
        answer, asked = scripted()

        async def generate(request):
            waiting.append((request, future := loop.create_future()))
            await future
            return await answer(request)

        found = await environment.run(PROMPT, request_of(PROMPT, number=number), generate, Progress())
        return found, asked

    async def both():
        return await asyncio.gather(*(play(i) for i in range(4)))

    found = loop.complete(both())
    loop.shut()
    assert [len(trajectory.turns) for trajectory, _ in found] == [3] * 4
    assert sum(batches) == 12
    assert max(batches) == 2


def test_a_programs_clock_stands_while_it_waits_for_the_policy(agent):
    environment, (answer, _) = agent("play(1)", program_limit_s=2), scripted()

    async def slow(request):
        await asyncio.sleep(3)
        return await answer(request)

    assert asyncio.run(environment.run(PROMPT, request_of(PROMPT), slow, Progress())).stop == "done"


def test_a_command_that_is_not_there_and_a_port_that_is_taken_are_told(tmp_path):
    for keys, hint in (
        ({"command": "no-such-program x"}, "no program no-such-program in the PATH"),
        ({"command": "./agent.py"}, "no program ./agent.py"),
        ({"command": "true", "folder": str(tmp_path / "none")}, "no folder"),
    ):
        with pytest.raises(InputError, match=hint):
            check_command(programs(**{"folder": str(tmp_path), **keys})._own)
    first = programs("true", tmp_path)
    port = first._shared.endpoint.url.rpartition(":")[2]
    second = programs("true", tmp_path, port=int(port))
    with pytest.raises(InputError, match=f"no endpoint at host=127.0.0.1 port={port}"):
        run(second)
    first.close()
    second.close()


def test_its_folder_is_that_of_the_runs_file(tmp_path):
    given = {"output_dir": "out", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d.jsonl"}},
             "environment": {"kind": "program", "command": "python my_agent.py"}}  # fmt: skip
    config = configured(RunConfig, given, ["environment.max_turns=3"], tmp_path)
    assert (config.environment.folder, config.environment.max_turns) == (str(tmp_path), 3)
    with pytest.raises(InputError, match="it is empty"):
        configured(RunConfig, {**given, "environment": {"kind": "program", "command": " "}}, [], tmp_path)
