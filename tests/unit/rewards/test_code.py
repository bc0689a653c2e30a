"""Unit tests as a reward: what passes, what cannot pass, and what a solution cannot do."""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from dapo_mega.config.components import CodeComponent
from dapo_mega.errors import InputError
from dapo_mega.rewards import code as code_module
from dapo_mega.rewards.code import CodeReward, extract_code
from dapo_mega.rewards.code_tests import prints_the_same, read_cases, returns_the_same
from dapo_mega.rewards.records import RewardRecord, Score, ScoringFailure
from dapo_mega.rewards.sandbox import seccomp
from tests.unit.rewards import hostile_code
from tests.unit.rewards.growth import growing_too_fast

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not seccomp.is_supported(), reason="solutions run on Linux on x86_64 and aarch64 only"),
]
DOUBLES = json.dumps({"inputs": ["21\n", "4\n"], "outputs": ["42\n", "8\n"]})
DOUBLE = "print(2 * int(input()))"


def record(code: str, tests: str, **fields: object) -> RewardRecord:
    return RewardRecord("", (), f"So:\n```python\n{code}\n```\n", (), "stop", tests, fields=fields)


@pytest.fixture(scope="module", params=["namespaces", "filter"])
def reward(request):
    """With the isolation that the kernel allows at best, and with what is left where it allows no namespaces."""
    settings = CodeComponent(allow_code=True, time_limit_s=0.5, memory_limit_mib=256, partial_credit=True)
    try:
        reward = CodeReward(settings, request.param)
    except InputError as error:
        if request.param == "namespaces":
            pytest.skip(f"this machine allows no namespaces: {error}")
        raise
    yield reward
    reward.close()


def test_solutions_pass_by_what_they_do(reward):
    call = json.dumps({"fn_name": "f", "inputs": [[21], [4]], "outputs": [42, [8]]})
    solution = "class Solution:\n    def f(self, x: List[int]):\n        return 2 * x"
    asserts = json.dumps(["assert f(21) == 42", "assert f(4) == 8"])
    function = "def f(x):\n    return 2 * x"
    check = "def check(candidate):\n    assert candidate(21) == 42"
    module = "from solution import f\ndef test_double():\n    assert f(4) == 8"
    in_place = "values = [3, 1]\nsort(values)\nassert values == [1, 3]"
    raises = "try:\n    f('x')\n    assert False\nexcept TypeError:\n    pass"
    objects = "class C:\n    def put(self, x): self.x = x\n    def get(self): return self.x"
    in_thread = f"import threading\nthreading.stack_size(2**26)\nthreading.Thread(target=lambda: {DOUBLE}).start()"
    at_exit = "import atexit, sys\nx = 2 * int(input())\natexit.register(lambda: sys.stdout.write(str(x)))"
    loop = "\nfor got, wanted in zip(r, [3, 1, 2]):\n    assert got == wanted"
    three, some = (f"r = f([3, 1, 2])\nassert {claim}{loop}" for claim in ("len(r) == 3", "r"))
    lying = "first = iter([1] + [0] * 9)\ndef f(x): return L()\nclass L:\n    def __iter__(self): return iter(())"
    cases = [
        (record(DOUBLE, DOUBLES), 1.0),
        (record(f"{DOUBLE}\nimport sys\nsys.exit()", DOUBLES), 1.0),
        (record(f"{DOUBLE}\nexit()", DOUBLES), 1.0),
        (record(f"{DOUBLE}\nquit(0)", DOUBLES), 1.0),
        (record("print(int(input()) + 1)", json.dumps({"inputs": ["9" * 5000], "outputs": ["1" + "0" * 5000]})), 1.0),
        # 16 MiB of NUL, six times as long in JSON, above what a message may have.
        (record("import os\ndef f(x):\n    os.ftruncate(1, 8 << 20); os.ftruncate(3, 8 << 20)", call), 0.0),
        (record(in_thread, DOUBLES), 1.0),
        (record(at_exit, DOUBLES), 1.0),
        (record("print(42)", DOUBLES), 0.5),
        (record(f"{DOUBLE}\n1 / 0", DOUBLES), 0.0),
        (record("x = ", DOUBLES), 0.0),
        (record(solution, call), 1.0),
        (record(function, call), 1.0),
        (record(function, asserts), 1.0),
        (record("def f(x):\n    return 42", asserts), 0.5),
        (record(function, check, entry_point="f"), 1.0),
        (record(function.replace("2", "3"), check, entry_point="f"), 0.0),
        (record(function, module), 1.0),
        (record("def sort(x):\n    x.sort()", in_place), 1.0),
        (record("def sort(x):\n    return sorted(x)", in_place), 0.0),
        (record("def f(x):\n    return x + 1", raises), 1.0),
        (record("def f(x):\n    return x", raises), 0.0),
        (record(objects, "c = C()\nc.put(3)\nassert c.get() == 3"), 1.0),
        (record("def f(x):\n    yield from x", "assert list(f([1, 2])) == [1, 2]"), 1.0),
        (record("def f(g, x):\n    return g(x)", "assert f(lambda y: y + 1, 2) == 3"), 1.0),
        (record(f"{lying}\n    def __len__(self): return 3", three), 0.0),
        (record(f"{lying}\n    def __len__(self): return 3 * next(first)", three), 0.0),
        (record(f"{lying}\n    def __len__(self): return 0\n    def __bool__(self): return True", some), 0.0),
        (record("from collections import deque\ndef f(x): return deque(x)", three), 1.0),
        (record("from collections import deque\ndef f(x): return deque(x)", some), 1.0),
        (record("from collections import deque\ndef f(x): return deque(x[:2])", three), 0.0),
        (RewardRecord("", (), "I do not know.", (), "stop", DOUBLES), 0.0),
    ]
    scores = reward.score([case for case, _ in cases])
    wrong = [
        (case.response, score, value)
        for (case, value), score in zip(cases, scores, strict=True)
        if not isinstance(score, Score) or (score.value, score.correct) != (value, value == 1.0)
    ]
    assert wrong == []


