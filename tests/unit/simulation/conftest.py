"""Simulated engines that were asked for responses."""

import asyncio

import numpy as np
import pytest

from dapo_mega.planning.step_time import DecodingSpeed
from dapo_mega.simulation.engines import SimulatedEngines
from dapo_mega.simulation.run import VirtualTimeLoop
from dapo_mega.types import GenerationRequest, SamplingParams

# 2 s for one token of one response, 3 s for one of each of two.
SPEED = DecodingSpeed(base_s=1.0, per_response_s=1.0, places=2)


class Simulation:
    """Engines, asked for responses of these lengths."""

    def __init__(self, lengths, failures=None, num_engines=1):
        self.engines = SimulatedEngines(num_engines, SPEED, lambda request: lengths[request.request_id], failures)
        self.loop = VirtualTimeLoop(self.engines)
        sampling = SamplingParams(max_new_tokens=99)
        requests = [GenerationRequest(i, np.array([1], np.int32), i, sampling) for i in range(len(lengths))]

        async def asked():
            return [self.engines.generate(request) for request in requests]

        self.generations = self.loop.complete(asked())
        self.open = set(self.generations)

    def train(self, seconds):
        self.loop.complete(self.engines.train(seconds))

    def next(self):
        """The next response."""
        self.open = {generation for generation in self.open if not generation.cancelled()}
        (ended,), self.open = self.loop.complete(asyncio.wait(self.open, return_when=asyncio.FIRST_COMPLETED))
        return ended.result()

    def ends(self, number):
        return [(self.next().request_id, self.engines.clock) for _ in range(number)]


@pytest.fixture
def asked():
    simulations = []

    def ask(*arguments, **options):
        simulations.append(Simulation(*arguments, **options))
        return simulations[-1]

    yield ask
    for simulation in simulations:
        simulation.loop.shut()
