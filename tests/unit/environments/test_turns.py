"""Turns of policy and environment: every token once, limits before anything is added, nothing lost where they fail."""

import asyncio
import hashlib
import json
import re
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from dapo_mega.algorithms.own_code import MisuseError
from dapo_mega.config.environment import OwnEnvironment
from dapo_mega.data.templates import render_messages
from dapo_mega.data.tokenizer import build_byte_tokenizer, decoder
from dapo_mega.environments.base import Progress, TrajectoryFailure
from dapo_mega.environments.build import try_environment
from dapo_mega.environments.dialogues import BareText, TemplateDialogue
from dapo_mega.environments.observations import read_observation, read_tools
from dapo_mega.environments.pool import EnvironmentPool
from dapo_mega.environments.turns import Turns
from dapo_mega.errors import InputError
from dapo_mega.rollout.groups import OpenGroup, pack_open, unpack_open
from dapo_mega.types import GenerationRequest, Prompt, Response, SamplingParams

from .programs import assert_exact
from .test_dialogues import STRIPS, chatml, synthetic

CODE = """
import json, os, pathlib, random, time

class Echo:
    def __init__(self, log="", stop_at=99, first="", fault="", at=1, times=1):
        self.log, self.stop_at, self.first, self.fault, self.at, self.times = log, stop_at, first, fault, at, times
    def note(self, *what):
        if self.log:
            with open(self.log, "a") as file:
                file.write(json.dumps(what) + "\\n")
    def reset(self, task, seed):
        self.note("reset", task["ground_truth"], seed)
        self.random, self.total = random.Random(seed), 0
        return {"text": self.first}
    def step(self, action):
        turn = action["turn"]
        self.note("step", turn, action["text"], action["finish_reason"], action["token_ids"])
        if self.fault and turn == self.at and sum(1 for _ in pathlib.Path(self.log).open()) < self.times:
            self.fail()
        self.total += sum(action["token_ids"])
        drawn = self.random.randint(10, 99)
        return {"text": f"<{drawn + self.total}>", "reward": turn + 0.5, "parts": {"seen": 1},
                "done": turn + 1 == self.stop_at}
    def fail(self):
        self.note("fail")
        if self.fault == "raise":
            raise ConnectionError("the server is gone")
        if self.fault == "die":
            os._exit(3)
        time.sleep(60)
    def close(self):
        self.note("close")

class Saved(Echo):
    def snapshot(self): return json.dumps([self.random.getstate(), self.total]).encode()
    def restore(self, state):
        self.note("restore")
        (version, words, gauss), self.total = json.loads(state)
        self.random = random.Random(); self.random.setstate((version, tuple(words), gauss))

class Own:
    made = 0
    def reset(self, task, seed): Own.made += 1; self.number = Own.made
    def step(self, action):
        if self.number == 1 and action["turn"] == 1: raise OSError("once")
        return {"text": f"{self.number}", "done": action["turn"] == 2}

class Folding(Echo):
    def step(self, action):
        seen = super().step(action)
        return seen | {"text": "so far", "rewrite": True} if action["turn"] == 1 else seen

class Late(Echo):
    def __init__(self, value): super().__init__(); self.value = eval(value)
    def step(self, action): return super().step(action) | (self.value if action["turn"] == 1 else {})

class NoStep:
    def reset(self, task, seed): pass

class Half:
    def reset(self, task, seed): pass
    def step(self, action): pass
    def restore(self, state): pass

class Refusing:
    def __init__(self): raise OSError("no display")

class Misspelt:
    def reset(self, task, seed): return {"texts": ""}
    def step(self, action): pass

class Awaited:
    async def reset(self, task, seed): return {"text": "?"}
    async def step(self, action): return {"done": True, "stop": "parse"}
"""
TOKENIZER = build_byte_tokenizer()
DECODE = decoder(TOKENIZER)
PROMPT = Prompt(7, "?", np.array([5, 6], np.int32), "42")


