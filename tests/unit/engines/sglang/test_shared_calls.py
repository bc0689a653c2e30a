"""Requests that share a call of an engine: how they are put together, and that each has an outcome of its own."""

import numpy as np
import pytest

from dapo_mega.engines.sglang.engine_client import EngineClient
from dapo_mega.types import GenerationFailure, GenerationRequest, SamplingParams
from tests.unit.engines.sglang.scripted_server import (
    VOCAB_SIZE,
    assert_exact,
    fleet_of,
    make_request,
    until,
    within_deadline,
)
from tools.scripted_engine import ScriptedEngine

NEVER = 0.001  # Tokens per second.


def engines(count, **settings):
    return [ScriptedEngine(VOCAB_SIZE, **settings) for _ in range(count)]


def assert_all_exact(answers, requests):
    for request, answer in zip(requests, answers, strict=True):
        assert_exact(answer, request)


@pytest.mark.parametrize(("num_requests", "num_calls"), [(1, 1), (2, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_a_call_takes_up_to_64_requests(num_requests, num_calls):
    async def body():
        (engine,) = engines(1)
        async with fleet_of(engine, supports_batches=True, requests_per_engine=200) as fleet:
            requests = [make_request([5, i]) for i in range(num_requests)]
            assert_all_exact(await fleet.ask(*requests), requests)
        assert engine.calls["/generate"] == num_calls

    within_deadline(body)


def test_requests_for_an_engine_that_has_no_batches_go_alone():
    async def body():
        two = engines(2, tokens_per_s=NEVER)
        async with fleet_of(*two, supports_batches=True) as fleet:
            single = fleet.clients[0]
            fleet.dispatcher.remove_engine(single.url, "it is another version now")
            fleet.dispatcher.add_engine(single, 0, supports_batches=False)
            fleet.dispatcher.submit([make_request([5, i]) for i in range(12)])
            await until(lambda: sum(len(engine.payloads) for engine in two) == 12)
        assert [len(engine.payloads) for engine in two] == [6, 6]
        assert [engine.calls["/generate"] for engine in two] == [6, 1]
        # A request that is alone is not streamed.
        assert not any("stream_interval" in payload["sampling_params"] for payload in two[0].payloads)

    within_deadline(body)


def test_requests_of_a_call_have_names_prompts_and_limits_of_their_own():
    async def body():
        (engine,) = engines(1)
        async with fleet_of(engine, supports_batches=True) as fleet:
            requests = [make_request([5, i], max_new_tokens=3 + i, stop_token_ids=(900 + i,)) for i in range(5)]
            assert_all_exact(await fleet.ask(*requests), requests)
        assert len({payload["rid"] for payload in engine.payloads}) == 5
        sampled = [payload["sampling_params"] for payload in engine.payloads]
        assert len({parameters["sampling_seed"] for parameters in sampled}) == 5
        assert [payload["input_ids"] for payload in engine.payloads] == [[5, i] for i in range(5)]
        assert [parameters["max_new_tokens"] for parameters in sampled] == [3, 4, 5, 6, 7]
        assert [parameters["stop_token_ids"] for parameters in sampled] == [[900 + i] for i in range(5)]

    within_deadline(body)


def test_answers_of_a_call_come_as_they_finish_whatever_their_order_in_it():
    async def body():
        (engine,) = engines(1, tokens_per_s=200)
        async with fleet_of(engine, supports_batches=True) as fleet:
            requests = [make_request([5, length], max_new_tokens=length) for length in (200, 3, 100)]
            fleet.dispatcher.submit(requests)
            answers = [await fleet.queue.get() for _ in requests]
            assert_all_exact(answers, [requests[1], requests[2], requests[0]])
        assert engine.calls["/generate"] == 1

    within_deadline(body)


def test_an_answer_makes_room_for_the_next_request_while_its_call_goes_on():
    async def body():
        (engine,) = engines(1)
        engine.fault = lambda payload: "hang" if payload["input_ids"] == [5, 0] else None
        async with fleet_of(engine, supports_batches=True, requests_per_engine=2) as fleet:
            requests = [make_request([5, i]) for i in range(6)]
            fleet.dispatcher.submit(requests)
            assert_all_exact(await fleet.answers(requests[1:]), requests[1:])
            assert fleet.dispatcher.pop_metrics()["rollout/requests_in_flight"] == 1
        assert engine.calls["/generate"] == 5

    within_deadline(body)


def test_a_stream_that_breaks_fails_only_those_without_an_answer():
    async def body():
        (engine,) = engines(1)
        engine.fault = lambda payload: "hang" if payload["input_ids"][1] % 3 == 0 else None
        troubled = []
        options = {"max_attempts": 1, "on_trouble": troubled.append}
        async with fleet_of(engine, supports_batches=True, **options) as fleet:
            requests = [make_request([5, i]) for i in range(12)]
            fleet.dispatcher.submit(requests)
            await until(lambda: fleet.queue.qsize() == 8)
            await engine.stop()
            for i, answer in enumerate(await fleet.answers(requests)):
                if i % 3:
                    assert_exact(answer, requests[i])
                else:
                    assert isinstance(answer, GenerationFailure)
                    assert f"1 attempts failed, lastly {engine.url}: the connection broke" in answer.reason
            metrics = fleet.dispatcher.pop_metrics()
            assert metrics["rollout/failed_calls_disconnected"] == metrics["rollout/failed_calls"] == 4
            assert troubled == [engine.url]

    within_deadline(body)


def test_one_whose_output_never_comes_does_not_take_the_others_with_it():
    async def body():
        (engine,) = engines(1)
        engine.fault = lambda payload: "lost" if payload["input_ids"][1] == 2 else None
        async with fleet_of(engine, supports_batches=True, max_attempts=1) as fleet:
            requests = [make_request([5, i]) for i in range(5)]
            answers = await fleet.ask(*requests)
            assert isinstance(lost := answers.pop(2), GenerationFailure)
            assert "the stream ended without it" in lost.reason
            assert_all_exact(answers, requests[:2] + requests[3:])

    within_deadline(body)


def test_an_output_of_a_request_that_nobody_sent_harms_none():
    async def body():
        (engine,) = engines(1)
        engine.fault = lambda payload: "stranger" if payload["input_ids"][1] == 2 else None
        async with fleet_of(engine, supports_batches=True, max_attempts=1) as fleet:
            requests = [make_request([5, i]) for i in range(5)]
            assert_all_exact(await fleet.ask(*requests), requests)
            assert fleet.queue.empty()

    within_deadline(body)


def test_those_that_run_out_of_time_are_aborted_one_by_one_and_made_elsewhere():
    async def body():
        slow, good = engines(2)
        slow.fault = lambda payload: "hang" if payload["input_ids"][1] < 2 else None
        aborted = []
        async with fleet_of(slow, good, supports_batches=True, request_timeout_s=2.0) as fleet:
            fleet.dispatcher.remove_engine(good.url, "for now")
            fleet.clients[0].abort = note_aborts(aborted)
            requests = [make_request([5, i]) for i in range(6)]
            fleet.dispatcher.submit(requests)
            assert_all_exact(await fleet.answers(requests[2:]), requests[2:])
            fleet.dispatcher.add_engine(fleet.clients[1], 0, supports_batches=True)
            assert_all_exact(await fleet.answers(requests[:2]), requests[:2])
            assert fleet.dispatcher.pop_metrics()["rollout/failed_calls_timeout"] == 2
        rids = {payload["rid"] for payload in slow.payloads if payload["input_ids"][1] < 2}
        assert sorted(aborted) == sorted(rids)

    within_deadline(body)


def note_aborts(aborted):
    """In place of a client's `abort`: the engine does not hear of it."""

    async def abort(rid=None, all=False):
        aborted.append("all" if all else rid)

    return abort


def test_after_a_failure_of_their_call_requests_go_alone():
    async def body():
        (engine,) = engines(1)

        def fault(payload):
            if payload["input_ids"][1] == 3:
                return "error_500"
            return "hang" if len(engine.payloads) == 6 else None  # Not answered before the refusal.

        engine.fault = fault
        async with fleet_of(engine, supports_batches=True, max_attempts=2, backoff_s=0.0) as fleet:
            requests = [make_request([5, i]) for i in range(6)]
            fleet.dispatcher.submit(requests)
            # They may all start again at the same time.
            fleet.dispatcher.hold()
            await fleet.dispatcher.drain()
            await until(lambda: len(fleet.dispatcher._waiting) == 6)
            fleet.dispatcher.resume()
            answers = await fleet.answers(requests)
            assert isinstance(refused := answers.pop(3), GenerationFailure)
            assert "Internal Server Error" in refused.reason
            assert_all_exact(answers, requests[:3] + requests[4:])
        assert engine.calls["/generate"] == 1 + 6
        assert all("stream_interval" not in payload["sampling_params"] for payload in engine.payloads[6:])

    within_deadline(body)


def test_a_call_that_fails_makes_room_for_others_at_once():
    async def body():
        (engine,) = engines(1)
        fault_of = {0: "hang", 1: "error_500"}
        engine.fault = lambda payload: fault_of.get(payload["input_ids"][1])
        options = {"supports_batches": True, "requests_per_engine": 2, "backoff_s": 60.0}
        async with fleet_of(engine, **options) as fleet:
            requests = [make_request([5, i]) for i in range(4)]
            fleet.dispatcher.submit(requests)
            assert_all_exact(await fleet.answers(requests[2:]), requests[2:])
            assert fleet.dispatcher.pop_metrics()["rollout/failed_calls"] == 2

    within_deadline(body)


def test_a_call_that_fails_counts_once_against_its_engine():
    async def body():
        (engine,) = engines(1)
        engine.fault = lambda payload: "error_500"
        # An engine that failed three times in a row would get nothing for a minute.
        async with fleet_of(engine, supports_batches=True, backoff_s=60.0) as fleet:
            fleet.dispatcher.submit([make_request([5, i]) for i in range(12)])
            await until(lambda: fleet.dispatcher.pop_metrics()["rollout/requests_in_flight"] == 0)
            engine.fault = lambda payload: None
            request = make_request()
            assert_exact((await fleet.ask(request))[0], request)

    within_deadline(body)


def test_an_engine_that_is_not_there_costs_a_shared_calls_requests_no_attempt():
    async def body():
        gone, (late,) = EngineClient("http://127.0.0.1:9", "secret"), engines(1)
        troubled = []
        options = {"max_attempts": 1, "on_trouble": troubled.append, "backoff_s": 60.0}
        async with fleet_of(late, supports_batches=True, **options) as fleet:
            fleet.dispatcher.remove_engine(late.url, "for now")
            fleet.dispatcher.add_engine(gone, 0, supports_batches=True)
            requests = [make_request([5, i]) for i in range(10)]
            fleet.dispatcher.submit(requests)
            await until(lambda: bool(troubled))
            assert troubled == [gone.url]
            fleet.dispatcher.add_engine(fleet.clients[0], 0, supports_batches=True)
            assert_all_exact(await fleet.answers(requests), requests)
            assert fleet.dispatcher.pop_metrics()["rollout/failed_calls_unreachable"] == 10
        assert late.calls["/generate"] == 1
        assert [payload["input_ids"] for payload in late.payloads] == [[5, i] for i in range(10)]
        await gone.close()

    within_deadline(body)


def test_an_engine_that_is_removed_for_one_answer_loses_the_rest_of_its_call_to_others():
    async def body():
        bad, good = engines(2)
        bad.fault = lambda payload: "old_version" if payload["input_ids"][1] == 0 else "hang"

        def remove(url, foreign):
            assert foreign is None
            removed.append(url)
            fleet.dispatcher.remove_engine(url, "it has other weights")

        removed = []
        options = {"version": 3, "backoff_s": 0.001, "max_attempts": 2, "on_wrong_weights": remove}
        async with fleet_of(bad, good, supports_batches=True, **options) as fleet:
            fleet.dispatcher.remove_engine(good.url, "for now")
            requests = [make_request([5, i]) for i in range(5)]
            fleet.dispatcher.submit(requests)
            await until(lambda: bool(removed))
            fleet.dispatcher.add_engine(fleet.clients[1], 3, supports_batches=True)
            assert_all_exact(await fleet.answers(requests), requests)
            await until(lambda: bad.calls["/abort_request"] == 1)
            metrics = fleet.dispatcher.pop_metrics()
            assert metrics["rollout/failed_calls_version"] == metrics["rollout/failed_calls"] == 1
            assert metrics["rollout/requests_moved"] == 4
            assert fleet.queue.empty()
            assert removed == [bad.url]

    within_deadline(body)


def test_a_call_that_nobody_waits_for_is_hung_up_even_where_aborts_are_lost():
    async def body():
        (engine,) = engines(1, tokens_per_s=NEVER)
        async with fleet_of(engine, supports_batches=True) as fleet:
            aborted = []
            fleet.clients[0].abort = note_aborts(aborted)
            requests = [make_request([5, i]) for i in range(3)]
            fleet.dispatcher.submit(requests)
            await until(lambda: engine.in_flight == 3)
            for request in requests:
                assert engine.in_flight == 3
                fleet.dispatcher.cancel([request.request_id])
            await until(lambda: engine.in_flight == 0)
            assert sorted(aborted) == sorted(payload["rid"] for payload in engine.payloads)
            assert fleet.queue.empty()

    within_deadline(body)


def test_one_of_a_call_that_is_cancelled_before_it_is_sent_is_not_sent():
    async def body():
        (engine,) = engines(1)
        async with fleet_of(engine, supports_batches=True) as fleet:
            requests = [make_request([5, i]) for i in range(3)]
            fleet.dispatcher.submit(requests)
            fleet.dispatcher.cancel([requests[1].request_id])
            kept = [requests[0], requests[2]]
            assert_all_exact(await fleet.answers(kept), kept)
            assert fleet.queue.empty()
        assert [payload["input_ids"] for payload in engine.payloads] == [[5, 0], [5, 2]]

    within_deadline(body)


def test_a_fault_of_the_program_fails_all_of_a_call_instead_of_losing_them(caplog):
    async def body():
        (engine,) = engines(1)
        async with fleet_of(engine, supports_batches=True) as fleet:
            sampling = SamplingParams(top_k=set())  # Nothing that can be sent as JSON.
            broken = GenerationRequest(10**9, np.array([5], np.int32), 0, sampling)
            sampling.top_k.add(1)
            for answer in await fleet.ask(make_request(), broken, make_request()):
                assert isinstance(answer, GenerationFailure)
                assert "a fault of the program" in answer.reason
            assert fleet.dispatcher.counters.num_open == 0
            assert fleet.dispatcher.pop_metrics()["rollout/requests_in_flight"] == 0
            request = make_request()
            assert_exact((await fleet.ask(request))[0], request)

    within_deadline(body)
    assert "not JSON serializable" in caplog.text
