"""A collector on an engine that answers by a rule, driven by calls that wait."""

import asyncio

import numpy as np

from dapo_mega.engines.lockstep import LockstepLoop
from dapo_mega.engines.protocol import Generation
from dapo_mega.rollout.collector import Collector
from dapo_mega.types import GenerationFailure, Response


class _Loop(LockstepLoop):
    """One for all tests of a process; the engine that was driven last takes the turns."""

    def __init__(self):
        super().__init__(lambda: self.engine.step(), lambda: self.engine.check_stop())

        self.tasks = []  # Of collectors that a test has forgotten, too.

    def create_task(self, coroutine, **how):
        self.tasks.append(super().create_task(coroutine, **how))
        return self.tasks[-1]

    def is_quiet(self):
        return not self._beside


LOOP = _Loop()


def forget_tasks():
    """Of a test that has ended."""
    tasks = [task for task in LOOP.tasks if not task.done()]
    for task in tasks:
        task.cancel()
    LOOP.tasks.clear()
    LOOP.run_until_complete(_ended(tasks))


async def _ended(tasks):
    await asyncio.gather(*tasks, return_exceptions=True)


async def _settled():
    while True:
        was_quiet = LOOP.is_quiet()
        for _ in range(12):  # What has just come from beside the loop goes on for some turns.
            await asyncio.sleep(0)
        if was_quiet and LOOP.is_quiet():
            return


class Scripted(Generation):
    def __init__(self, request, engine):
        super().__init__(request, engine.loop)
        self.engine = engine

    def oldest_version(self):
        return self.engine.oldest_version(self.request.request_id)

    def cancel(self, msg=None):
        if super().cancel(msg):
            self.engine.cancel(self.request.request_id)
            return True
        return False


class ScriptedEngine:
    """Answers by a rule; faults that a real engine cannot be made to show on demand.

    Finishes the request next that `order` sorts first; the first two tokens of one that was submitted under older
    weights are of those.
    """

    loop = LOOP

    def __init__(self, is_right, order=lambda request: request.request_id, fails=lambda request: False):
        self.is_right, self.order, self.fails = is_right, order, fails
        self.version = 0
        self.asked = []
        self.in_flight, self.open = {}, {}
        self.submitted, self.cancelled = [], []
        self.most_groups = 0

    def check_stop(self):
        """As of `LockstepLoop`."""

    def run(self, work):
        LOOP.engine = self
        return LOOP.complete(work)

    def settle(self):
        """Let all tasks go on until they wait for answers."""
        self.run(_settled())

    def generate(self, request):
        assert request.request_id not in self.in_flight
        self.in_flight[request.request_id] = (request, self.version)
        self.submitted.append(request.request_id)
        self.most_groups = max(self.most_groups, len({prompt_of(r) for r, _ in self.in_flight.values()}))
        generation = self.open[request.request_id] = Scripted(request, self)
        return generation

    def step(self):
        if not self.in_flight:
            return False
        self.finish(min(self.in_flight, key=lambda i: self.order(self.in_flight[i][0])))
        return True

    def oldest_version(self, request_id):
        return self.in_flight[request_id][1]

    def finish(self, request_id):
        """The response comes; it is taken when tasks go on."""
        request, version = self.in_flight.pop(request_id)
        self.open.pop(request_id).answer(self.answer(request, version))

    def answer(self, request, version):
        if self.fails(request):
            return GenerationFailure(request.request_id, "scripted")
        if version == self.version:
            return self.respond(request, weight_version=version)
        length = 3 + request.request_id % 14
        return self.respond(request, weight_version=version, version_spans=((version, 2), (self.version, length)))

    def cancel(self, request_id):
        self.in_flight.pop(request_id)
        del self.open[request_id]
        self.cancelled.append(request_id)

    def respond(self, request, **versions):
        prompt = prompt_of(request)
        self.asked.append((request.request_id, prompt, request.seed))
        right = self.is_right(prompt, request.request_id)
        length = 3 + request.request_id % 14
        tokens = np.full(length, 1 if right else 2, np.int32)
        finish = "length" if length >= 16 else "stop"
        logprobs = -np.random.default_rng(request.request_id).random(length, dtype=np.float32)
        return Response(request.request_id, tokens, logprobs, finish, **{"weight_version": 0, **versions})


def prompt_of(request):
    return int(request.prompt_token_ids[0]) - 1


class DrivenCollector(Collector):
    """Its calls wait, and what has arrived at the engine is taken before each."""

    def collect(self, version):
        self.settle()
        return self._engine.run(super().collect(version))

    def settle(self):
        if hasattr(self._engine, "settle"):
            self._engine.settle()

    def weights_arrived(self):
        async def arrived():
            super(DrivenCollector, self).weights_arrived()

        self._engine.run(arrived())
        self.settle()

    def state(self):
        self.settle()
        return super().state()