def encode(text):
    return TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    file = tmp_path_factory.mktemp("environments") / "echo.py"
    file.write_text(CODE)
    return file


@pytest.fixture
def turns(code):
    """Makes `Turns` of a class of the file with these keys; its pool ends with the test."""
    pools = []

    def make(name="Echo", dialogue=None, **keys):
        own = OwnEnvironment(path=f"{code}:{name}", **{"num_workers": 1, **keys})
        pools.append(EnvironmentPool(own))
        return Turns(own, pools[-1], dialogue or BareText(TOKENIZER))

    yield make
    for pool in pools:
        pool.close()


def request(max_new_tokens=400, number=3, seed=1, prompt=PROMPT):
    return GenerationRequest(
        number, prompt.token_ids, (seed << 64) | number, SamplingParams(max_new_tokens=max_new_tokens)
    )


def answered(text=None, versions=(4,)):
    """`generate` for a scripted engine, which answers by the request's seed or by `text`; and what it was asked."""
    asked = []

    async def generate(of_turn):
        asked.append(of_turn)
        said = text or hashlib.sha256(str(of_turn.seed).encode()).hexdigest()[: 1 + of_turn.seed % 5]
        whole = np.array(encode(said), np.int32)
        tokens = whole[: of_turn.sampling.max_new_tokens]
        logprobs = np.arange(1, len(tokens) + 1, dtype=np.float32) * -0.1
        reason = "stop" if len(tokens) == len(whole) else "length"
        version = versions[min(len(asked), len(versions)) - 1]
        spans = (("http://a", len(tokens)),)
        return Response(of_turn.request_id, tokens, logprobs, reason, version, engine_spans=spans)

    return generate, asked


def run(environment, asked, text=None, versions=(4,), prompt=PROMPT):
    """The trajectory, and the requests of its turns."""
    generate, requests = answered(text, versions)
    return asyncio.run(environment.run(prompt, asked, generate, Progress())), requests


def same(one, other):
    return all(
        np.array_equal(value, getattr(other, name)) if isinstance(value, np.ndarray) else value == getattr(other, name)
        for name, value in vars(one).items()
    )


