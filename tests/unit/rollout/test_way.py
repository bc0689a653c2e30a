"""The way of one response, from `collect` to its reward, is short: the page of the room lists its functions."""

import asyncio
import re
import sys
from pathlib import Path

import aiohttp
import numpy as np
import pytest

import dapo_mega
from dapo_mega.config import RunConfig
from dapo_mega.engines.embedded.fleet import EmbeddedFleet
from dapo_mega.engines.protocol import Generation
from dapo_mega.rewards import ComposedReward, Score, WeightedReward
from dapo_mega.rewards.records import Reward
from dapo_mega.rollout.collector import Collector
from dapo_mega.rollout.scoring import ResponseScorer
from dapo_mega.types import Prompt, Response

from ..engines.sglang.client_of_scripted import Driver, give_weights
from ..engines.sglang.scripted_server import DEADLINE_S, KEY, VOCAB_SIZE, Servers

PACKAGE = Path(dapo_mega.__file__).parent
PAGE = PACKAGE / "README.md"
LOOPS = ("distributed/event_loops.py", "engines/lockstep.py", "engines/sglang/event_loop.py")
MOST = 20
"""With the component's own `score`."""


class Way:
    """The functions that hand a response on: those on the stack, awaits included, when a task or a thread starts, a
    request is asked and sent, its answer comes, and a component gives the reward. What they call for a value is not on
    the stack then. Constructors and event loops are left out."""

    def __init__(self):
        self.functions = []
        self.is_walked = False

    def note(self):
        stack, frame = [], sys._getframe(1)
        while frame and not self.is_walked:
            path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
            if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).as_posix() not in LOOPS:
                stack.insert(0, name.replace(".<locals>", ""))
            frame = None if path.match("asyncio/*events.py") else frame.f_back  # The loop: nobody awaits this one.
        passed = [name for name in stack if not re.search(r"<|__init__$", name)]
        if self.functions or passed[:1] == ["Collector.collect"]:
            self.functions += [name for name in dict.fromkeys(passed) if name not in self.functions]

    def notes(self, function):
        def noting(*args, **kwargs):
            self.note()
            return function(*args, **kwargs)

        return noting


class Noting(Reward):
    def __init__(self, way):
        self.way = way

    def score(self, records):
        self.way.note()
        self.way.is_walked = True
        return [Score(1.0, True) for _ in records]


class Engine:
    weight_version = 0

    def generate(self, requests):
        one = np.ones(1, np.int32)
        return [Response(request.request_id, one, -one.astype(np.float32), "stop", 0) for request in requests]


def config(**rollout):
    return RunConfig.model_validate(
        {
            "output_dir": "o",
            "num_steps": 1,
            "model": {"path": "m", "dtype": "fp32"},
            "data": {"train": {"path": "d"}, "max_prompt_tokens": 8},
            "rollout": {"max_response_tokens": 8, **rollout},
            "reward": {"overlong_punishment": False},
            "algorithm": {"dynamic_sampling": False},
            "batch": {
                "groups_per_step": 1,
                "group_size": 2,
                "generation_groups": 1,
                "mini_batch_groups": 1,
                "tokens_per_microbatch": 64,
            },
        }
    )


def walk(way, fleet, run, monkeypatch):
    """Collect one group."""
    reward = ComposedReward([WeightedReward("own", 1.0, Noting(way))], "own")
    scorer = ResponseScorer(run.reward, reward, lambda responses: ["text"] * len(responses))
    collector = Collector(run, [Prompt(0, "p", np.array([5, 6], np.int32), "1")], fleet, scorer, ())
    for where, name in (
        (asyncio.BaseEventLoop, "create_task"),
        (asyncio.BaseEventLoop, "run_in_executor"),
        (Generation, "__init__"),
        (Generation, "set_result"),
        (aiohttp.TCPConnector, "connect"),
    ):
        monkeypatch.setattr(where, name, way.notes(getattr(where, name)))
    groups, _ = fleet.run(collector.collect(0))
    assert [scored.reward for scored in groups[0].trajectories] == [1.0, 1.0]


@pytest.fixture
def way_through_a_fleet(monkeypatch):
    way, servers = Way(), Servers(1)
    run = config(placement="fleet", fleet={"urls": servers.urls, "wait_limit_s": DEADLINE_S})
    fleet = Driver(run, VOCAB_SIZE, KEY)
    try:
        give_weights(fleet)
        walk(way, fleet, run, monkeypatch)
    finally:
        fleet.close()
        servers.close()
    return way.functions


@pytest.fixture
def way_through_this_process(monkeypatch):
    way = Way()
    walk(way, EmbeddedFleet(Engine()), config(), monkeypatch)
    return way.functions


def test_a_reader_passes_at_most_twenty_functions(way_through_a_fleet, way_through_this_process):
    assert len(way_through_a_fleet) < MOST, way_through_a_fleet
    assert len(way_through_this_process) < MOST, way_through_this_process


def test_the_page_of_the_room_lists_them(way_through_a_fleet):
    section = PAGE.read_text().split("### From `collect` to a reward")[1].split("\n## ")[0]
    listed = re.findall(r"^[0-9]+\. `(.+?)`", section, re.MULTILINE)
    assert listed[:-1] == way_through_a_fleet
    assert listed[-1] == "Reward.score"
