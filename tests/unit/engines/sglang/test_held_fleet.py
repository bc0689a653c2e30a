"""Engines that keep their weights: they serve at once, nothing of theirs is changed, and only one model answers."""

import contextlib
import itertools

import pytest

from dapo_mega.config import RunConfig
from dapo_mega.engines.sglang.held_fleet import HeldFleet
from dapo_mega.errors import FleetError
from dapo_mega.types import Response
from tests.unit.engines.sglang.scripted_server import KEY, VOCAB_SIZE, Servers, assert_exact, make_request


@contextlib.contextmanager
def held(servers):
    config = RunConfig.model_validate(
        {
            "output_dir": "o",
            "num_steps": 1,
            "model": {"path": "m"},
            "data": {"train": {"path": "d"}},
            "reward": {"overlong_punishment": False},
            "rollout": {
                "placement": "fleet",
                "max_response_tokens": 64,
                "fleet": {
                    "urls": servers.urls,
                    "wait_limit_s": 5,
                    "heartbeat_s": 0.1,
                    "hung_after_s": 5,
                    "requests_per_engine": 4,
                },
            },
        }
    )
    fleet = HeldFleet(config, VOCAB_SIZE, KEY)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def servers():
    made = []

    def make(count, tokens_per_s=0.0):
        made.append(Servers(count, tokens_per_s))
        return made[-1]

    yield make
    for group in made:
        group.close()


def test_every_request_is_answered_and_the_engines_stay_as_they_were(servers):
    group = servers(2)
    requests = [make_request((1, i)) for i in range(40)]
    with held(group) as fleet:
        answers = list(fleet.answers([requests[:3], requests[3:]]))
    by_id = {answer.request_id: answer for answer in answers}
    assert len(answers) == len(by_id) == 40
    for request in requests:
        assert_exact(by_id[request.request_id], request)
    for engine in group.engines:
        assert engine.version == "default"
        assert set(engine.calls) <= {"/health", "/server_info", "/model_info", "/generate", "/begin_weight_update"}


def test_requests_are_taken_only_as_there_is_room(servers):
    taken = itertools.count()
    requests = ([make_request((1, next(taken)))] for _ in range(1000))
    with held(servers(1)) as fleet:
        assert isinstance(next(fleet.answers(requests)), Response)
    assert next(taken) <= 8


def test_an_engine_whose_weights_are_replaced_gives_no_further_answer(servers):
    group = servers(1)
    with held(group) as fleet:
        answers = fleet.answers([[make_request((1, i))] for i in range(100)])
        assert isinstance(next(answers), Response)
        group.engines[0].version = "other:7"
        with pytest.raises(FleetError, match=r"no engine fits the run.*it holds weights 'other:7'"):
            list(answers)


def test_engines_with_other_weights_or_too_short_a_context_are_refused(servers):
    group = servers(2)
    group.engines[1].version = "run:3"
    requests = [make_request((1, i)) for i in range(20)]
    with held(group) as fleet:
        asked = {answer.engine_spans[0][0] for answer in fleet.answers([requests])}
    assert len(asked) == 1
    group = servers(1)
    group.engines[0].settings["context_length"] = 2111
    with held(group) as fleet, pytest.raises(FleetError, match=r"context of 2111 tokens is shorter than .* = 2112"):
        list(fleet.answers([requests]))


def test_requests_of_an_engine_that_dies_move_to_another(servers):
    group = servers(2, tokens_per_s=100)
    requests = [make_request((1, i), 40) for i in range(16)]
    with held(group) as fleet:
        answers = fleet.answers([requests])
        found = [next(answers)]
        group.stop(0)
        found += answers
    assert all(isinstance(answer, Response) for answer in found)
    assert {answer.request_id for answer in found} == {request.request_id for request in requests}