def entries(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_turns_prompt_is_all_rows_before_it_and_each_token_is_there_once(turns):
    environment = turns(settings={"stop_at": 3, "first": "!"})
    trajectory, requests = run(environment, request(40), "ab", (4, 5, 5, 6))
    texts = ["!", "ab", None, "ab", None, "ab"]
    shown = DECODE([trajectory.token_ids])[0].split("ab")
    observed = iter(shown)
    texts = [next(observed) if text != "ab" else text for text in texts]
    assert trajectory.token_ids.tolist() == [token for text in texts for token in encode(text)]
    assert trajectory.sampled.tolist() == [text == "ab" for text in texts for _ in encode(text)]
    assert (trajectory.logprobs[~trajectory.sampled] == 0).all()
    assert trajectory.logprobs[trajectory.sampled].tolist() == pytest.approx([-0.1, -0.2] * 3)
    rows = trajectory.token_ids.tolist()
    ends = [turn.stop for turn in trajectory.turns]
    assert [r.prompt_token_ids.tolist() for r in requests] == [[5, 6, *rows[: end - 2]] for end in ends]
    assert [r.sampling.max_new_tokens for r in requests] == [40 - end + 2 for end in ends]
    assert [dict(turn.parts) for turn in trajectory.turns] == [{"reward": i + 0.5, "seen": 1} for i in range(3)]
    assert trajectory.version_spans == ((4, 3), (5, ends[-1]))
    assert trajectory.engine_spans == (("http://a", ends[-1]),)
    assert (trajectory.segments, trajectory.length, trajectory.stop) == ((ends[-1],), 6, "done")


def test_turns_have_random_numbers_of_their_own_and_a_group_has_one_task(turns, tmp_path):
    environment = turns(settings={"stop_at": 2, "log": str(tmp_path / "log")})
    requests = [r for number in (3, 4) for r in run(environment, request(number=number), "ab")[1]]
    assert requests[0].seed == request(number=3).seed
    assert len({r.seed for r in requests}) == 4
    assert all(0 <= r.seed < 2**128 for r in requests)
    run(environment, request(seed=2), "ab")
    environment.close()
    log = entries(tmp_path / "log")
    assert Counter(entry[0] for entry in log) == {"reset": 3, "step": 6, "close": 3}
    assert log[1] == ["step", 0, "ab", "stop", encode("ab")]
    first, second, other = [entry for entry in log if entry[0] == "reset"]
    assert first == second != other
    assert first[1] == "42"


@pytest.mark.parametrize(
    ("limits", "max_new_tokens", "turn_lengths", "stop"),
    [
        ({"max_turns": 2}, 40, [2, 2], "turns"),
        ({"max_turn_tokens": 1, "max_turns": 3}, 40, [1, 1, 1], "turns"),
        ({"max_observation_tokens": 2}, 40, [2], "context"),
        ({}, 10, [2, 2], "context"),  # After the second turn 1 is left, the observation has 5.
        ({}, 7, [2], "context"),  # An observation without a turn behind it is not added.
        ({}, 8, [2, 1], "tokens"),
        ({}, 2, [2], "tokens"),
        ({"trajectory_limit_s": 1e-9}, 40, [2], "timeout"),
    ],
)
def test_what_has_no_place_ends_the_trajectory_before_it_is_added(turns, limits, max_new_tokens, turn_lengths, stop):
    trajectory, requests = run(turns(**limits), request(max_new_tokens), "ab")
    assert trajectory.stop == stop
    assert trajectory.sampled[-1]
    assert trajectory.num_rows <= max_new_tokens
    assert trajectory.length == sum(turn_lengths)
    assert len(requests) == len(trajectory.turns) == len(turn_lengths)
    assert trajectory.turns[-1].parts["reward"] == len(requests) - 0.5


def test_a_huge_observation_ends_the_trajectory_unread(turns, monkeypatch):
    environment = turns(settings={"first": "x" * 20_000}, max_failed_share=1.0, max_observation_tokens=10)
    monkeypatch.setattr(environment._dialogue, "opening", None)
    with pytest.raises(TrajectoryFailure, match="first observation is too long"):
        run(environment, request(), "ab")


def test_methods_may_be_coroutines_and_say_why_it_ended(turns):
    assert run(turns("Awaited"), request(), "ab")[0].stop == "parse"


@pytest.mark.parametrize("name", ["Echo", "Saved"])
@pytest.mark.parametrize("fault", ["raise", "die", "hang"])
def test_an_environment_that_fails_is_brought_to_the_same_state_and_goes_on(turns, tmp_path, name, fault):
    log = tmp_path / "log"
    limit = {"time_limit_s": 2} if fault == "hang" else {}
    environment = turns(name, **limit, settings={"stop_at": 3, "log": str(log), "fault": fault, "times": 5})
    answer, requests = answered()
    counts = Counter()

    async def generate(of_turn):  # Each in a step of its own.
        counts.update(environment.pop_metrics())
        return await answer(of_turn)

    trajectory = asyncio.run(environment.run(PROMPT, request(), generate, Progress()))
    counts.update(environment.pop_metrics())
    environment.close()
    undisturbed, _ = run(turns(name, settings={"stop_at": 3}), request())
    assert same(trajectory, undisturbed)
    assert len(requests) == 3
    assert (counts["environment/retries"], counts["environment/replays"]) == (1, 1)
    done = [entry[0] for entry in entries(log) if entry[0] not in ("fail", "close")]
    again = ["restore"] if name == "Saved" else ["reset", "step"]
    assert done == ["reset", "step", "step", *again, "step", "step"]


def test_one_that_hangs_or_dies_keeps_no_other_one(turns, tmp_path):
    environment = turns(time_limit_s=3, settings={"stop_at": 2, "log": str(tmp_path / "log"), "fault": "hang"})
    slow = turns(time_limit_s=3, settings={"stop_at": 2})

    async def both():
        tasks = [
            asyncio.create_task(each.run(PROMPT, request(number=i), answered("ab")[0], Progress()))
            for i, each in enumerate([environment, *[slow] * 20])
        ]
        await asyncio.gather(*tasks[1:])
        return [task.done() for task in tasks]

    (tmp_path / "log").write_text("")
    environment._own = environment._own.model_copy(update={"retries": 0})
    assert all(asyncio.run(both())[1:])


def test_one_that_does_not_go_the_same_way_again_begins_anew(turns, caplog):
    environment = turns("Own")
    trajectory, requests = run(environment, request(), "ab")
    assert len(requests) == 5  # Two of the first try.
    assert DECODE([trajectory.token_ids[~trajectory.sampled]]) == ["22"] or len(set(trajectory.token_ids)) > 2
    assert environment.pop_metrics()["environment/differing"] == 1
    assert "draw from a generator made of the seed" in caplog.text


def test_what_fails_too_often_is_no_number_and_too_much_of_it_ends_the_run(turns, tmp_path, caplog):
    settings = {"log": str(tmp_path / "log"), "fault": "raise", "times": 10**6}
    with pytest.raises(TrajectoryFailure, match="the server is gone") as raised:
        run(turns(settings=settings, max_failed_share=1.0, retries=1), request(), "ab")
    failed = raised.value.trajectory
    assert failed.stop == "failed"
    assert failed.length == 4
    assert failed.turns[-1].parts == {}
    assert [entry[0] for entry in entries(tmp_path / "log")].count("fail") == 2
    assert "Traceback" in caplog.text
    with pytest.raises(InputError, match=r"1 of 1 trajectories of a step .*max_failed_share=0.1 .* server is gone"):
        run(turns(settings=settings, retries=0), request(), "ab")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{'reward': float('nan')}", "reward a finite number or None"),
        ("{'reward': 10**5000}", "not plain data"),
        ("{'parts': {'depth': float('inf')}}", "parts a dict of finite numbers"),
        ("{'messages': [{'role': 'judge', 'content': ''}]}", "one of user, tool, system"),
        ("{'text': '', 'rewrite': True}", "without any text"),
        ("{'text': {1}}", "not plain data"),
    ],
)
def test_a_later_observation_that_cannot_be_used_is_a_failure(turns, value, said):
    environment = turns("Late", settings={"value": value}, max_failed_share=1.0)
    with pytest.raises(TrajectoryFailure, match=said) as raised:
        run(environment, request(), "ab")
    assert len(raised.value.trajectory.turns) == 2
    assert environment.pop_metrics()["environment/trajectories_failed"] == 1


