"""Functions as tools: what models are told, what is never run, and what is never a reward."""

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from pydantic import BaseModel

from dapo_mega.algorithms.own_code import MisuseError
from dapo_mega.environments import built_in_tools
from dapo_mega.environments.built_in_tools import PythonTool, calculator
from dapo_mega.environments.failures import EnvironmentFailure
from dapo_mega.environments.tool_functions import ArgumentsError, tool_function
from dapo_mega.environments.tools import ToolEnvironment
from dapo_mega.rewards.sandbox import seccomp
from dapo_mega.rewards.sandbox.client import SandboxError

ROOT = Path(__file__).resolve().parents[3]
TASK = {"prompt": "?", "messages": [], "ground_truth": "", "data_source": "", "fields": {"secrets": '{"blue": 41}'}}
needs_sandbox = pytest.mark.skipif(not seccomp.is_supported(), reason="no sandbox on this machine")


def call(name, arguments=None, problem="", number=0):
    return {"id": f"c{number}", "name": name, "arguments": arguments, "problem": problem}


def turn(*calls, finish_reason="stop"):
    numbered = [{**one, "id": f"c{index}"} for index, one in enumerate(calls)]
    return {
        "text": "", "reasoning": "", "calls": numbered, "finish_reason": finish_reason, "turn": 0, "token_ids": [1],
    }  # fmt: skip


def counted(observation):
    """What was counted, without zeros, and without what is not a count."""
    assert observation.keys() <= {"messages", "parts", "done", "stop"}
    assert all(name.startswith("tool_") for name in observation["parts"])
    return {name.removeprefix("tool_"): value for name, value in observation["parts"].items() if value}


