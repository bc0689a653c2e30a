"""Several prompts in one streamed call of an engine: what comes out, and how what goes wrong is told."""

import asyncio
import json
from contextlib import aclosing

import pytest
from aiohttp import web

from dapo_mega.engines.sglang.api import batch_payload, finished_rid, generate_payload
from dapo_mega.engines.sglang.engine_client import (
    EngineClient,
    EngineDisconnected,
    EngineError,
    EngineGarbled,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from tests.unit.engines.sglang.scripted_server import (
    VOCAB_SIZE,
    expected_tokens,
    make_request,
    serve,
    serving,
    until,
    within_deadline,
)
from tools.scripted_engine import ScriptedEngine

IS_READ = web.AppKey("is_read", asyncio.Event)


def event(output):
    return b"data: " + json.dumps(output).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def streaming(*pieces, breaks=False):
    """A handler that sends these bytes and ends its answer, or breaks the connection."""

    async def handler(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if breaks:
            # Not before the client has taken what came until here.
            await request.app[IS_READ].wait()
            request.transport.abort()
        return response

    return handler


def batch_answered_by(handler, timeout_s=10.0, num_until_break=None):
    """The outputs of one batch when `handler` serves, and the error that ended them or None."""
    outputs, errors = [], []

    async def body():
        is_read = asyncio.Event()
        runner, url = await serve(handler, {IS_READ: is_read})
        client = EngineClient(url, "secret")
        try:
            async for output in client.generate_batch({}, timeout_s):
                outputs.append(output)
                if len(outputs) == num_until_break:
                    is_read.set()
        except EngineError as error:
            errors.append(error)
        await client.close()
        await runner.cleanup()

    within_deadline(body)
    return outputs, errors[0] if errors else None


def test_outputs_of_a_batch_come_in_the_order_in_which_they_finish_and_name_their_requests():
    async def body():
        engine = ScriptedEngine(VOCAB_SIZE, tokens_per_s=200)
        async with serving(engine) as (client,):
            requests = {f"{length}.": make_request([5, length], max_new_tokens=length) for length in (150, 3, 75)}
            batch = batch_payload([generate_payload(request, [], rid) for rid, request in requests.items()])
            outputs = [output async for output in client.generate_batch(batch, 20.0)]
            first, last = outputs[:3], outputs[3:]
            assert [finished_rid(output) for output in first] == [None] * 3
            assert [finished_rid(output) for output in last] == ["3.", "75.", "150."]
            for output in last:
                assert output["output_ids"] == expected_tokens(requests[finished_rid(output)])
        assert engine.calls["/generate"] == 1
        assert [payload["rid"] for payload in engine.payloads] == ["150.", "3.", "75."]

    within_deadline(body)


def test_a_batch_carries_the_key_and_is_sent_as_it_is():
    seen = []

    async def handler(request):
        seen.append((request.path, request.headers["Authorization"], await request.json()))
        return await streaming(DONE)(request)

    assert batch_answered_by(handler) == ([], None)
    assert seen == [("/generate", "Bearer secret", {})]


def test_an_output_is_there_before_the_next_one_is_finished():
    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event({"i": 1}))
        await request.app[IS_READ].wait()
        await response.write(event({"i": 2}) + DONE)
        return response

    assert batch_answered_by(handler, num_until_break=1) == ([{"i": 1}, {"i": 2}], None)


def test_outputs_are_whole_wherever_the_stream_is_cut_into_pieces():
    outputs = [{"i": 1, "text": "data: ä\n"}, {"i": 2}]
    text = b"".join(map(event, outputs)) + DONE

    async def body():
        is_read = asyncio.Event()

        async def handler(request):
            cut = (await request.json())["cut"]
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(event("first") + text[:cut])
            await is_read.wait()
            await response.write(text[cut:])
            return response

        runner, url = await serve(handler)
        client = EngineClient(url, "secret")
        for cut in range(len(text) + 1):
            is_read.clear()
            found = []
            async for output in client.generate_batch({"cut": cut}, 10.0):
                found.append(output)
                is_read.set()
            assert found == ["first", *outputs]
        await client.close()
        await runner.cleanup()

    within_deadline(body)


def test_an_output_larger_than_any_buffer_is_whole():
    output = {"output_ids": list(range(200_000))}
    assert batch_answered_by(streaming(event(output), event({"i": 2}), DONE)) == ([output, {"i": 2}], None)


def test_what_is_no_output_in_a_stream_is_passed_over():
    pieces = [b": still there\n\n", b"event: x\n", event({"i": 1}), b"\n\n", b"id: 3\n", event({"i": 2}), DONE]
    assert batch_answered_by(streaming(*pieces)) == ([{"i": 1}, {"i": 2}], None)


@pytest.mark.parametrize("rest", [b"", DONE, b'data: {"i": 2}', b'data: {"i"'])
def test_a_stream_that_ends_too_soon_gives_the_outputs_that_are_whole(rest):
    assert batch_answered_by(streaming(event({"i": 1}), rest)) == ([{"i": 1}], None)


@pytest.mark.parametrize("rest", [b"", b'data: {"i": 2}'])
def test_a_stream_that_breaks_keeps_the_outputs_before(rest):
    outputs, error = batch_answered_by(streaming(event({"i": 1}) + rest, breaks=True), num_until_break=1)
    assert outputs == [{"i": 1}]
    assert isinstance(error, EngineDisconnected)
    assert "/generate" in error.reason


@pytest.mark.parametrize("line", [b'data: {"i": 2\n\n', b"data: nonsense\n\n", b"data: \xff\n\n", b"data: \n\n"])
def test_a_line_that_is_not_json_ends_the_batch_and_keeps_the_outputs_before(line):
    outputs, error = batch_answered_by(streaming(event({"i": 1}), line, event({"i": 3}), DONE))
    assert outputs == [{"i": 1}]
    assert isinstance(error, EngineGarbled)


def test_an_error_in_the_stream_is_told_with_the_servers_words():
    refusal = event({"error": {"message": "out of memory"}})
    outputs, error = batch_answered_by(streaming(event({"i": 1}), refusal, DONE))
    assert outputs == [{"i": 1}]
    assert isinstance(error, EngineRefused)
    assert error.reason.endswith("/generate: out of memory")


@pytest.mark.parametrize("status", [400, 401, 500])
def test_an_error_status_of_a_batch_is_told_with_the_servers_words(status):
    async def handler(request):
        return web.Response(status=status, body=event({"i": 1}) + b"no room")

    outputs, error = batch_answered_by(handler)
    assert outputs == []
    assert isinstance(error, EngineRefused)
    assert error.status == status
    assert "no room" in error.reason


def test_the_time_limit_of_a_batch_is_for_all_of_it_although_outputs_keep_coming():
    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(event({"i": 1}))
            await asyncio.sleep(0.02)

    outputs, error = batch_answered_by(handler, timeout_s=0.5)
    assert outputs
    assert isinstance(error, EngineTimeout)


def test_a_batch_for_an_engine_that_is_not_there_has_not_been_sent():
    async def body():
        client = EngineClient("http://127.0.0.1:9", "secret")
        with pytest.raises(EngineUnreachable):
            await anext(client.generate_batch({}, 10.0))
        await client.close()

    within_deadline(body)


def test_a_batch_that_is_left_early_ends_on_the_engine():
    async def body():
        engine = ScriptedEngine(VOCAB_SIZE, tokens_per_s=0.001)
        async with serving(engine) as (client,):
            batch = batch_payload([generate_payload(make_request(), [], f"{i}.") for i in range(3)])
            async with aclosing(client.generate_batch(batch, 20.0)) as outputs:
                await anext(outputs)
                await until(lambda: engine.in_flight == 3)
            await until(lambda: engine.in_flight == 0)
            assert engine.calls["/abort_request"] == 0

    within_deadline(body)