def test_a_trajectory_goes_on_behind_every_event(turns, tmp_path):
    """Interrupted between any two events, saved, and continued in another process's state: the same as undisturbed."""
    for name in ("Echo", "Saved"):
        log = tmp_path / f"log-{name}"
        whole, requests = run(turns(name, settings={"stop_at": 4}), request())
        num_events = 2 * len(requests)
        environment = turns(name, settings={"stop_at": 4, "log": str(log)})
        for event in range(num_events):
            saved = asyncio.run(_interrupted(environment, event))
            (group,) = saved
            generate, asked = answered()
            group_environment = turns(name, settings={"stop_at": 4})
            asyncio.run(group.roll_out(group_environment, generate))
            (found,) = group.members()
            assert same(found, whole), event
            assert len(asked) == len(requests) - (event + 1) // 2, event
            group_environment.close()
        metrics = environment.pop_metrics()
        assert (
            metrics["environment/trajectories_started"] == metrics["environment/trajectories_cancelled"] == num_events
        )
        assert metrics["environment/trajectories_open"] == 0
        environment.close()
        log_entries = Counter(entry[0] for entry in entries(log))
        assert log_entries["close"] == num_events


CHATS = synthetic(STRIPS)
QUESTION = ({"role": "user", "content": "Q"},)
ASKED = render_messages(QUESTION, CHATS, (), False)
CHAT = Prompt(7, ASKED, np.array(CHATS(ASKED)["input_ids"], np.int32), "42", messages=QUESTION)
THOUGHT = "<think>a</think>b"


