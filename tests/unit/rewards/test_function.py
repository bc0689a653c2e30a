"""Reward functions of users run apart from the trainer, and whatever they do costs only what they were given."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from dapo_mega.errors import InputError
from dapo_mega.rewards import function as function_module
from dapo_mega.rewards import processes as processes_module
from dapo_mega.rewards.function import FunctionReward
from dapo_mega.rewards.processes import CallError, WorkerProcess, end_tree
from dapo_mega.rewards.records import RewardRecord, Score, ScoringFailure

OWN = Path(__file__).parent / "own_rewards.py"
REPOSITORY = Path(__file__).parents[3]

pytestmark = pytest.mark.timeout(180)


def record(response, **others):
    values = {
        "prompt": "2+2?",
        "messages": ({"role": "user", "content": "Sum: 2+2?"},),
        "token_ids": np.array([1, 2, 3], np.int32),
        "finish_reason": "length",
        "ground_truth": "4",
        "data_source": "sums",
        "fields": {"level": 3},
    }
    return RewardRecord(response=response, **{**values, **others})


@contextlib.contextmanager
def reward(name, **settings):
    own = FunctionReward(f"{OWN}:{name}", **{"num_workers": 1, **settings})
    try:
        yield own
    finally:
        own.close()


def scores(name, responses, **settings):
    with reward(name, **settings) as own:
        return own.score([record(response) for response in responses])


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_scores_come_in_the_order_of_the_records_whatever_the_batches():
    responses = ["x" * (i % 7) for i in range(40)]
    assert [score.value for score in scores("length", responses, max_responses=3, num_workers=2)] == [
        len(response) for response in responses
    ]


def test_a_function_has_settings_and_a_class_is_made_once_with_them():
    assert scores("scaled", ["ab", "c"], settings={"by": 3}) == [Score(6.0), Score(3.0)]
    assert scores("Counting", ["a"] * 3, settings={"start": 5}, max_responses=1) == [Score(6.0), Score(7.0), Score(8.0)]
    for name, settings, said in (
        ("scaled", {"bye": 3}, r"it takes \(records, by\) and is called with \(records, bye=...\)"),
        ("scaled", {}, "cannot be called with one argument"),
        ("Counting", {"begin": 1}, r"it takes \(start=0\) and is called with \(begin=...\)"),
        ("Refusing", {}, r"it raises OSError: no model here \(line \d+\)"),
        ("Uncallable", {}, "what the class makes cannot be called"),
    ):
        with reward(name, settings=settings) as own, pytest.raises(InputError, match=said):
            own.load()


def test_a_function_may_be_async_and_say_more_than_a_number():
    assert scores("verdicts", ["4", "5"]) == [
        Score(0.5, True, {"tokens": 3.0, "level": 3.0}, "4"),
        Score(0.5, False, {"tokens": 3.0, "level": 3.0}, "5"),
    ]


def test_a_function_sees_prompt_response_truth_and_the_other_columns():
    assert scores("seen", ["four"]) == [Score(1.0)]


def test_what_ends_a_call_costs_only_its_own_response():
    responses = ["raise", "a", "exit", "leave", "b", "segfault", "memory", "nan", "huge", "c", "hang", "d"]
    responses += ["half", "other", "e"]
    results = scores("fragile", responses, time_limit_s=2.0, retries=1)
    assert [isinstance(result, Score) for result in results] == [len(response) == 1 for response in responses]
    reasons = {
        response: result.reason
        for response, result in zip(responses, results, strict=True)
        if isinstance(result, ScoringFailure)
    }
    expected = {
        "raise": "ValueError: a bad response", "exit": "exit status 3", "leave": "SystemExit: 1",
        "segfault": "SIGSEGV", "memory": "MemoryError", "nan": "score=nan", "huge": "score=1e+39",
        "hang": "longer than 2 s", "half": "longer than 2 s", "other": "with something else: it is int",
    }  # fmt: skip
    assert {response for response, text in expected.items() if text not in reasons[response]} == set()
    assert "own_rewards.py" in results[0].detail
    assert "a bad response" in results[0].detail


def test_a_process_that_is_stopped_between_calls_costs_its_time_limit_and_no_score():
    with reward("where", time_limit_s=2.0) as own:
        (first,) = own.score([record("")])
        os.kill(int(first.value), signal.SIGSTOP)
        later = own.score(
            [record("x" * 30_000 + str(i)) for i in range(64)]
        )  # More than fits into what it does not read.
    assert {score.value for score in later} != {first.value}
    assert all(isinstance(score, Score) for score in later)
    wait_until(lambda: gone(int(first.value)))


def of_the_function(capfd):
    """What came of it into this process's own output, into which threads of other tests may still print."""
    lines = "".join(capfd.readouterr()).splitlines()
    return [line for line in lines if re.search("printed|past Python|Logging error|Traceback", line)]


