"""Turns of policy and environment: every token once, limits before anything is added, one line for what is wrong."""

import asyncio

import numpy as np
import pytest

from dapo_mega.config.environment import OwnEnvironment
from dapo_mega.data.tokenizer import EOS, build_byte_tokenizer, decoder
from dapo_mega.environments.turns import Turns, make_environment
from dapo_mega.errors import InputError
from dapo_mega.types import GenerationFailure, GenerationRequest, Prompt, Response, SamplingParams

CODE = """
LOG = []

class Echo:
    def __init__(self, stop_at=99, first=""):
        self.stop_at, self.first = stop_at, first
    def reset(self, task, seed):
        LOG.append(("reset", task["ground_truth"], seed))
        return {"text": self.first}
    def step(self, action):
        LOG.append(("step", action["turn"], action["text"], action["finish_reason"], action["token_ids"]))
        turn = action["turn"]
        return {"text": f"<{turn}>", "reward": turn + 0.5, "parts": {"seen": 1}, "done": turn + 1 == self.stop_at}
    def close(self):
        LOG.append(("close",))

class NoStep:
    def reset(self, task, seed): pass

class Other(Echo):
    def __init__(self, returned=None): super().__init__(); self.returned = returned
    def step(self, action): return self.returned

class Raising(Echo):
    def step(self, action): raise KeyError("no such tool")

class Refusing:
    def __init__(self): raise OSError("no display")
"""
TOKENIZER = build_byte_tokenizer()
DECODE = decoder(TOKENIZER)
PROMPT = Prompt(7, "?", np.array([5, 6], np.int32), "42")


def encode(text):
    return TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.fixture
def code(tmp_path):
    file = tmp_path / "echo.py"
    file.write_text(CODE)
    return file


def own(code, name="Echo", **rest):
    return OwnEnvironment(path=f"{code}:{name}", **rest)


def request(max_new_tokens=40, number=3, seed=1):
    return GenerationRequest(
        number, PROMPT.token_ids, (seed << 64) | number, SamplingParams(max_new_tokens=max_new_tokens)
    )


def run(environment, asked, text="ab", versions=(4, 5, 5, 6)):
    """The trajectory, and the requests of its turns, each answered by `text` as far as it may be long."""
    requests = []

    async def generate(of_turn):
        requests.append(of_turn)
        whole = np.array(encode(text), np.int32)
        tokens = whole[: of_turn.sampling.max_new_tokens]
        logprobs = np.arange(1, len(tokens) + 1, dtype=np.float32) * -0.1
        version = versions[min(len(requests), len(versions)) - 1]
        reason = "stop" if len(tokens) == len(whole) else "length"
        spans = (("http://a", len(tokens)),)
        return Response(of_turn.request_id, tokens, logprobs, reason, version, engine_spans=spans)

    return asyncio.run(Turns(environment, encode, DECODE).run(PROMPT, asked, generate)), requests


def test_a_turns_prompt_is_all_rows_before_it_and_each_token_is_there_once(code):
    trajectory, requests = run(own(code, settings={"stop_at": 3, "first": "!"}), request())
    texts = ["!", "ab", "<0>", "ab", "<1>", "ab"]
    assert trajectory.token_ids.tolist() == [token for text in texts for token in encode(text)]
    assert trajectory.sampled.tolist() == [text == "ab" for text in texts for _ in encode(text)]
    assert (trajectory.logprobs[~trajectory.sampled] == 0).all()
    assert trajectory.logprobs[trajectory.sampled].tolist() == pytest.approx([-0.1, -0.2] * 3)
    rows = trajectory.token_ids.tolist()
    assert [r.prompt_token_ids.tolist() for r in requests] == [[5, 6, *rows[:end]] for end in (1, 6, 11)]
    assert [r.sampling.max_new_tokens for r in requests] == [39, 34, 29]
    assert [(turn.stop, turn.finish_reason) for turn in trajectory.turns] == [(3, "stop"), (8, "stop"), (13, "stop")]
    assert [dict(turn.parts) for turn in trajectory.turns] == [{"reward": i + 0.5, "seen": 1} for i in range(3)]
    assert trajectory.version_spans == ((4, 3), (5, 13))
    assert trajectory.engine_spans == (("http://a", 13),)
    assert trajectory.segments == (13,)
    assert trajectory.length == 6


