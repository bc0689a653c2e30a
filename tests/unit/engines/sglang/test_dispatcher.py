"""Requests of a fleet, with scripted engines behind real HTTP."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dapo_mega.engines.sglang.api import RouteSizes
from dapo_mega.engines.sglang.dispatcher import Dispatcher
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineTimeout
from dapo_mega.types import GenerationFailure, GenerationRequest, Response, SamplingParams
from tests.unit.engines.sglang.scripted_server import (
    SLOW,
    VOCAB_SIZE,
    assert_exact,
    check_counts,
    expected_tokens,
    fleet_of,
    hurry,
    make_request,
    until,
    within_deadline,
)
from tools.scripted_engine import ScriptedEngine

CAUSE_OF_FAULT = {
    "malformed_json": "malformed",
    "not_an_object": "malformed",
    "token_missing": "token_count",
    "wrong_count": "token_count",
    "no_logprobs": "logprobs",
    "infinite_logprob": "logprobs",
    "null_logprob": "logprobs",
    "positive_logprob": "logprobs",
    "other_logprobs": "logprobs",
    "error_500": "refused",
    "reset": "disconnected",
    "drip": "timeout",
    "old_version": "version",
    "future_version": "version",
    "foreign_version": "version",
    "out_of_vocabulary": "vocabulary",
    "too_long": "token_count",
    "too_short": "token_count",
    "hang": "timeout",
    "abort": "aborted",
}


def engines(count, **settings):
    return [ScriptedEngine(VOCAB_SIZE, **settings) for _ in range(count)]


def test_an_answer_without_the_experts_that_were_asked_for_is_no_answer():
    async def body():
        (engine,) = engines(1)
        sizes = RouteSizes(num_layers=2, layers=(0, 1), per_token=1, experts=4)
        async with fleet_of(engine, route_sizes=sizes, max_attempts=2) as fleet:
            unrouted, routed = make_request([5, 6]), replace(make_request([5, 7]), routes_from=0)
            answer, failure = await fleet.ask(unrouted, routed)
            metrics = fleet.dispatcher.pop_metrics()
        assert_exact(answer, unrouted)
        assert isinstance(failure, GenerationFailure)
        assert "which experts its tokens went through" in failure.reason
        assert metrics["rollout/failed_calls_routes"] == metrics["rollout/failed_calls"] == 2
        assert [payload.get("return_routed_experts", False) for payload in engine.payloads].count(True) == 2

    within_deadline(body)


def prompts_of(engine):
    return Counter(tuple(payload["input_ids"]) for payload in engine.payloads)


@pytest.mark.parametrize("fault", CAUSE_OF_FAULT)
def test_a_fault_is_retried_on_another_engine_and_never_becomes_an_answer(fault):
    async def body():
        bad, good = engines(2)
        bad.fault = lambda payload: fault
        limit_s = 3.0 if fault in ("hang", "drip") else 20.0
        async with fleet_of(bad, good, version=3, request_timeout_s=limit_s) as fleet:
            requests = [make_request([5, 6, i]) for i in range(6)]
            for request, answer in zip(requests, await fleet.ask(*requests), strict=True):
                assert_exact(answer, request)
                assert answer.weight_version == 3
            metrics = fleet.dispatcher.pop_metrics()
        num_bad = bad.calls["/generate"]
        assert 0 < num_bad <= 6
        assert metrics[f"rollout/failed_calls_{CAUSE_OF_FAULT[fault]}"] == num_bad
        assert metrics["rollout/failed_calls"] == num_bad
        assert metrics["rollout/requests_answered"] == metrics["rollout/requests_submitted"] == 6

    within_deadline(body)


@pytest.mark.parametrize("fault", ["error_500", "malformed_json", "old_version"])
def test_a_request_that_fails_everywhere_ends_with_the_reason(fault):
    async def body():
        bad = engines(2)
        for engine in bad:
            engine.fault = lambda payload: fault
        async with fleet_of(*bad, max_attempts=3) as fleet:
            request = make_request()
            (answer,) = await fleet.ask(request)
            assert isinstance(answer, GenerationFailure)
            assert answer.request_id == request.request_id
            assert "3 attempts failed, lastly http://127.0.0.1" in answer.reason
            assert fleet.dispatcher.counts["requests_failed"] == 1
            assert not fleet.dispatcher.open
        assert sorted(engine.calls["/generate"] for engine in bad) == [1, 2]

    within_deadline(body)


def test_token_ids_outside_of_the_vocabulary_are_never_sent():
    async def body():
        (engine,) = engines(1)
        async with fleet_of(engine) as fleet:
            answers = await fleet.ask(make_request([5, VOCAB_SIZE]), make_request([]), make_request([5, 6]))
            assert [type(answer) for answer in answers] == [GenerationFailure, GenerationFailure, Response]
            assert f"token id {VOCAB_SIZE}" in answers[0].reason
        assert prompts_of(engine) == {(5, 6): 1}

    within_deadline(body)


def test_a_stop_token_ends_a_response_and_the_limit_truncates_it():
    async def body():
        (engine,) = engines(1)
        async with fleet_of(engine) as fleet:
            stop = expected_tokens(make_request())[3]
            stopped, cut = make_request(stop_token_ids=(stop,)), make_request()
            answers = await fleet.ask(stopped, cut)
            assert_exact(answers[0], stopped)
            assert_exact(answers[1], cut)
            assert [answer.finish_reason for answer in answers] == ["stop", "length"]
            assert len(answers[0].token_ids) == 4

    within_deadline(body)


def test_a_request_number_in_flight_is_refused_a_second_time():
    async def body():
        (engine,) = engines(1, tokens_per_s=100)
        async with fleet_of(engine) as fleet:
            request = make_request()
            fleet.start([request])
            with pytest.raises(ValueError, match="in flight already"):
                fleet.start([request])
            await fleet.answers([request])

    within_deadline(body)


def test_work_waits_without_engines_and_starts_with_the_first():
    async def body():
        (engine,) = engines(1)
        async with fleet_of(engine) as fleet:
            fleet.dispatcher.remove_engine(engine.url, "for now")
            request = make_request()
            fleet.start([request])
            await asyncio.sleep(0.1)
            assert not fleet.answered()
            assert fleet.dispatcher.pop_metrics()["rollout/requests_waiting"] == 1
            fleet.dispatcher.add_engine(fleet.clients[0], 0)
            assert_exact((await fleet.answers([request]))[0], request)

    within_deadline(body)


def test_an_engine_that_is_not_there_costs_no_attempts():
    async def body():
        gone, (late,) = EngineClient("http://127.0.0.1:9", "secret"), engines(1)
        troubled = []
        async with fleet_of(late, max_attempts=1, on_trouble=troubled.append) as fleet:
            fleet.dispatcher.remove_engine(late.url, "for now")
            fleet.dispatcher.add_engine(gone, 0)
            request = make_request()
            fleet.start([request])
            await until(lambda: len(troubled) >= 4)
            assert set(troubled) == {gone.url}
            fleet.dispatcher.add_engine(fleet.clients[0], 0)
            assert_exact((await fleet.answers([request]))[0], request)
            assert fleet.dispatcher.pop_metrics()["rollout/failed_calls_unreachable"] >= 4
        await gone.close()

    within_deadline(body)


def test_a_call_that_is_cancelled_as_its_time_runs_out_ends_quietly(caplog):
    class Late:
        """A client whose cancelled calls end as calls whose time is over."""

        def __init__(self, client):
            self.url, self.abort = client.url, client.abort

        async def generate(self, payload, *limits):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise EngineTimeout(self.url, "late") from None

    async def body():
        first, second = engines(2)
        async with fleet_of(first, second) as fleet:
            for client in fleet.clients:
                fleet.dispatcher.remove_engine(client.url, "for now")
            fleet.dispatcher.add_engine(Late(fleet.clients[0]), 0)
            request = make_request()
            fleet.start([request])
            await until(lambda: fleet.dispatcher.engines()[0].in_flight)
            await asyncio.sleep(0)
            fleet.dispatcher.remove_engine(first.url, "gone")
            fleet.dispatcher.add_engine(fleet.clients[1], 0)
            assert_exact((await fleet.answers([request]))[0], request)

    within_deadline(body)
    assert not [record for record in caplog.records if record.levelname == "CRITICAL"]


def test_an_engine_that_fails_fast_does_not_draw_the_requests():
    async def body():
        bad, good = engines(2)
        bad.fault = lambda payload: "error_500"
        good.tokens_per_s = 200.0
        async with fleet_of(bad, good, requests_per_engine=8, backoff_s=0.3, max_attempts=5) as fleet:
            requests = [make_request([5, 6, i]) for i in range(100)]
            for request, answer in zip(requests, await fleet.ask(*requests), strict=True):
                assert_exact(answer, request)
        assert bad.calls["/generate"] < 50

    within_deadline(body)


def test_the_least_loaded_engine_gets_the_next_prompt():
    async def body():
        three = engines(3, tokens_per_s=100)
        async with fleet_of(*three) as fleet:
            requests = [make_request([5, i]) for i in range(30)]
            await fleet.ask(*requests)
        assert [engine.calls["/generate"] for engine in three] == [10, 10, 10]

    within_deadline(body)


def test_a_groups_requests_stay_on_the_engine_that_has_its_prefix():
    async def body():
        three = engines(3, tokens_per_s=100)
        async with fleet_of(*three, requests_per_engine=256) as fleet:
            await fleet.ask(*(make_request([5, prompt]) for prompt in range(9) for _ in range(16)))
        holders = [set(prompts_of(engine)) for engine in three]
        assert sum(len(held) for held in holders) == 9
        assert [len(held) for held in holders] == [3, 3, 3]

    within_deadline(body)


def test_a_trajectorys_turns_stay_on_the_engine_that_has_those_before():
    async def body():
        three = engines(3, tokens_per_s=100)
        async with fleet_of(*three, requests_per_engine=256) as fleet:
            turns = {i: make_request([5, i]) for i in range(9)}
            for number in (1, 2, 3):
                order = random.Random(number).sample(sorted(turns), 9)
                answers = zip(order, await fleet.ask(*(turns[i] for i in order)), strict=True)
                turns = {
                    i: replace(make_request([5, i, *[9] * number]), engine=answer.engine_spans[-1][0])
                    for i, answer in answers
                }
        trajectories = [{prompt[1] for prompt in prompts_of(engine)} for engine in three]
        assert [len(held) for held in trajectories] == [3, 3, 3]

    within_deadline(body)


def test_a_large_group_spills_over_rather_than_queue_on_one_engine():
    async def body():
        two = engines(2, tokens_per_s=100)
        async with fleet_of(*two, requests_per_engine=64) as fleet:
            await fleet.ask(*(make_request([5, 6]) for _ in range(64)))
        counts = [engine.calls["/generate"] for engine in two]
        assert abs(counts[0] - counts[1]) <= 64 // 8 + 1

    within_deadline(body)


def test_no_engine_ever_has_more_than_its_limit():
    async def body():
        three = engines(3)
        for engine, pace in zip(three, (200, 500, 1000), strict=True):
            engine.tokens_per_s, engine.release_at = pace, 5
        async with fleet_of(*three, requests_per_engine=5) as fleet:
            await fleet.ask(*(make_request([5, i % 40]) for i in range(200)))
        assert [engine.most_in_flight for engine in three] == [5, 5, 5]

    within_deadline(body)


def test_waiting_requests_start_in_the_order_of_their_submission():
    async def body():
        (engine,) = engines(1)
        async with fleet_of(engine, requests_per_engine=1) as fleet:
            await fleet.ask(*(make_request([5, i]) for i in range(50)))
        assert [payload["input_ids"][1] for payload in engine.payloads] == list(range(50))

    within_deadline(body)


def test_requests_that_move_start_before_those_that_have_waited_less():
    async def body():
        stuck, good = engines(2)
        stuck.fault = lambda payload: "hang"
        good.release_at = 3
        async with fleet_of(stuck, good, requests_per_engine=3) as fleet:
            fleet.dispatcher.remove_engine(good.url, "for now")
            requests = [make_request([5, i]) for i in range(8)]
            fleet.start(requests)
            await until(lambda: stuck.calls["/generate"] == 3)
            fleet.dispatcher.remove_engine(stuck.url, "hung")
            fleet.dispatcher.add_engine(fleet.clients[1], 0)
            await fleet.answers(requests)
        assert {payload["input_ids"][1] for payload in good.payloads[:3]} == {0, 1, 2}

    within_deadline(body)


def test_answers_come_as_they_finish():
    async def body():
        (engine,) = engines(1, tokens_per_s=SLOW)
        async with fleet_of(engine) as fleet:
            long, short = make_request([5, 1], max_new_tokens=60), make_request([5, 2], max_new_tokens=1)
            fleet.start([long, short])
            await fleet.answers([short])
            assert fleet.answered() == {short.request_id}
            hurry([engine])
            await fleet.answers([long])

    within_deadline(body)


def test_a_call_that_takes_too_long_is_aborted_and_made_elsewhere():
    async def body():
        slow, fast = engines(2)
        slow.tokens_per_s = 0.001
        async with fleet_of(slow, fast, request_timeout_s=2.0) as fleet:
            requests = [make_request([5, i]) for i in range(4)]
            for request, answer in zip(requests, await fleet.ask(*requests), strict=True):
                assert_exact(answer, request)
            await until(lambda: slow.calls["/abort_request"] == slow.calls["/generate"] and not slow.in_flight)
            assert fleet.dispatcher.pop_metrics()["rollout/failed_calls_timeout"] == slow.calls["/generate"] > 0

    within_deadline(body)


def test_work_of_an_engine_that_leaves_moves_and_costs_no_attempt():
    async def body():
        stuck, good = engines(2)
        stuck.fault = lambda payload: "hang"
        options = {"max_attempts": 1, "backoff_s": 60.0}
        async with fleet_of(stuck, good, **options) as fleet:
            requests = [make_request([5, i]) for i in range(20)]
            fleet.start(requests)
            await until(lambda: len(stuck.payloads) == 10)
            fleet.dispatcher.remove_engine(stuck.url, "hung")
            for request, answer in zip(requests, await fleet.answers(requests), strict=True):
                assert_exact(answer, request)
            assert [engine.url for engine in fleet.dispatcher.engines()] == [good.url]
            metrics = fleet.dispatcher.pop_metrics()
            assert metrics["rollout/requests_moved"] == 10
            assert metrics["rollout/failed_calls"] == 0
            loads, later = fleet.dispatcher.pop_loads(), fleet.dispatcher.pop_loads()
            assert {url: max(load.mean for load in found) > 0 for url, found in loads.items()} == {
                stuck.url: True,
                good.url: True,
            }
            assert list(later) == [good.url], "the other has left"
            assert {load.mean for load in later[good.url]} <= {0.0}, "nothing is open any more"
            await until(lambda: stuck.calls["/abort_request"] == 1)

    within_deadline(body)


def test_cancelled_requests_get_no_answer_and_leave_their_engine():
    async def body():
        (engine,) = engines(1, tokens_per_s=SLOW)
        async with fleet_of(engine, requests_per_engine=2) as fleet:
            requests = [make_request([5, i], max_new_tokens=60) for i in range(6)]
            kept = requests[::3]
            fleet.start(requests)
            await until(lambda: engine.in_flight == 2)
            given_up = [fleet.asked[request.request_id] for request in requests if request not in kept]
            assert all(generation.cancel() for generation in given_up)
            assert not any(generation.cancel() for generation in given_up)
            await until(lambda: engine.calls["/abort_request"])
            hurry([engine])
            for request, answer in zip(kept, await fleet.answers(kept), strict=True):
                assert_exact(answer, request)
            assert not any(fleet.asked[request.request_id].cancel() for request in kept), "they have ended"
            assert fleet.dispatcher.counts["requests_cancelled"] == 4
            assert not fleet.dispatcher.open
            assert engine.calls["/abort_request"] == 1
            assert prompts_of(engine).keys() == {(5, 0), (5, 1), (5, 3)}

    within_deadline(body)


def test_a_request_that_is_cancelled_before_its_call_is_made_is_not_sent():
    async def body():
        (engine,) = engines(1)
        async with fleet_of(engine) as fleet:
            requests = [make_request([5, i]) for i in range(3)]
            fleet.start(requests)
            fleet.asked[requests[1].request_id].cancel()
            kept = [requests[0], requests[2]]
            for request, answer in zip(kept, await fleet.answers(kept), strict=True):
                assert_exact(answer, request)
        assert prompts_of(engine).keys() == {(5, 0), (5, 2)}

    within_deadline(body)


def test_calls_nobody_waits_for_are_hung_up_even_if_aborts_are_lost():
    async def body():
        (engine,) = engines(1, tokens_per_s=0.001)

        async def lost(rid="", all=False):
            aborted.append(rid)

        aborted = []
        async with fleet_of(engine, request_timeout_s=600.0) as fleet:
            fleet.clients[0].abort = lost
            requests = [make_request([5, i]) for i in range(3)]
            fleet.start(requests)
            await until(lambda: engine.in_flight == 3)
            for generation in fleet.asked.values():
                generation.cancel()
            await until(lambda: engine.in_flight == 0)
            assert sorted(aborted) == sorted(payload["rid"] for payload in engine.payloads)

    within_deadline(body)


def test_closing_cancels_what_is_open_without_a_word_to_the_engine():
    async def body():
        (engine,) = engines(1, tokens_per_s=SLOW)
        engine.fault = lambda payload: "error_500" if payload["input_ids"][1] == 0 else None
        async with fleet_of(engine, requests_per_engine=2, backoff_s=600.0) as fleet:
            fleet.start(make_request([5, i], max_new_tokens=60) for i in range(6))
            await until(lambda: engine.in_flight == 2 and engine.calls["/generate"] == 3)
            await fleet.dispatcher.close()
            assert all(generation.cancelled() for generation in fleet.asked.values())
            assert fleet.dispatcher.counts["requests_cancelled"] == 6
            await until(lambda: engine.in_flight == 0)
        assert (engine.calls["/generate"], engine.calls["/abort_request"]) == (3, 0)

    within_deadline(body)


def test_a_call_that_fails_makes_room_for_others_at_once():
    async def body():
        (engine,) = engines(1)
        engine.fault = lambda payload: "error_500" if payload["input_ids"][1] == 0 else None
        async with fleet_of(engine, requests_per_engine=1, backoff_s=60.0) as fleet:
            requests = [make_request([5, i]) for i in range(2)]
            fleet.start(requests)
            (answer,) = await fleet.answers(requests[1:])
            assert_exact(answer, requests[1])
            assert fleet.dispatcher.pop_metrics()["rollout/failed_calls"] == 1

    within_deadline(body)


def test_held_requests_do_not_start_and_drain_waits_for_those_that_have():
    async def body():
        (engine,) = engines(1, tokens_per_s=SLOW)
        async with fleet_of(engine, requests_per_engine=3) as fleet:
            requests = [make_request([5, i], max_new_tokens=60) for i in range(5)]
            fleet.start(requests)
            await until(lambda: engine.in_flight == 3)
            fleet.dispatcher.hold()
            hurry([engine])
            await fleet.dispatcher.drain()
            assert len(fleet.answered()) == len(engine.payloads) == 3
            assert engine.in_flight == 0
            fleet.dispatcher.resume()
            await fleet.answers(requests)

    within_deadline(body)


def test_what_is_taken_back_goes_on_where_it_was_with_new_weights():
    async def body():
        two = engines(2, tokens_per_s=SLOW)
        stop = 77
        async with fleet_of(*two, version=4, max_attempts=1) as fleet:
            requests = [make_request([5, i], max_new_tokens=200, stop_token_ids=(stop,)) for i in range(12)]
            fleet.start(requests)
            await until(lambda: sum(engine.in_flight for engine in two) == 12)
            await until(lambda: all(engine.all_have_tokens for engine in two))
            fleet.dispatcher.hold()
            for client in fleet.clients:
                await client.pause("abort")
            await fleet.dispatcher.reclaim()
            assert not any(engine.in_flight for engine in two)
            for engine, client in zip(two, fleet.clients, strict=True):
                await client.command("update_weights_from_disk", weight_version="5")
                fleet.dispatcher.set_version(engine.url, 5)
                await client.resume()
            hurry(two)
            fleet.dispatcher.resume()
            for request, answer in zip(requests, await fleet.answers(requests), strict=True):
                assert_exact(answer, request)
                (before, split), (after, end) = answer.version_spans
                assert (before, after, answer.weight_version) == (4, 5, 4)
                assert 0 < split < end == len(answer.token_ids)
            assert fleet.dispatcher.pop_metrics()["rollout/requests_taken_back"] == 12

    within_deadline(body)


def test_a_request_is_as_old_as_its_first_token_and_not_as_its_submission():
    async def body():
        (engine,) = engines(1, tokens_per_s=SLOW)
        async with fleet_of(engine, version=4, requests_per_engine=1) as fleet:
            begun, waits = (make_request([5, i], max_new_tokens=200) for i in range(2))
            dispatcher = fleet.dispatcher
            fleet.start([begun, waits])
            await until(lambda: engine.in_flight == 1 and engine.all_have_tokens)
            assert [generation.oldest_version() for generation in fleet.asked.values()] == [4, 4]
            dispatcher.hold()
            await fleet.clients[0].pause("abort")
            await dispatcher.reclaim()
            await fleet.clients[0].command("update_weights_from_disk", weight_version="5")
            dispatcher.set_version(engine.url, 5)
            assert [generation.oldest_version() for generation in fleet.asked.values()] == [4, 5]
            await fleet.clients[0].resume()
            dispatcher.resume()
            assert [generation.oldest_version() for generation in fleet.asked.values()] == [4, 5]
            hurry([engine])
            answers = await fleet.answers([begun, waits])
            assert [answer.weight_version for answer in answers] == [4, 5]

    within_deadline(body)


def test_a_call_that_had_not_begun_is_taken_back_without_tokens():
    async def body():
        (engine,) = engines(1)
        engine.fault = lambda payload: "hang"
        async with fleet_of(engine, max_attempts=1) as fleet:
            request = make_request()
            fleet.start([request])
            await until(lambda: engine.calls["/generate"] == 1)
            fleet.dispatcher.hold()
            await fleet.dispatcher.reclaim(grace_s=0.1)
            engine.fault = lambda payload: None
            fleet.dispatcher.resume()
            assert_exact((await fleet.answers([request]))[0], request)

    within_deadline(body)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_calls_that_stay_in_a_paused_engine_go_on_with_its_new_weights(mode):
    async def body():
        (engine,) = engines(1, tokens_per_s=SLOW)
        async with fleet_of(engine, version=1) as fleet:
            request = make_request(max_new_tokens=200)
            fleet.start([request])
            await until(lambda: engine.in_flight == 1 and engine.all_have_tokens)
            fleet.dispatcher.hold()
            await fleet.clients[0].pause(mode)
            await fleet.clients[0].command("update_weights_from_disk", weight_version="2")
            fleet.dispatcher.set_version(engine.url, 2)
            await fleet.clients[0].resume()
            hurry([engine])
            fleet.dispatcher.resume()
            (answer,) = await fleet.answers([request])
            assert_exact(answer, request)
            assert [version for version, _ in answer.version_spans] == [1, 2]
            assert answer.weight_version == 1
        assert engine.calls["/generate"] == 1

    within_deadline(body)


def test_the_tokens_of_an_unasked_abort_are_kept():
    async def body():
        (engine,) = engines(1)
        engine.fault = lambda payload: "abort" if len(engine.payloads) == 1 else None
        async with fleet_of(engine) as fleet:
            request = make_request(max_new_tokens=10)
            (answer,) = await fleet.ask(request)
            assert_exact(answer, request)
            assert answer.version_spans == ()
        assert [len(payload["input_ids"]) for payload in engine.payloads] == [3, 8]

    within_deadline(body)


@pytest.mark.parametrize(
    ("begin", "end", "inputs"),
    [
        pytest.param(3, 5, [3], id="at its last token"),
        pytest.param(3, 6, [3, 8], id="over both"),
        pytest.param(4, 9, [3, 8], id="far into the second"),
    ],
)
def test_a_text_that_began_before_an_abort_ends_the_response(begin, end, inputs):
    def text_of(tokens):
        return "".join(chr(0x4E00 + token) for token in tokens)

    async def body():
        (engine,) = engines(1)  # It sees no such text, as SGLang does not see what an earlier call has sampled.
        engine.fault = lambda payload: "abort" if len(engine.payloads) == 1 else None
        async with fleet_of(engine, decode=text_of) as fleet:
            request = make_request(max_new_tokens=10)
            tokens = expected_tokens(request)
            stop = replace(request.sampling, stop=("nowhere", text_of(tokens[begin:end])))
            (answer,) = await fleet.ask(replace(request, sampling=stop))
        assert_exact(answer, replace(request, sampling=replace(request.sampling, max_new_tokens=end)))
        assert answer.finish_reason == "stop"
        assert answer.engine_spans == ((engine.url, end),)
        assert [len(payload["input_ids"]) for payload in engine.payloads] == inputs

    within_deadline(body)


def test_names_of_calls_are_no_beginnings_of_each_other():
    async def body():
        (engine,) = engines(1)
        engine.fault = lambda payload: "error_500" if len(engine.payloads) < 12 else None
        async with fleet_of(engine, max_attempts=20, backoff_s=1e-6) as fleet:
            await fleet.ask(make_request())
        rids = [payload["rid"] for payload in engine.payloads]
        assert len(set(rids)) == len(rids) == 12
        assert not [1 for a, b in zip(sorted(rids), sorted(rids)[1:], strict=False) if b.startswith(a)]

    within_deadline(body)


def test_a_fault_of_the_program_fails_the_request_instead_of_losing_it(caplog):
    async def body():
        (engine,) = engines(1)
        async with fleet_of(engine) as fleet:
            good = make_request()
            sampling = SamplingParams(top_k=set())  # Nothing that can be sent as JSON.
            broken = GenerationRequest(10**9, np.array([5], np.int32), 0, sampling)
            sampling.top_k.add(1)
            answers = await fleet.ask(broken, good)
            assert isinstance(answers[0], GenerationFailure)
            assert "unexpected exception" in answers[0].reason
            assert_exact(answers[1], good)

    within_deadline(body)
    assert "not JSON serializable" in caplog.text


def test_thousands_of_requests_are_in_flight_at_once():
    async def body():
        (engine,) = engines(1)
        engine.release_at = 2000
        async with fleet_of(engine, requests_per_engine=2000) as fleet:
            requests = [make_request([5, i % 100]) for i in range(2500)]
            for request, answer in zip(requests, await fleet.ask(*requests), strict=True):
                assert_exact(answer, request)
        assert engine.most_in_flight == 2000

    within_deadline(body)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_account_balances_in_a_storm_of_faults(seed):
    """Faults, engines that come and go, cancellations and weight updates all at once: every request that is not
    cancelled is answered once, and every response is exact."""
    draw = random.Random(seed)
    faults = [fault for fault in CAUSE_OF_FAULT if fault not in ("hang", "drip")]

    async def body():
        four = engines(4, tokens_per_s=1000)
        for engine in four:
            engine.fault = lambda payload: draw.choice(faults) if draw.random() < 0.15 else None
        options = {"requests_per_engine": 16, "max_attempts": 4}
        async with fleet_of(*four, **options) as fleet:
            requests = [make_request([5, draw.randrange(30)], max_new_tokens=draw.randint(1, 40)) for _ in range(400)]
            disturbing = asyncio.create_task(disturb(fleet, four, draw))
            for i in range(0, 400, 50):
                fleet.start(requests[i : i + 50])
                await asyncio.sleep(0.03)
            given_up = [request for request in draw.sample(requests, 40) if fleet.asked[request.request_id].cancel()]
            assert fleet.dispatcher.counts["requests_cancelled"] == len(given_up)
            kept = [request for request in requests if request not in given_up]
            answers = await fleet.answers(kept)
            disturbing.cancel()
            await asyncio.wait([disturbing])
            assert disturbing.cancelled()
            check(fleet, kept, answers)

    within_deadline(body)


async def disturb(fleet, engines, draw):
    """Remove, return and update engines until it is cancelled."""
    clients = dict(zip(engines, fleet.clients, strict=True))
    present, version = set(engines), 0
    while True:
        await asyncio.sleep(draw.uniform(0.02, 0.08))
        engine = draw.choice(engines)
        if engine in present and len(present) > 1:
            present.discard(engine)
            fleet.dispatcher.remove_engine(engine.url, "storm")
        elif engine not in present:
            present.add(engine)
            engine.version = str(version)
            fleet.dispatcher.add_engine(clients[engine], version)
        else:
            version += 1
            fleet.dispatcher.hold()
            await fleet.dispatcher.reclaim(grace_s=0.02)
            for updated in present:
                updated.version = str(version)
                fleet.dispatcher.set_version(updated.url, version)
            fleet.dispatcher.resume()


def check(fleet, requests, answers):
    for request, answer in zip(requests, answers, strict=True):
        if isinstance(answer, Response):
            assert_exact(answer, request)
    check_counts(fleet.dispatcher)
    assert not fleet.dispatcher.open
    counts = fleet.dispatcher.counts
    assert counts["requests_answered"] == sum(isinstance(answer, Response) for answer in answers)
    assert counts["requests_failed"] == sum(isinstance(answer, GenerationFailure) for answer in answers)
    assert counts["requests_answered"] > 300


def test_metrics_are_counted_since_the_last_time():
    async def body():
        (engine,) = engines(1)
        async with fleet_of(engine) as fleet:
            await fleet.ask(make_request(), make_request())
            assert fleet.dispatcher.pop_metrics()["rollout/requests_answered"] == 2
            await fleet.ask(make_request())
            metrics = fleet.dispatcher.pop_metrics()
            assert metrics["rollout/requests_answered"] == metrics["rollout/requests_submitted"] == 1
            assert metrics["rollout/requests_open"] == metrics["rollout/requests_in_flight"] == 0

    within_deadline(body)


def test_a_dispatcher_is_made_on_a_running_loop():
    with pytest.raises(RuntimeError, match="no running event loop"):
        Dispatcher(vocab_size=1, requests_per_engine=1, request_timeout_s=1.0, max_attempts=1)