def test_lines_that_no_disk_takes_are_left_out(capfd):
    with reward("length") as own:
        own.log_to(Path("/dev/full"))
        assert own.score([record("a")]) == [Score(1.0)]
        wait_until(lambda: "printed" in own._output.tail())
    assert of_the_function(capfd) == []


def test_a_fork_that_returns_from_the_function_answers_nothing():
    assert [score.value for score in scores("forking", ["a"] * 4, max_responses=1)] == [1, 2, 3, 4]


def test_an_answer_counts_for_the_request_that_it_is_for_only():
    # Its first request it answers twice; what is left over was taken for the answer to the next one.
    assert [score.value for score in scores("twice", ["a", "b", "c"], max_responses=1)] == [9.0] * 3


def test_an_answer_is_text_that_files_can_hold():
    assert scores("surrogate", ["a"]) == [Score(0.0, answer="half ?")]


def test_a_call_that_fails_once_is_tried_again(tmp_path):
    with reward("once", retries=1) as own:
        assert own.score([record("", fields={"marker": str(tmp_path / "tried")})]) == [Score(2.0)]


def test_a_function_that_only_hangs_is_given_up_soon():
    results = scores("fragile", ["hang"] * 60, time_limit_s=0.05, retries=0, max_responses=3)
    assert all(isinstance(result, ScoringFailure) for result in results)
    assert sum("not tried" in result.reason for result in results) == 60 - 8 * 3


def test_calls_that_fail_have_a_time_in_all(monkeypatch):
    monkeypatch.setattr(function_module, "_BUDGET_LIMITS", 2)
    with reward("fragile", time_limit_s=1.0, max_responses=1) as own:
        results = own.score([record(response) for response in ["a", "hang"] * 10])
        assert [isinstance(result, Score) for result in results] == [True, False] * 2 + [False] * 16
        assert sum("not tried" in result.reason for result in results[4:]) == 16
        assert own.score([record("a")]) == [Score(1.0)]  # Calls of score stand alone until somebody tells steps.