def test_where_the_template_strips_thoughts_a_turn_begins_a_piece(turns):
    environment = turns(dialogue=TemplateDialogue(CHATS, (), True), history="template", settings={"stop_at": 3})
    trajectory, requests = run(environment, request(prompt=CHAT), THOUGHT, prompt=CHAT)
    assert_exact(trajectory, CHAT, requests)
    assert len(trajectory.pieces) == len(trajectory.turns) == 3
    *_, asked = (CHATS.decode(each.prompt_token_ids) for each in requests)
    said = [{"role": "assistant", "content": "\n\nb"}, {"role": "user", "content": ""}] * 2
    seen = iter(re.findall(r"<\d+>", asked))
    shown = [message if message["content"] else message | {"content": next(seen)} for message in said]
    assert asked == render_messages([*QUESTION, *shown], CHATS)
    kept = turns(dialogue=TemplateDialogue(CHATS), settings={"stop_at": 3})
    assert len(run(kept, request(prompt=CHAT), THOUGHT, prompt=CHAT)[0].pieces) == 1
    plain, _ = run(environment, request(prompt=CHAT), "b", prompt=CHAT)
    assert len(plain.pieces) == 1


def test_an_environment_that_rewrites_the_history_begins_a_piece(turns):
    environment = turns("Folding", settings={"stop_at": 4})
    trajectory, requests = run(environment, request(), "ab")
    assert_exact(trajectory, PROMPT, requests)
    assert requests[2].prompt_token_ids.tolist() == encode("so far")
    assert [first for first, *_ in trajectory.pieces] == [0, trajectory.turns[1].stop]
    assert requests[3].prompt_token_ids.tolist()[: len(encode("so farab"))] == encode("so farab")
    assert requests[2].engine == "http://a"
    assert [r.sampling.max_new_tokens for r in requests[1:3]] == [400 - trajectory.turns[0].stop - 4 - 1,
        400 - trajectory.turns[1].stop - len(encode("so far"))]  # fmt: skip
    short, requests = run(environment, request(trajectory.turns[1].stop + 6), "ab")
    assert (short.stop, len(requests)) == ("context", 2)


@pytest.mark.parametrize("kind", ["Folding", "chat"])
def test_a_rewritten_history_goes_on_behind_every_event(turns, kind):
    prompt = CHAT if kind == "chat" else PROMPT
    make = partial(turns, settings={"stop_at": 3})
    if kind == "chat":
        make = partial(make, dialogue=TemplateDialogue(CHATS, (), True), history="template")
    else:
        make = partial(make, "Folding")
    text = THOUGHT if kind == "chat" else None
    whole, requests = run(make(), request(prompt=prompt), text, prompt=prompt)
    assert len(whole.pieces) > 1
    for event in range(2 * len(requests)):
        environment = make()
        (group,) = asyncio.run(_interrupted(environment, event, prompt, text))
        generate, asked = answered(text)
        asyncio.run(group.roll_out(environment, generate))
        (found,) = group.members()
        assert same(found, whole), event
        assert len(asked) == len(requests) - (event + 1) // 2, event
        environment.close()


def test_a_turn_that_the_template_does_not_write_again_ends_the_trajectory(turns, caplog):
    refuses = chatml("{{ raise_exception('no b') if m.content == 'b' }}{{ m.content.split('</think>')[-1] }}")
    dialogue = TemplateDialogue(synthetic(refuses), (), True)
    environment = turns(dialogue=dialogue, history="template", settings={"stop_at": 3})
    trajectory, _ = run(environment, request(prompt=CHAT), "b", prompt=CHAT)
    assert (trajectory.stop, len(trajectory.turns)) == ("parse", 1)
    assert "no b" in caplog.text