def told(observation):
    return [message["content"] for message in observation["messages"]]


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    They may be negative.

    Args:
        a: The first one,
            in full.
        b (int): The second: any.

    Returns:
        Their sum.
    """
    return a + b


class Options(BaseModel):
    limit: int = 3


def search(
    query: str,
    kind: Literal["web", "news"] = "web",
    weights: list[float] | None = None,
    pair: tuple[int, int] = (1, 2),
    options: Options = Options(),  # noqa: B008
    schema: dict[str, int] | None = None,
    nothing: Any = object(),  # noqa: B008
):
    """Search."""
    return [query, kind, weights, pair, options.limit, schema]


def fails(text: str):
    """Fail."""
    raise KeyError(text)


def outage():
    """Ask a server that is down."""
    raise EnvironmentFailure("the server is down")


class Notes:
    """A class of tools."""

    def __init__(self, first="-"):
        self.lines, self.closed = [first], 0

    def reset(self, task, seed):
        self.lines.append(f"{task['prompt']}{seed}")
        return {"text": "begin"}

    def write(self, line: str) -> str:
        """Write a line."""
        self.lines.append(line)
        return ", ".join(self.lines)

    @staticmethod
    def fixed() -> str:
        """Say always the same."""
        return "fixed"

    def _hidden(self):
        pass

    def snapshot(self):
        return "\n".join(self.lines).encode()

    def restore(self, state):
        self.lines = state.decode().split("\n")

    def close(self):
        self.closed += 1


class More(Notes):
    fixed = None

    def write(self, line: str) -> str:
        """Write a line twice."""
        return super().write(line + line)

    async def erase(self) -> None:
        """Erase all."""
        self.lines.clear()


def test_a_schema_comes_from_hints_and_docstring():
    (tool,) = ToolEnvironment(add).tools
    expected = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first one, in full."},
                    "b": {"type": "integer", "default": 2, "description": "The second: any."},
                },
                "required": ["a"],
            },
        },
    }
    assert json.dumps(tool) == json.dumps(expected)


# What other tests have left to be collected is not this one's.
@pytest.mark.filterwarnings("error", "default::pytest.PytestUnraisableExceptionWarning")
def test_a_schema_has_what_the_hints_say():
    parameters = ToolEnvironment([search]).tools[0]["function"]["parameters"]
    assert [*parameters["properties"]] == ["query", "kind", "weights", "pair", "options", "schema", "nothing"]
    assert parameters["properties"]["kind"] == {"type": "string", "enum": ["web", "news"], "default": "web"}
    assert parameters["properties"]["nothing"] == {}
    assert parameters["required"] == ["query"]
    assert parameters["$defs"]["Options"]["properties"] == {"limit": {"type": "integer", "default": 3}}


def test_arguments_arrive_as_the_hints_have_them():
    given = {"query": "x", "weights": [1, 2.5], "pair": [3, 4], "options": {"limit": 7}, "schema": {"a": 1}}
    (content,) = told(ToolEnvironment(search).step(turn(call("search", given))))
    assert content == '["x","web",[1.0,2.5],[3,4],7,{"a":1}]'
    assert told(ToolEnvironment(add).step(turn(call("add", {"a": 40})))) == ["42"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "a: it is missing"),
        ({"a": 1, "c": 2}, "c: there is no such parameter"),
        ({"a": "1"}, "a: Input should be a valid integer, not '1'"),
        ({"a": 1.0}, "not 1.0"),
        ({"a": True}, "not True"),
        ({"a": None}, "not None"),
        ({"a": [1]}, "not [1]"),
        ({"a": "x" * 9999}, "'" + "x" * 79 + "."),
        ({"a": "\ud800"}, "Invalid JSON"),
    ],
)
def test_wrong_arguments_are_told_and_not_run(given, said):
    observation = ToolEnvironment(add).step(turn(call("add", given)))
    assert counted(observation) == {"calls": 1, "bad_arguments": 1}
    assert said in told(observation)[0]
    assert '"The first one, in full."' in told(observation)[0]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_no_argument(number):
    def half(x: float) -> float:
        """Halve."""
        return x / 2

    assert counted(ToolEnvironment(half).step(turn(call("half", {"x": number})))) == {"calls": 1, "bad_arguments": 1}
    assert told(ToolEnvironment(half).step(turn(call("half", {"x": 3})))) == ["1.5"]


def test_deep_arguments_are_wrong_arguments():
    def count(items: list[Any]) -> int:
        """Count."""
        return len(items)

    for depth in (500, 100_000):
        deep: list[Any] = []
        for _ in range(depth):
            deep = [deep]
        observation = ToolEnvironment(count).step(turn(call("count", {"items": deep})))
        assert counted(observation) == {"calls": 1, "bad_arguments": 1}


def no_docstring(x: int):
    return x


def no_hint(x):
    """Do it."""


def many(*numbers: int):
    """Do it."""


def named(**numbers: int):
    """Do it."""


def positional(x: int, /):
    """Do it."""


def unknown_hint(x: "Nowhere"):  # noqa: F821
    """Do it."""


def strange_hint(x: threading.Lock):
    """Do it."""


def strange_class(x: subprocess.Popen):
    """Do it."""


def misdescribed(x: int):
    """Do it.

    Args:
        y: Another one.
    """


def größe(x: int):
    """Do it."""


class NoTools:
    def reset(self, task, seed):
        pass


class HalfSnapshot:
    def snapshot(self):
        return b""

    def look(self) -> int:
        """Look."""
        return 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"source": no_docstring}, "no_docstring has no docstring"),
        ({"source": no_hint}, "no type hint for 'x'; write what it is, such as x: str"),
        ({"source": many}, r"takes \*numbers: int; give it parameters that have names"),
        ({"source": named}, r"takes \*\*numbers: int"),
        ({"source": positional}, "give it parameters that have names"),
        ({"source": unknown_hint}, "cannot be read: name 'Nowhere'"),
        ({"source": strange_hint}, "give plain types"),
        ({"source": strange_class}, "give plain types"),
        ({"source": misdescribed}, "describes 'y', which is no parameter"),
        ({"source": größe}, "größe cannot be a tool; give a function with a name of ASCII letters"),
        ({"source": lambda x: x}, "<lambda> cannot be a tool"),
        ({"source": 3}, "3 cannot be a tool"),
        ({"source": [add, Notes]}, "Notes cannot be a tool"),
        ({"source": {}}, "cannot be a tool"),
        ({"source": max}, "cannot|give it parameters"),
        ({"source": [add, add]}, "two tools are called add"),
        ({"source": [calculator], "built_in": ["calculator"]}, "two tools are called calculator"),
        ({}, "there is no tool; give functions, public methods or one of calculator, python"),
        ({"source": []}, "there is no tool"),
        ({"source": NoTools}, "there is no tool"),
        ({"source": HalfSnapshot}, "give it both or none"),
        ({"source": Notes, "settings": {"last": 1}}, "called with .last=...."),
        ({"source": add, "settings": {"last": 1}}, "settings are for a class"),
        ({"built_in": ["browser"]}, "no built-in tool 'browser'; there are calculator, python"),
        ({"built_in": {"calculator": {"digits": 3}}}, "settings are for a class"),
        ({"built_in": {"python": {"seconds": 3}}}, "called with .seconds=...."),
        ({"source": add, "max_unreadable": 0}, "max_unreadable is at least 1"),
        ({"source": add, "max_result_characters": 99}, "max_result_characters 100"),
    ],
)
def test_what_cannot_be_tools_is_said_at_once(arguments, said):
    with pytest.raises(MisuseError, match=said):
        ToolEnvironment(**arguments)


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        (call("add", None, "bad_json"), "bad_json", "not valid JSON"),
        (call(None, None, "bad_json"), "bad_json", "not valid JSON"),
        (call("add", None, "unclosed"), "unclosed", "has no end"),
        (call(None, None, "no_name"), "unknown", "names no tool"),
        (call("add", None, "bad_arguments"), "bad_arguments", "no JSON object"),
        (call("sub", {"a": 1}), "unknown", "There is no tool 'sub'. The tools are: add, fails, outage."),
        (call("__init__", {}), "unknown", "There is no tool"),
        (call("\ud800", {}), "unknown", "There is no tool"),
        (call("x" * 9999, {}), "unknown", "'" + "x" * 79 + "."),
        (call("fails", {"text": "no page"}), "errors", "KeyError: 'no page'"),
    ],
)
def test_what_goes_wrong_is_told_and_counted_and_the_other_calls_run(wrong, kind, said):
    environment = ToolEnvironment([add, fails, outage])
    observation = environment.step(turn(call("add", {"a": 1}), wrong, call("add", {"a": 2})))
    assert counted(observation) == {"calls": 3, kind: 1}
    first, second, third = observation["messages"]
    assert (first["content"], third["content"]) == ("3", "4")
    assert said in second["content"]
    assert "Traceback" not in second["content"]
    assert [message["tool_call_id"] for message in observation["messages"]] == ["c0", "c1", "c2"]
    assert {message["role"] for message in observation["messages"]} == {"tool"}
    assert second["name"][:1000] == (wrong["name"] or "").replace("\ud800", "?")[:1000]
    assert len(second["name"].encode()) <= 4000


def test_every_count_is_there_in_every_turn():
    environment = ToolEnvironment(add)
    kinds = {"calls", "bad_json", "unclosed", "unknown", "bad_arguments", "cut_off", "errors"}
    for action in (turn(), turn(call("add", {"a": 1})), turn(call("add"), finish_reason="length")):
        assert environment.step(action)["parts"].keys() == {f"tool_{kind}" for kind in kinds}


def test_a_cut_off_turn_runs_nothing():
    ran = []

    def note(x: int):
        """Note it."""
        ran.append(x)

    environment = ToolEnvironment(note)
    whole, cut = call("note", {"x": 1}), call("note", None, "unclosed")
    observation = environment.step(turn(whole, cut, finish_reason="length"))
    assert ran == []
    assert counted(observation) == {"calls": 2, "cut_off": 2}
    assert "cut off" in told(observation)[0]
    assert "done" not in observation
    environment.step(turn(whole))
    assert ran == [1]


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_turn_without_a_call_ends_the_trajectory(finish_reason):
    observation = ToolEnvironment(add).step(turn(finish_reason=finish_reason))
    assert observation["done"] is True
    assert "stop" not in observation
    assert counted(observation) == {}


@pytest.mark.parametrize("unread", [turn(call("add", None, "bad_json")), turn(call("add"), finish_reason="length")])
def test_unreadable_turns_in_a_row_end_the_trajectory(unread):
    environment = ToolEnvironment(add, max_unreadable=3)
    some = turn(call("sub", {}), call("add", None, "bad_json"))
    for action in (unread, unread, some, unread, unread):
        assert "done" not in environment.step(action)
    last = environment.step(unread)
    assert (last["done"], last["stop"], counted(last)["calls"]) == (True, "parse", 1)


def test_a_failure_of_infrastructure_is_raised_and_not_told():
    with pytest.raises(EnvironmentFailure, match="the server is down"):
        ToolEnvironment(outage).step(turn(call("outage", {})))

    async def group() -> None:
        """Ask several servers."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(outage))

    environment = ToolEnvironment(group)
    with pytest.raises(EnvironmentFailure, match="the server is down"):
        environment.step(turn(call("group", {})))
    environment.close()