def test_no_hostile_program_passes_or_harms(reward, tmp_path_factory):
    folder = tmp_path_factory.mktemp("victim")
    folder.chmod(0o777)
    (folder / "secret").write_text("42")
    (folder / "secret").chmod(0o644)
    written = [Path(top) / "written" for top in ("/", "/etc", "/usr/lib", "/dev/shm", folder)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        programs = hostile_code.programs(str(folder), os.getpid(), server.getsockname()[1])
        tests = json.dumps({"inputs": ["21\n"], "outputs": ["42\n"]})
        scores = reward.score([record(code, tests) for code in programs.values()])
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    failed = [
        (name, score)
        for name, score in zip(programs, scores, strict=True)
        if not isinstance(score, Score) or score.value != 0 or score.correct is not False
    ]
    assert failed == []
    assert [path for path in written if path.exists()] == []
    deadline = time.monotonic() + 10
    while left := processes_of_sandboxes(reward):  # The kernel may still be ending the last one.
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert [score.value for score in reward.score([record(DOUBLE, DOUBLES)])] == [1.0]


@pytest.mark.parametrize("reward", ["filter"], indirect=True)  # Verdicts are made in the same way with namespaces.
def test_no_hostile_function_passes_any_assertion(reward):
    tests = json.dumps(hostile_code.ASSERTIONS)
    scores = reward.score([record(code, tests) for code in hostile_code.FUNCTIONS.values()])
    failed = [
        (name, score)
        for name, score in zip(hostile_code.FUNCTIONS, scores, strict=True)
        if not isinstance(score, Score) or score.value != 0
    ]
    assert failed == []
    # The assertions can be passed, but for the one on a text.
    (score,) = reward.score([record("def f(x):\n    return 2 * x", tests)])
    assert score.value == (len(hostile_code.ASSERTIONS) - 1) / len(hostile_code.ASSERTIONS)


def processes_of_sandboxes(reward):
    """Command lines of processes below the sandboxes, but for the sandboxes themselves."""
    own, parents = set(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
        if b"from sandbox import worker" in command and fields[0] != "Z":
            own.add(int(folder.name))
    mine = [pid for pid in own if any(ancestor == os.getpid() for ancestor in _ancestors(pid, parents))]
    per_sandbox = 2 if reward.held.isolation == "namespaces" else 1
    return mine if len(mine) > 2 * per_sandbox else []


def _ancestors(pid, parents):
    while pid in parents:
        pid = parents[pid]
        yield pid


def test_slow_solutions_of_a_step_have_a_time_in_all_and_say_when_it_is_used_up(monkeypatch, caplog):
    monkeypatch.setattr(code_module, "_BUDGET_LIMITS", 2)
    calls, asserts = json.dumps({"fn_name": "f", "inputs": [[1]] * 9, "outputs": [1] * 9}), '["assert f(1) == 1"]'
    slow = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n" + DOUBLE
    hostile = [
        record("while True: pass", DOUBLES),
        record(slow.replace(DOUBLE, "print(1)"), DOUBLES),
        record("def f(x):\n    while True: pass", calls),
        record("def f(x):\n    while True: pass", asserts),
        record("import time\ntime.sleep(60)", DOUBLES),
    ]
    hostile += hostile[:4]
    good = [record(DOUBLE, DOUBLES)] * 3
    for partial_credit in (False, True):
        settings = CodeComponent(allow_code=True, time_limit_s=0.3, num_workers=1, partial_credit=partial_credit)
        with contextlib.closing(CodeReward(settings, "filter")) as reward:
            found = outcomes(reward, hostile + good)
            assert found[-3:] == ["correct"] * 3
            # What is over a tenth of a second counts, up to 0.6 s: three that end at the limit, or more by others.
            assert found[5:9] == ["cut_short"] * 4, found
            if partial_credit:
                break
            # What succeeds has all its time. Calls stand alone until somebody tells steps.
            assert outcomes(reward, [record(slow, DOUBLES)] * 2) == ["correct"] * 2
            reward.budget.begin_step()
            outcomes(reward, hostile[:4])
            assert outcomes(reward, [record(slow, DOUBLES)]) == ["cut_short"]
            reward.budget.begin_step()
            assert outcomes(reward, [record(slow, DOUBLES)]) == ["correct"]
    assert sum("solutions that fail slowly have used up the 0.6 s" in r.message for r in caplog.records) == 2


def outcomes(reward, records):
    return [score.outcome for score in reward.score(records)]


@pytest.mark.timeout(90)  # The limit is longer.
def test_a_reward_that_is_closed_waits_for_no_solution():
    reward = CodeReward(CodeComponent(allow_code=True, time_limit_s=300, num_workers=1), "filter")
    scores = []
    scoring = threading.Thread(target=lambda: scores.extend(reward.score([record("while True: pass", DOUBLES)])))
    scoring.start()
    (sandbox,) = reward._open
    while len(psutil.Process(sandbox.pid).children(recursive=True)) < 2:  # The job, and the solution.
        time.sleep(0.02)
    reward.close()
    scoring.join()
    assert [type(score) for score in scores] == [ScoringFailure]


def test_a_sandbox_that_dies_is_replaced_and_the_solution_scored(reward):
    reward.score([record(DOUBLE, DOUBLES)] * 2)
    for sandbox in list(reward._open):
        os.kill(sandbox.pid, 9)
    assert [score.value for score in reward.score([record(DOUBLE, DOUBLES)])] == [1.0]


def test_rows_without_usable_tests_are_failures_and_never_zero(reward):
    columns = [
        "",
        "[]",
        "x = 1",
        '"""Tests."""',
        "assert True",
        "class TestF:\n    pass",
        "assert f(",
        json.dumps({"inputs": ["1"], "outputs": []}),
        json.dumps([{"input": "1", "output": "2", "testtype": "functional"}]),
        json.dumps([1, 2]),
        "def check(candidate):\n    assert candidate(1) == 2",
    ]
    results = reward.score([record("def f(x):\n    return 2", column) for column in columns])
    assert [type(result) for result in results] == [ScoringFailure] * len(columns)
    (absent,) = CodeReward.score(reward, [RewardRecord("", (), "", (), "stop", "")])
    assert "ground_truth" in absent.reason


def test_modules_beyond_the_library_are_imported_only_if_named():
    code = "import numpy\nprint(int(numpy.sum([20, 22])))"
    tests = json.dumps({"inputs": [""], "outputs": ["42"]})
    values = []
    for modules in ((), ("numpy",)):
        reward = CodeReward(CodeComponent(allow_code=True, memory_limit_mib=1024, modules=modules))
        values += [score.value for score in reward.score([record(code, tests)])]
        reward.close()
    assert values == [0.0, 1.0]
    with pytest.raises(InputError, match="cannot be run safely"):
        CodeReward(CodeComponent(allow_code=True, modules=("no_such_module_anywhere",)))


def test_the_last_python_block_after_the_thoughts_is_the_solution():
    assert extract_code("```python\na\n```\nor\n```python\nb\n```\noutput:\n```\nc\n```") == "b\n"
    assert extract_code("```\nc\n```") == "c\n"
    assert extract_code("<think>```python\na\n```</think>no") is None
    assert extract_code("<think>```python\na\n```") is None  # The prompt may have opened it.
    assert extract_code("so</think>\n```python\nprint('<think>')\n```") == "print('<think>')\n"
    assert extract_code("```python\nunclosed") is None
    assert extract_code("```json\n{}\n```") is None
    assert extract_code("1. so\n   ```python\n   a\n   ```") == "   a\n"


def test_fences_that_nothing_closes_cost_no_more_than_their_length():
    assert extract_code("```python\n" * 1000 + "x\n```\n") == "```python\n" * 999 + "x\n"
    cases = ["```python\n", "```\n", " ```\n\n", "```py x\n\t", "`" * 7, "\t" * 9 + "`\n"]
    assert growing_too_fast(lambda _, text: extract_code(text), cases, lambda c, n: c * (n // len(c))) == {}


def test_outputs_agree_but_for_white_space_and_rounding():
    assert prints_the_same("1 2 \n3\n\n", "1 2\n3", 0.0)
    assert prints_the_same("0.3333333\n", "0.33333333", 1e-6)
    assert prints_the_same("1.0", "1", 0.0)
    assert not prints_the_same("0.34", "0.33", 1e-6)
    assert not prints_the_same("1\n2", "1 2", 1e-6)
    assert not prints_the_same("1.0000001", "1", 1e-6)
    assert not prints_the_same("9" * 5000, "9" * 4999 + "8", 1e-6)


def test_returned_values_agree_with_json():
    assert returns_the_same([{"tuple": [1, 2]}], [[1, 2]], 0.0)
    assert returns_the_same({"dict": [[1, "a"]]}, {"1": "a"}, 0.0)
    assert returns_the_same({"int": hex(2**70)}, 2**70, 0.0)
    assert returns_the_same(3, [3], 0.0)
    assert returns_the_same(0.1, 0.10000001, 1e-6)
    for returned, expected in ((1, True), (True, 1), (None, 0), ({"set": [1]}, [1]), ("1", 1), ({}, None), ([], 0)):
        assert not returns_the_same(returned, expected, 1e-6), (returned, expected)


def test_public_forms_of_tests_are_read():
    live = json.dumps([{"input": "[1, 2]\n3", "output": "4", "testtype": "functional"}])
    (case,) = read_cases(live, function="f")
    assert (case.arguments, case.expected) == (([1, 2], 3), 4)
    (case,) = read_cases([{"input": "1\n", "output": "2\n"}])
    assert (case.stdin, case.expected) == ("1\n", "2\n")
    (case,) = read_cases({"inputs": [["1", "2"]], "outputs": ["3"]})
    assert case.stdin == "1\n2"