def test_turns_have_random_numbers_of_their_own_and_a_group_has_one_task(code):
    environment = own(code, settings={"stop_at": 2})
    requests = [r for number in (3, 4) for r in run(environment, request(number=number))[1]]
    assert requests[0].seed == request(number=3).seed
    assert len({r.seed for r in requests}) == 4
    assert all(0 <= r.seed < 2**128 for r in requests)
    log = environment.loaded().func.__init__.__globals__["LOG"]
    resets = [entry for entry in log if entry[0] == "reset"]
    assert resets[0] == resets[1]
    assert resets[0][1] == "42"
    run(environment, request(seed=2))
    assert [entry for entry in log if entry[0] == "reset"][-1] != resets[0]
    assert [entry[0] for entry in log] == ["reset", "step", "step", "close"] * 3
    assert log[1] == ("step", 0, "ab", "stop", encode("ab"))


@pytest.mark.parametrize(
    ("limits", "max_new_tokens", "texts"),
    [
        ({"max_turns": 2}, 40, ["ab", "<0>", "ab"]),
        ({"max_turn_tokens": 1}, 9, ["a", "<0>", "a", "<1>", "a"]),
        ({"max_observation_tokens": 2}, 40, ["ab"]),
        ({}, 9, ["ab", "<0>", "ab"]),  # After the second turn 2 are left, the observation has 3.
        ({}, 8, ["ab", "<0>", "ab"]),
        ({}, 6, ["ab", "<0>", "a"]),  # The second turn is cut off, and nothing has place behind it.
        ({}, 5, ["ab"]),  # An observation without a turn behind it is not added.
    ],
)
def test_what_has_no_place_ends_the_trajectory_before_it_is_added(code, limits, max_new_tokens, texts):
    trajectory, _ = run(own(code, **limits), request(max_new_tokens))
    assert DECODE([trajectory.token_ids]) == ["".join(texts)]
    assert trajectory.num_rows <= max_new_tokens


def test_a_first_observation_without_place_is_a_failure_and_the_environment_is_closed(code):
    environment = own(code, settings={"first": "x" * 300})
    with pytest.raises(GenerationFailure, match="first observation is too long"):
        run(environment, request())
    assert environment.loaded().func.__init__.__globals__["LOG"][-1] == ("close",)


def test_a_special_token_in_an_observation_is_text(code):
    class Config:
        environment = own(code, settings={"first": EOS, "stop_at": 1})

    made = make_environment(Config, TOKENIZER)
    assert TOKENIZER.eos_token_id not in made._encode(f"a{EOS}b")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("Echho", {}, "there is no 'Echho'; did you mean 'Echo'"),
        ("Echo", {"size": 3}, "is called with"),
        ("NoStep", {}, "its method step raises AttributeError"),
        ("Raising", {}, r"its method step raises KeyError: 'no such tool' \(line \d+\)"),
        ("Refusing", {}, "it raises OSError: no display"),
        ("Other", {"returned": "text"}, "its method step returned 'text'; give a dict with any of text, done, reward"),
        ("Other", {"returned": {"rewards": 1}}, "with any of .*, not 'rewards'"),
        ("Other", {"returned": {"reward": float("nan")}}, "reward a finite number or None"),
        ("Other", {"returned": {"reward": "1"}}, "reward a finite number or None"),
        ("Other", {"returned": {"text": 3}}, "text is a str"),
        ("Other", {"returned": {"done": 1}}, "done a bool"),
        ("Other", {"returned": {"parts": {"a": "b"}}}, "parts a dict of finite numbers"),
        ("Other", {"returned": {"parts": {"reward": 1}}}, "a part called 'reward'; give it another name"),
    ],
)
def test_what_cannot_be_used_is_one_line_before_the_run(code, name, settings, said):
    with pytest.raises(InputError, match=said) as raised:
        own(code, name, settings=settings).try_out(4)
    assert str(raised.value).startswith(f"environment: {code}:{name}: ")
    assert "\n" not in str(raised.value)
