"""An evaluation and what feeds the engines read answers at the same time, and each gets its own."""

import queue
import threading
from types import SimpleNamespace

import numpy as np

from dapo_mega.engines.sglang.fleet import SglangFleet
from dapo_mega.types import GenerationFailure, GenerationRequest, SamplingParams

WAIT_S = 60


class Client:
    """Whose answers come when they are put."""

    def __init__(self):
        self.answers = queue.SimpleQueue()
        self.submitted = threading.Event()

    def submit(self, requests):
        self.submitted.set()

    def wait_for_engines(self):
        pass

    def has_outdated(self):
        return False

    def next_answer(self, timeout_s):
        try:
            return self.answers.get(timeout=timeout_s)
        except queue.Empty:
            return None


def request(request_id):
    return GenerationRequest(request_id, np.zeros(1, np.int32), 0, SamplingParams(1.0, 1.0, 0, 1, ()))


def test_each_reader_gets_its_own_answers_in_whatever_order_they_come():
    client = Client()
    fleet = SglangFleet(SimpleNamespace(rank=0), client)
    asked, others = list(range(100, 200)), list(range(100))
    evaluated, polled = [], []
    evaluation = threading.Thread(
        target=lambda: evaluated.extend(fleet.generate([request(number) for number in asked])), daemon=True
    )
    evaluation.start()
    assert client.submitted.wait(WAIT_S)
    for number in np.random.default_rng(0).permutation([*asked, *others]).tolist():
        client.answers.put(GenerationFailure(number, "scripted"))
        if answer := fleet.poll_answer():
            polled.append(answer.request_id)
    evaluation.join(WAIT_S)
    while answer := fleet.poll_answer():
        polled.append(answer.request_id)
    assert [answer.request_id for answer in evaluated] == asked
    assert sorted(polled) == others