def test_an_exit_is_told_and_an_interrupt_is_not():
    def parse(line: str):
        """Do what a command line says."""
        argparse.ArgumentParser("parse").parse_args(line.split())

    async def wait(line: str):
        """The same, later."""
        await asyncio.sleep(0)
        parse(line)

    def interrupt():
        """Interrupt."""
        raise KeyboardInterrupt

    environment = ToolEnvironment([parse, wait, interrupt, add])
    wrong = [call(name, {"line": "--made-up"}) for name in ("parse", "wait")]
    observation = environment.step(turn(*wrong, call("add", {"a": 1})))
    assert told(observation) == ["SystemExit: 2", "SystemExit: 2", "3"]
    assert counted(observation) == {"calls": 3, "errors": 2}
    with pytest.raises(KeyboardInterrupt):
        environment.step(turn(call("interrupt", {})))
    environment.close()


def test_a_class_is_made_once_and_has_its_methods_as_tools():
    environment = ToolEnvironment(Notes, settings={"first": "+"})
    assert [tool["function"]["name"] for tool in environment.tools] == ["write", "fixed"]
    assert environment.reset(TASK, 5) == {"text": "begin"}
    assert told(environment.step(turn(call("write", {"line": "a"}), call("fixed", {})))) == ["+, ?5, a", "fixed"]
    assert told(environment.step(turn(call("write", {"line": "b"})))) == ["+, ?5, a, b"]
    assert told(ToolEnvironment(Notes).step(turn(call("write", {"line": "c"})))) == ["-, c"]
    for name in ("reset", "close", "snapshot", "restore", "_hidden", "__init__"):
        assert counted(environment.step(turn(call(name, {})))) == {"calls": 1, "unknown": 1}


