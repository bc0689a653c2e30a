"""Reserved engines answer by one version of the weights, while the others are updated and serve training."""

import asyncio
import threading

import pytest

from dapo_mega.types import GenerationFailure, Response
from tests.unit.engines.sglang.client_of_scripted import answers, give_weights, requests, wait_until
from tests.unit.engines.sglang.scripted_server import DEADLINE_S, SLOW, assert_exact, hurry

LONG = 64
PACE = 200.0
"""Tokens per second, so that a long response takes a third of a second."""


async def asked(driver, requests, **how):
    """The engines that were reserved, with the responses that they gave, by id, and the reasons of the others."""
    async with driver.reserved(**how) as engines:
        generations = [engines.generate(request) for request in requests]
        found = await asyncio.gather(*generations, return_exceptions=True)
    responses = {answer.request_id: answer for answer in found if isinstance(answer, Response)}
    return engines, responses, {answer.reason for answer in found if isinstance(answer, GenerationFailure)}


def start(driver, requests, *, num_engines=1, limit_s=DEADLINE_S, **how):
    return driver.start(asked(driver, requests, num_engines=num_engines, limit_s=limit_s, **how))


def index_of_reserved(driver, group):
    assert driver.pop_metrics()["fleet/engines_reserved"] == 1
    (url,) = driver._membership.in_state("reserved")
    return group.urls.index(url)


def give_first_weights(driver, group, version):
    wait_until(lambda: len(driver.targets(only_outdated=False)) == len(group.urls))
    give_weights(driver, version)


def outdated(driver):
    return {target.url for target in driver.targets(only_outdated=True)}


@pytest.mark.parametrize("pause", ["abort", "retract"])
def test_all_answers_are_of_the_version_asked_for_while_training_goes_on(servers, drive, pause):
    group = servers(3, SLOW)
    driver = drive(group.urls, weight_sync={"in_flight": "continue", "pause": pause})
    give_first_weights(driver, group, 7)
    training, held_out = requests(12, length=LONG), requests(40, first=1 << 62, length=LONG)
    driver.submit(training[:9])  # Partial rollouts leave requests in flight, also on the engine that is reserved.
    wait_until(lambda: all(engine.in_flight for engine in group.engines))
    future = start(driver, held_out, version=7)
    wait_until(lambda: driver._membership.in_state("reserved"))
    reserved = index_of_reserved(driver, group)
    for version in (8, 9):
        updated = {target.url for target in give_weights(driver, version)}
        assert updated == {url for url in group.urls if url != group.urls[reserved]}
    driver.submit(training[9:])
    assert not future.done()
    hurry(group.engines)
    of_training = {answer.request_id: answer for answer in answers(driver, len(training))}
    for request in training:
        assert_exact(of_training[request.request_id], request)
    assert {of_training[request.request_id].weight_version for request in training[9:]} == {9}
    engines, responses, _ = future.result(DEADLINE_S)
    assert (engines.ended_early, engines.num_engines) == ("", 1)
    for request in held_out:
        response = responses[request.request_id]
        assert_exact(response, request)
        assert response.weight_version == 7
        assert not response.version_spans
        assert response.engine_spans == ((group.urls[reserved], LONG),)
    assert outdated(driver) == {group.urls[reserved]}
    assert len(give_weights(driver, 10)) == 3
    metrics = driver.pop_metrics()
    assert metrics["rollout/requests_answered"] == 12, "training's account has the requests of others"
    assert (metrics["rollout/requests_open"], metrics["rollout/failed_calls"]) == (0, 0)


def end_by_limit(driver, group):
    return "the limit of 1 s was reached"


def end_by_death(driver, group):
    group.stop(index_of_reserved(driver, group))
    return "no engine with the weights of version 3 is left"


def end_by_foreign_weights(driver, group):
    engine = group.engines[index_of_reserved(driver, group)]
    engine.version, engine.tokens_per_s = "4", 1e6  # All of them end now, with tokens of both.
    return "no engine with the weights of version 3 is left"