async def _interrupted(environment, num_events, prompt=PROMPT, text=None):
    """A group of one trajectory that is cancelled after so many events, and saved and loaded as a checkpoint is."""
    count, reached = 0, asyncio.Event()
    generate, _ = answered(text)
    group = OpenGroup(prompt, (request(prompt=prompt),))
    original = environment._pool.started

    async def passed():
        nonlocal count
        if count == num_events:
            reached.set()
            await asyncio.sleep(60)
        count += 1

    async def counted(of_turn):
        await passed()
        return await generate(of_turn)

    async def started(work):
        if work.cr_frame.f_locals["method"] == "step":
            try:
                await passed()
            except BaseException:
                work.close()
                raise
        return await original(work)

    environment._pool.started = started
    task = asyncio.create_task(group.roll_out(environment, counted))
    await reached.wait()
    records, arrays = pack_open([group.copy()])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    environment._pool.started = original
    records = json.loads(json.dumps(records))
    return unpack_open(records, arrays, {7: prompt}, lambda ids, of: [request(number=i, prompt=of) for i in ids])


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("Echho", {}, "there is no 'Echho'; did you mean 'Echo'"),
        ("Echo", {"size": 3}, "is called with"),
        ("NoStep", {}, "what it makes has no method step"),
        ("Half", {}, "it has one of the methods snapshot and restore; give it both, or none"),
        ("Refusing", {}, r"it raises OSError: no display \(line \d+\)"),
        ("Misspelt", {}, "its method reset returned .* not 'texts'"),
    ],
)
def test_what_cannot_be_used_is_one_line_before_the_run(code, name, settings, said):
    config = SimpleNamespace(environment=OwnEnvironment(path=f"{code}:{name}", settings=settings), seed=0)
    with pytest.raises(InputError, match=said) as raised:
        try_environment(config, {"ground_truth": ""})
    assert str(raised.value).startswith(f"environment: {code}:{name}: ")
    assert "\n" not in str(raised.value)


def test_one_that_does_not_repeat_itself_is_reported_before_the_run(code, caplog):
    for name, is_reported in (("Own", True), ("Echo", False)):
        caplog.clear()
        config = SimpleNamespace(environment=OwnEnvironment(path=f"{code}:{name}"), seed=0)
        try_environment(config, {"ground_truth": ""})
        assert ("no module's random numbers" in caplog.text) == is_reported


@pytest.mark.parametrize("tools", ["abc", ["abc"], [{}], {"a": 1}, [{"type": "function", "function": {"name": 3}}], 7])
def test_what_is_no_schema_is_refused(tools):
    with pytest.raises(MisuseError, match=r"tools\[0\] must be \{type: function"):
        read_tools(tools)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("text", "returned 'text'; give a dict with any of text, messages, done, reward"),
        ({"rewards": 1}, "with any of .*, not 'rewards'"),
        ({"reward": float("nan")}, "reward a finite number or None"),
        ({"reward": "1"}, "reward a finite number or None"),
        ({"text": 3}, "text is a str"),
        ({"done": 1}, "done a bool"),
        ({"correct": 1}, "correct a bool"),
        ({"parts": {"a": "b"}}, "parts a dict of finite numbers"),
        ({"parts": {"reward": 1}}, "a part called 'reward'; give it another name"),
        ({"parts": {"a b": 1}}, "a part called 'a b'; give it another name"),
        ({"stop": "parse"}, "with done=True it may be"),
        ({"stop": "turns", "done": True}, "with done=True it may be"),
        ({"text": "a", "messages": []}, "give text, or a list"),
        ({"messages": [{"role": "assistant", "content": "I win"}]}, "'role': one of user, tool, system"),
        ({"messages": [{"role": "user", "content": None}]}, "'content': str"),
    ],
)
def test_what_is_no_observation_is_refused(returned, said):
    with pytest.raises(MisuseError, match=said):
        read_observation(returned, "its method step")
