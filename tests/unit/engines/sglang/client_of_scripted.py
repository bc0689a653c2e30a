"""A fleet's client over scripted servers: what its tests ask for, and wait for."""

import queue
import time

import numpy as np

from dapo_mega.engines.sglang.fleet_client import FleetClient
from dapo_mega.engines.sglang.versions import WeightVersion
from dapo_mega.types import GenerationRequest, SamplingParams
from tests.unit.engines.sglang.scripted_server import DEADLINE_S, answer_of


class Driver(FleetClient):
    """Asked by a test that is not asynchronous. Answers are in the order in which they came."""

    def __init__(self, *args):
        super().__init__(*args)
        self.answers = queue.SimpleQueue()

    def submit(self, requests):
        def start():
            for request in requests:
                self.generate(request).add_done_callback(self._take)

        self.call(start)

    def _take(self, generation):
        if answer := answer_of(generation):
            self.answers.put(answer)

    def next_answer(self, timeout_s):
        """None if none comes within `timeout_s`."""
        try:
            return self.answers.get(timeout=timeout_s)
        except queue.Empty:
            return None


def requests(count, first=0, length=8):
    sampling = SamplingParams(max_new_tokens=length)
    return [GenerationRequest(first + i, np.array([1, i % 7], np.int32), i, sampling) for i in range(count)]


def give_weights(driver, version=0, run=""):
    """What a push does, without weights."""
    targets = driver.pause_generation(driver.targets(only_outdated=False))
    set_version = str(WeightVersion(run, version))
    driver.start_call(
        targets,
        lambda client: client.command("update_weights_from_distributed", weight_version=set_version),
        DEADLINE_S,
    ).result()
    for target in targets:
        driver.synced(target.url, version)
    driver.resume_generation(targets)
    return targets


def answers(driver, count):
    deadline = time.monotonic() + DEADLINE_S
    found = []
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} answers came"
        if answer := driver.next_answer(0.1):
            found.append(answer)
    return found


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
