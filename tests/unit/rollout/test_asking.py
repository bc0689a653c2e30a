"""Requests in parts: how many are open, and what becomes of failures."""

import threading
import time

import numpy as np
import pytest

from dapo_mega.environments.base import SINGLE_TURN
from dapo_mega.rollout.asking import DIFFICULTY_IDS, EVALUATION_IDS, Numbering, ask_in_parts, roll_out
from dapo_mega.types import GenerationFailure, Prompt, SamplingParams, Trajectory

from .scripted import ScriptedEngine

K, NUM_PARTS = 3, 12


def numbering(first_id=EVALUATION_IDS):
    return Numbering(first_id, K, 7, SamplingParams(max_new_tokens=16))


def parts(num_prompts=1):
    """Of so many prompts each."""
    prompts = [Prompt(i, "?", np.array([i + 1], np.int32), "g") for i in range(NUM_PARTS)]
    of_prompts = [numbering().of(prompt.index, prompt) for prompt in prompts]
    starts = range(0, NUM_PARTS, num_prompts)
    return [(at, [request for one in of_prompts[at : at + num_prompts] for request in one]) for at in starts]


class Counting(ScriptedEngine):
    """Notes how many requests are open when it starts one, and answers in a random order."""

    def __init__(self, **rules):
        order = np.random.default_rng(0).permutation(K * NUM_PARTS)
        super().__init__(lambda *_: True, lambda request: order[request.request_id - EVALUATION_IDS], **rules)
        self.most = 0

    def generate(self, request):
        self.most = max(self.most, len(self.in_flight) + 1)
        return super().generate(request)


def ask(engine, asked, most_open, use):
    prompted = ((number, [(None, request) for request in requests]) for number, requests in asked)
    engine.run(ask_in_parts(engine.generate, prompted, use, most_open))


@pytest.mark.parametrize(("num_prompts", "most_open"), [(1, 1), (1, 7), (3, 7), (3, 10), (1, 99)])
def test_parts_are_asked_while_there_is_room_and_used_one_at_a_time(num_prompts, most_open):
    engine, used, threads, is_used = Counting(), {}, set(), threading.Lock()

    def use(number, answers):
        assert is_used.acquire(blocking=False)
        threads.add(threading.current_thread())
        time.sleep(0.001)
        used[number] = [answer.id for answer in answers]
        is_used.release()

    ask(engine, parts(num_prompts), most_open, use)
    assert engine.most == min(most_open - 1 + num_prompts * K, NUM_PARTS * K)
    assert used == {number: [request.request_id for request in requests] for number, requests in parts(num_prompts)}
    assert (list(used) == sorted(used)) is (most_open == 1), "parts are not used as soon as they are there"
    assert threading.main_thread() not in threads


def test_a_failed_request_is_an_answer_among_the_others():
    engine, used = Counting(fails=lambda request: request.request_id % 5 == 0), []
    ask(engine, parts(), 7, lambda _, answers: used.extend(answers))
    assert {type(found) for found in used} == {Trajectory, GenerationFailure}
    assert all(found.request_id % 5 == 0 for found in used if isinstance(found, GenerationFailure))
    assert all(found.id % 5 for found in used if isinstance(found, Trajectory))
    assert len(used) == K * NUM_PARTS


def test_what_goes_wrong_is_raised_and_gives_open_requests_up():
    def refuse(number, answers):
        raise ValueError(f"part {number}")

    engine = Counting()
    with pytest.raises(ValueError, match="part"):
        ask(engine, parts(), 7, refuse)
    assert not engine.in_flight
    assert engine.cancelled
    broken = Counting()
    broken.answer = lambda request, version: broken.open[request.request_id].set_exception(KeyError("broken"))
    broken.finish = lambda number: broken.answer(broken.in_flight.pop(number)[0], 0)
    with pytest.raises(KeyError):
        broken.run(roll_out([(None, request) for request in parts()[0][1]], broken.generate, SINGLE_TURN))


def test_requests_are_numbered_by_prompt_and_seeded_by_number():
    prompt = Prompt(0, "?", np.array([1], np.int32), "g")
    for first in (EVALUATION_IDS, DIFFICULTY_IDS):
        found = [request for index in range(4) for request in numbering(first).of(index, prompt)]
        assert [request.request_id for request in found] == list(range(first, first + 4 * K))
        assert all(request.seed == (7 << 64) | request.request_id for request in found)
        assert [numbering(first).index_of(request.request_id) for request in found] == [i // K for i in range(4 * K)]