def test_a_derived_class_has_the_tools_that_it_inherits():
    environment = ToolEnvironment(More)
    assert [tool["function"]["name"] for tool in environment.tools] == ["write", "erase"]
    assert environment.tools[0]["function"]["description"] == "Write a line twice."
    assert told(environment.step(turn(call("erase", {}), call("write", {"line": "a"})))) == ["null", "aa"]
    environment.close()

    class Less(Notes):
        fixed = None

    assert [tool["function"]["name"] for tool in ToolEnvironment(Less).tools] == ["write"]


def test_an_object_is_closed_once_even_if_that_fails():
    environment = ToolEnvironment(Notes)
    notes = environment._own
    environment.close()
    environment.close()
    assert notes.closed == 1

    class Bad:
        async def look(self) -> str:
            """Look."""
            return "seen"

        async def close(self):
            raise OSError("gone")

    environment = ToolEnvironment(Bad)
    assert told(environment.step(turn(call("look", {})))) == ["seen"]
    loop = environment._runner.get_loop()
    with pytest.raises(OSError, match="gone"):
        environment.close()
    assert loop.is_closed()
    environment.close()


def test_a_snapshot_holds_the_object_and_the_unreadable_turns():
    unread = turn(call("write", None, "unclosed"))
    environment = ToolEnvironment(Notes)
    environment.reset(TASK, 5)
    environment.step(turn(call("write", {"line": "a"})))
    environment.step(unread)
    state = environment.snapshot()
    other = ToolEnvironment(Notes)
    other.restore(state)
    assert told(other.step(unread)) == told(environment.step(unread))
    assert other.step(unread)["stop"] == "parse"
    assert told(other.step(turn(call("write", {"line": "b"})))) == ["-, ?5, a, b"]
    functions = ToolEnvironment(add)
    functions.step(unread)
    other = ToolEnvironment(add, max_unreadable=2)
    other.restore(functions.snapshot())
    assert other.step(unread)["stop"] == "parse"

    class Plain:
        def look(self) -> int:
            """Look."""
            return 1

    assert not hasattr(ToolEnvironment(Plain), "snapshot")
    assert not hasattr(ToolEnvironment(Plain), "restore")


