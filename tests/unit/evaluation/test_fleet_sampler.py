"""Engines that are asked and get no weights: only those that serve the model answer, and requests wait for room."""

import contextlib

import pytest

from dapo_mega.config import RunConfig
from dapo_mega.errors import FleetError
from dapo_mega.evaluation.fleet import FleetSampler, with_engines
from dapo_mega.rollout.asking import ask_in_parts
from dapo_mega.types import Trajectory
from tests.distributed.tiny import make_model
from tests.unit.engines.sglang.scripted_server import KEY, Servers, expected_tokens, make_request, serve_model

ROOM = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of the same sizes."""
    folder = tmp_path_factory.mktemp("models")
    return [make_model(folder / str(seed), tied=True, seed=seed) for seed in (0, 1)]


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:

        def make(*models):
            group = Servers(len(models))
            stack.callback(group.close)
            for engine, model in zip(group.engines, models, strict=True):
                serve_model(engine, model)
            return group

        yield make


@contextlib.contextmanager
def sampler(model, urls, key=KEY, wait_limit_s=120):
    config = RunConfig.model_validate(
        {
            "output_dir": "o",
            "num_steps": 1,
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"train": {"path": "d"}, "max_prompt_tokens": 16},
            "reward": {"overlong_punishment": False},
            "rollout": {"max_response_tokens": 8},
        }
    )
    fleet = {"urls": urls, "wait_limit_s": wait_limit_s, "heartbeat_s": 0.1, "hung_after_s": 60}
    made = FleetSampler(with_engines(config, requests_per_engine=ROOM, **fleet), [], key)
    try:
        yield made
    finally:
        made.close()


def ask(asking, parts, use=lambda number, answers: None):
    prompted = ((number, [(None, request) for request in requests]) for number, requests in parts)
    asking.run(ask_in_parts(asking.generate, prompted, use, asking.most_open))


def asked(engine):
    return [payload for payload in engine.payloads if "logprob_start_len" not in payload]


def test_engines_of_the_model_answer_everything_as_they_have_room(models, servers):
    group = servers(models[0], models[1], models[0])
    requests = [make_request((1, i)) for i in range(50)]
    of_one = {i: [request] for i, request in enumerate(requests)}
    of_five = {i: requests[5 * i : 5 * i + 5] for i in range(10)}
    with sampler(models[0], group.urls) as asking:
        assert asking.most_open == 2 * ROOM * len(group.urls)
        for parts in (of_one, of_five):
            found = {}
            ask(asking, parts.items(), found.__setitem__)
            assert found.keys() == parts.keys()
            for number, answers in found.items():
                for answer, request in zip(answers, parts[number], strict=True):
                    assert answer.token_ids.tolist() == expected_tokens(request, group.engines[0].vocab_size)
        assert asking.engines == ("SGLang 0.5.23",)
    assert [bool(asked(engine)) for engine in group.engines] == [True, False, True]


def test_an_engine_whose_weights_are_replaced_must_agree_again(models, servers):
    requests = [(i, [make_request((1, i))]) for i in range(50)]
    for now in models:
        group = servers(models[0])
        with sampler(models[0], group.urls) as asking:
            found = []

            def replaced_after_the_first(number, answers, engine=group.engines[0], now=now, found=found):
                found.extend(answers)
                if len(found) == 1:
                    serve_model(engine, now)
                    engine.version = "other:7"

            if now == models[0]:
                ask(asking, requests, replaced_after_the_first)
                assert len(found) == len(requests)
                assert all(isinstance(answer, Trajectory) for answer in found)
            else:
                with pytest.raises(
                    FleetError, match=r"no engine fits the run: .* it serves another model than the one"
                ):
                    ask(asking, requests, replaced_after_the_first)


def test_engines_that_cannot_be_asked_are_one_line(models, servers):
    group = servers(*models[:1] * 2)
    short, stopped = group.engines
    short.settings["context_length"] = 23
    group.stop(1)
    cases = [
        (
            short.url,
            "another key",
            120,
            r"it rejects the API key in DAPO_MEGA_API_KEY; give trainer and engines the same",
        ),
        (short.url, KEY, 120, r"context of 23 tokens is shorter than data.max_prompt_tokens .* = 24; start it with"),
        (stopped.url, KEY, 1, r"0 of 1 required engines .* are reachable after \d+ s .*, and run the same command"),
    ]
    for url, key, limit_s, message in cases:
        with (
            sampler(models[0], [url], key, limit_s) as asking,
            pytest.raises(FleetError, match=message) as error,
        ):
            ask(asking, [(0, [make_request()])])
        assert "\n" not in str(error.value)