def interrupted(deadline, descriptor):
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["started", "asked"])
def test_a_call_is_over_when_its_reward_is_closed_or_interrupted(moment, monkeypatch):
    worker = WorkerProcess("rewards.function_worker", {"path": f"{OWN}:fragile", "memory_limit_mib": 4096})
    if moment == "started":
        popen = subprocess.Popen

        def killed_meanwhile(*arguments, **options):
            process = popen(*arguments, **options)
            worker.kill()  # By another thread, which knows of no process yet.
            return process

        monkeypatch.setattr(subprocess, "Popen", killed_meanwhile)
        with pytest.raises(CallError, match="was ended"):
            worker.start()
    else:
        monkeypatch.setattr(processes_module, "receive_before", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.start()
    assert worker._process is None  # Nothing is left that could answer.


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.py:score", "nowhere.py:score: the file does not exist"),
        ("no_such_package.rewards:score", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{OWN}:lenght", "there is no 'lenght'; did you mean 'length'?"),
        (f"{OWN}:OWN", "there is no 'OWN'"),
        (f"{OWN}:np", "it is module, not a function"),
        (f"{OWN}:of_one", r"of_one(prompt, response) cannot be called with one argument"),
        (f"{OWN}:too_few", "it returned 2 results for 1 records"),
        (f"{OWN}:nothing", "it returned None; it must return a list with one result per record"),
        (f"{OWN}:texts", "it returned a score='1.0' (str); it must be a number"),
        (f"{OWN}:unknown_key", "the unknown key 'accuracy'; keys are score, correct, parts, answer"),
        (f"{OWN}:odd_part", "a part called 'a b' (str)"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(path, message):
    own = FunctionReward(path, num_workers=1)
    with contextlib.closing(own), pytest.raises(InputError, match=re.escape(message)) as caught:
        own.score([record("x")])
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_imported_is_named_with_the_cause(tmp_path):
    for name, source, cause in (
        ("broken.py", "def score(:", "SyntaxError: invalid syntax (broken.py, line 1)"),
        (
            "lacking.py",
            "import os\nimport not_installed\n",
            "ModuleNotFoundError: No module named 'not_installed' (line 2)",
        ),
        ("script.py", "raise SystemExit(1)", "SystemExit: 1 (line 1)"),
    ):
        (tmp_path / name).write_text(source)
        own = FunctionReward(f"{tmp_path / name}:score", num_workers=1)
        with contextlib.closing(own), pytest.raises(InputError, match=re.escape(cause)):
            own.load()


def test_an_absent_column_is_named_with_those_there_are():
    (result,) = scores("absent_field", ["x"], retries=0)
    assert "KeyError: 'difficulty'" in result.reason
    assert "has: level" in result.reason


def test_what_a_function_prints_and_starts_stays_with_it(tmp_path, capfd):
    with reward("noisy") as own:
        own.log_to(tmp_path / "output.log")
        (score,) = own.score([record("x")])
        pids = [int(pid) for pid in score.parts.values()]
        assert not any(gone(pid) for pid in pids)
        wait_until(lambda: "past Python" in (tmp_path / "output.log").read_text())
    wait_until(lambda: all(gone(pid) for pid in pids))  # The kernel may still be ending the last one.
    assert "printed by the function" in (tmp_path / "output.log").read_text()
    assert of_the_function(capfd) == []


def test_a_process_that_has_just_ended_hides_no_other_from_the_end(monkeypatch):
    ended, leader, other = (
        subprocess.Popen(command, start_new_session=True) for command in (["true"], ["sleep", "60"], ["sleep", "60"])
    )
    descendants = [psutil.Process(process.pid) for process in (ended, other)]
    ended.wait(30)
    monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: descendants)
    end_tree(leader.pid)
    wait_until(lambda: gone(other.pid))
    assert leader.wait(30) == -signal.SIGKILL


KILLED = f"""
import sys
sys.path.insert(0, {str(OWN.parent)!r})
import numpy as np
from dapo_mega.config.components import CodeComponent
from dapo_mega.rewards.code import CodeReward
from dapo_mega.rewards.function import FunctionReward
from dapo_mega.rewards.records import RewardRecord
from dapo_mega.rewards.sandbox import seccomp
code = CodeReward(CodeComponent(allow_code=True)) if seccomp.is_supported() else None
own = FunctionReward("{OWN}:noisy", num_workers=1)
(score,) = own.score([RewardRecord("", (), "", np.array([1]), "stop", "")])
print(*(int(pid) for pid in score.parts.values()), flush=True)
sys.stdin.read()
"""


def test_nothing_of_a_reward_outlives_a_killed_trainer_even_if_it_is_stopped():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 3
    assert not any(gone(pid) for pid in pids)
    started = psutil.Process(trainer.pid).children(recursive=True)
    for process in started:
        process.suspend()
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate(timeout=30)
    wait_until(lambda: all(gone(process.pid) for process in started))