def test_coroutines_are_run_to_their_end_in_one_loop():
    loops = []

    async def wait(x: int) -> int:
        """Wait."""
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0.001)
        return x

    async def cancel() -> None:
        """Be cancelled."""
        raise asyncio.CancelledError

    environment = ToolEnvironment([wait, cancel, add])
    calls = [call("wait", {"x": 1}), call("add", {"a": 1}), call("wait", {"x": 2}), call("cancel", {})]
    observation = environment.step(turn(*calls))
    assert told(observation)[:3] == ["1", "3", "2"]
    assert counted(observation) == {"calls": 4, "errors": 1}
    assert len(set(loops)) == 1
    environment.close()
    assert loops[0].is_closed()


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ("as it is\n", "as it is\n"),
        (None, "null"),
        ({"a": [1, 2.5, None, True], "ü": "ß"}, '{"a":[1,2.5,null,true],"ü":"ß"}'),
        (Point(3), '{"x":3}'),
        (Options(), '{"limit":3}'),
        ("a\ud800b", "a?b"),
    ],
)
def test_results_are_text_or_json(result, content):
    def give():
        """Give it."""
        return result

    assert told(ToolEnvironment(give).step(turn(call("give", {})))) == [content]


def test_a_result_that_is_not_of_json_is_the_tools_fault():
    def give():
        """Give it."""
        return threading.Lock()

    with pytest.raises(MisuseError, match="the tool give returned lock, which is not of JSON; return a str"):
        ToolEnvironment(give).step(turn(call("give", {})))


@pytest.mark.parametrize("length", [200, 201, 100_000])
def test_a_long_result_is_cut_in_its_middle(length):
    def give(fail: bool):
        """Give it."""
        text = "a" * (length // 2) + "b" * (length - length // 2)
        if fail:
            raise ValueError(text)
        return text

    environment = ToolEnvironment(give, max_result_characters=200)
    content, failed = told(environment.step(turn(call("give", {"fail": False}), call("give", {"fail": True}))))
    assert len(content) == len(failed) == 200
    assert content.startswith("aaa")
    assert content.endswith("bbb")
    assert (f"the middle of {length} characters is left out" in content) == (length > 200)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3*(2+1)^2", "27"), ("2**10", "1024"), ("2^-1", "0.5"), ("0.1 + 0.2", "0.3"), ("1/3", "0.333333333333333"),
        ("9^40", str(9**40)), ("30!", "265252859812191058636308480000000"), ("1e5 + 1.5e-1", "100000.15"),
        ("12345678901234567890 + 1", "12345678901234567891"), ("sqrt(sqrt(16))", "2"), ("-2^2", "-4"), ("5.", "5"),
        ("sin(pi/2) + asin(1)*2/pi", "2"), ("ln(e)", "1"), ("(1+2)(3)", "9"), ("6 ÷ 2 × 3 − 1", "8"),
        ("1e400", "1.0e+400"), (r"\frac{1}{4}", "0.25"), ("10*arctan(1)", "7.85398163397448"),
    ],
)  # fmt: skip
def test_the_calculator_calculates(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "x + 1", "1/0", "6/2(1+2)", "1,000", "7 % 3", "7 // 2", "2 3", "log(10)", "sqrt(-1)", "9^9^9", "9^(9^9)",
     "(((9^400)^400)^400)^400", "__import__('os')", "1 = 1", "1" * 301, "(" * 300, "1" * 299 + "e", "2\ud800"],
)  # fmt: skip
def test_the_calculator_refuses_what_it_does_not_read(expression):
    environment = ToolEnvironment(built_in=["calculator"])
    observation = environment.step(turn(call("calculator", {"expression": expression})))
    assert (len(expression) > 300) == ("more than 300 characters" in told(observation)[0])
    assert counted(observation) in ({"calls": 1, "errors": 1}, {"calls": 1, "bad_arguments": 1})


@pytest.fixture(scope="module")
def python():
    tool = PythonTool(time_limit_s=0.5, memory_limit_mib=128)
    yield tool.python
    tool.close()


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "The program printed nothing."),
        ("print('a')\n1/0", "a\nTraceback (most recent call last):\n  File \"solution.py\", line 2, in <module>\n"
         "ZeroDivisionError: division by zero\nThe program ended with status 1."),
        ("while True: pass", "The program took longer than 0.5 s."),
        ("x = bytearray(2**29)", "MemoryError\nThe program ended with status 1."),
        ("print('x' * 2**24)", "OSError: [Errno 27] File too large\nThe program ended with status 1."),
        ("print(", "SyntaxError: '(' was never closed"),
        ("raise SystemExit(3)", "The program ended with status 3."),
        ("import os; os.kill(os.getpid(), 9)", "The program was ended by SIGKILL."),
        ("import os; os.fork()", "PermissionError"),
        ("input()", "EOFError"),
        ("print('\\udc80')", "\ufffd"),
        ("\ud800", "surrogates not allowed"),
        ("\0", "null bytes"),
    ],
)  # fmt: skip
def test_a_program_is_run_and_what_it_does_is_told(python, code, said):
    assert python(code)[-3000:].endswith(said) or said in python(code)
    assert "/sandbox/" not in python(code)