def end_by_need(driver, group):
    group.stop(1 - index_of_reserved(driver, group))
    return "training has fewer than rollout.fleet.min_engines=1 engines"


@pytest.mark.parametrize("disturb", [end_by_limit, end_by_death, end_by_foreign_weights, end_by_need])
def test_what_ends_early_keeps_its_answers_and_frees_the_engine(servers, drive, disturb):
    group = servers(2, PACE)
    driver = drive(group.urls, min_engines=1)
    give_first_weights(driver, group, 3)
    wanted = [*requests(5, length=4), *requests(5, first=5, length=10**4)]
    limit_s = 1 if disturb is end_by_limit else DEADLINE_S
    future = start(driver, wanted, version=3, limit_s=limit_s)
    if disturb is not end_by_limit:
        wait_until(lambda: driver._reserved and len(driver._reserved._dispatcher.open) == 5)
    reason = disturb(driver, group)
    engines, responses, reasons = future.result(DEADLINE_S)
    assert engines.ended_early.startswith(reason), engines.ended_early
    assert reasons == {engines.ended_early}
    assert responses.keys() == set(range(5)) or disturb is end_by_limit
    assert responses.keys() <= set(range(5))
    assert {response.weight_version for response in responses.values()} <= {3}
    assert driver._membership.in_state("reserved") == []


def test_a_dead_reserved_engines_requests_move_to_one_of_the_same_version_only(servers, drive):
    group = servers(3, SLOW)
    driver = drive(group.urls)
    give_first_weights(driver, group, 3)
    held_out = requests(20, length=LONG)
    future = start(driver, held_out, version=3, num_engines=2)
    wait_until(lambda: sum(engine.in_flight for engine in group.engines) == 20)
    (others,) = driver._membership.in_state("serving")
    give_weights(driver, 4)
    dies = next(i for i, url in enumerate(group.urls) if url != others)
    group.stop(dies)
    hurry(group.engines)
    engines, responses, _ = future.result(DEADLINE_S)
    assert engines.ended_early == ""
    for request in held_out:
        assert_exact(responses[request.request_id], request)
    assert not group.engines[group.urls.index(others)].payloads


@pytest.mark.parametrize(
    ("min_engines", "version", "num_engines", "reserved"),
    [(2, 3, 1, 0), (1, 2, 1, 0), (1, 3, 5, 1), (2, 3, None, 2)],
)
def test_training_keeps_its_engines_unless_all_are_asked_for(
    servers, drive, min_engines, version, num_engines, reserved
):
    group = servers(2)
    driver = drive(group.urls, min_engines=min_engines)
    give_first_weights(driver, group, 3)
    future = start(driver, requests(3), version=version, num_engines=num_engines)
    engines, responses, reasons = future.result(DEADLINE_S)
    assert engines.num_engines == reserved
    assert len(responses) == (3 if reserved else 0)
    assert reasons == ({engines.ended_early} if not reserved else set())


def test_a_run_that_starts_waits_for_the_engines_of_its_first_evaluation(servers, drive):
    group = servers(2)
    group.engines[1].health = "loading"
    driver = drive(group.urls, evaluation={"beside_training": True}, min_engines=1)
    timer = threading.Timer(0.5, setattr, (group.engines[1], "health", "ok"))
    timer.start()
    assert len(give_weights(driver, 0)) == 2
    timer.join()
    group.stop(1)
    wait_until(lambda: len(driver._membership.in_state("serving")) == 1)
    assert len(give_weights(driver, 1)) == 1, "later it does not wait"


def test_closing_the_fleet_ends_what_reserved_engines_do(servers, drive):
    group = servers(2, PACE)
    driver = drive(group.urls)
    give_first_weights(driver, group, 0)
    future = start(driver, requests(3, length=10**6), version=0, limit_s=600)
    wait_until(lambda: any(engine.in_flight for engine in group.engines))
    driver.close()
    assert future.result(DEADLINE_S)[2] == {"the run ends"}