@needs_sandbox
def test_programs_share_nothing(python):
    assert python("import math; math.x = 1; open('/tmp/x', 'w').write('1')\nprint(math.x)").endswith(("1", "status 1."))
    assert "AttributeError" in python("import math; print(math.x)")
    assert "Error" in python("print(open('/tmp/x').read())")


@needs_sandbox
def test_the_sandbox_starts_with_the_first_program_and_ends_with_close():
    before = {child.pid for child in psutil.Process().children()}
    environment = ToolEnvironment(add, built_in={"python": {"time_limit_s": 2.0, "memory_limit_mib": 64}})
    environment.step(turn(call("add", {"a": 1})))
    assert {child.pid for child in psutil.Process().children()} == before
    assert told(environment.step(turn(call("python", {"code": "print(1)"})))) == ["1"]
    (pid,) = {child.pid for child in psutil.Process().children()} - before
    psutil.Process(pid).kill()
    psutil.Process(pid).wait(10)
    assert told(environment.step(turn(call("python", {"code": "print(2)"})))) == ["2"]
    environment.close()
    environment.close()
    assert {child.pid for child in psutil.Process().children()} == before


@needs_sandbox
def test_a_sandbox_that_dies_is_a_failure_and_the_next_one_works():
    environment = ToolEnvironment(built_in={"python": {"time_limit_s": 30.0}})
    environment.step(turn(call("python", {"code": ""})))
    timer = threading.Timer(0.5, environment._made[0]._sandbox.kill)
    timer.start()
    with pytest.raises(EnvironmentFailure, match="the sandbox of the tool python: the sandbox ended"):
        environment.step(turn(call("python", {"code": "while True: pass"})))
    assert told(environment.step(turn(call("python", {"code": "print(1)"})))) == ["1"]
    environment.close()


def test_a_sandbox_that_cannot_be_started_is_a_failure(monkeypatch):
    monkeypatch.setattr(seccomp, "is_supported", lambda: False)
    with pytest.raises(EnvironmentFailure, match="solutions can be run on Linux"):
        ToolEnvironment(built_in=["python"]).step(turn(call("python", {"code": ""})))


@needs_sandbox
def test_a_sandbox_that_does_not_hold_is_a_failure_every_time(monkeypatch):
    def attempt(sandbox, limits):
        tried.append(sandbox.pid)
        if len(tried) < 3:
            raise SandboxError("a program in the sandbox could open a socket")

    tried: list[int] = []
    monkeypatch.setattr(built_in_tools, "try_out", attempt)
    environment = ToolEnvironment(built_in={"python": {"memory_limit_mib": 77}})
    for _ in range(2):
        with pytest.raises(EnvironmentFailure, match="could open a socket"):
            environment.step(turn(call("python", {"code": "print(1)"})))
    for _ in range(2):
        assert told(environment.step(turn(call("python", {"code": "print(1)"})))) == ["1"]
    assert len(tried) == 3
    environment.close()


def test_a_program_that_is_too_long_is_told():
    observation = ToolEnvironment(built_in=["python"]).step(turn(call("python", {"code": "#" * 200_001})))
    assert counted(observation) == {"calls": 1, "errors": 1}


def test_the_recipes_tool_is_needed():
    spec = importlib.util.spec_from_file_location("my_tools", ROOT / "configs/recipes/tools/my_tools.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    environment = ToolEnvironment(module.Vault)
    assert environment.reset(TASK, 0) is None
    observation = environment.step(turn(call("look_up", {"key": "blue"}), call("look_up", {"key": "red"})))
    assert told(observation) == ["41", "KeyError: \"nothing is kept under 'red'\""]
    assert counted(observation) == {"calls": 2, "errors": 1}


def test_tools_are_read_once_for_all_trajectories():
    assert tool_function(Notes().write) is tool_function(Notes().write)
    assert tool_function(Notes.fixed) is tool_function(Notes().fixed)
    with pytest.raises(ArgumentsError):
        tool_function(add).checked({})


def test_a_worker_that_imports_tools_stays_light():
    code = "import sys, dapo_mega.environments.tools; print({'torch', 'transformers', 'mpmath'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout == "set()\n", run.stderr
