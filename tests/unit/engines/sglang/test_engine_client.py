"""One engine's HTTP calls: what is sent, and how what goes wrong is told."""

import asyncio
import json
import math
import re
import socket

import pytest
from aiohttp import web

from dapo_mega.engines.sglang.api import generate_payload
from dapo_mega.engines.sglang.engine_client import (
    EngineClient,
    EngineDisconnected,
    EngineError,
    EngineGarbled,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    is_no_engine,
)
from dapo_mega.engines.sglang.engine_model import model_difference
from dapo_mega.engines.sglang.weight_protocol import MODEL_FIELD, PROTOCOL_FIELD
from dapo_mega.models.families import find_family
from tests.unit.engines.sglang.scripted_server import (
    QWEN2,
    VOCAB_SIZE,
    make_request,
    serve,
    serving,
    until,
    within_deadline,
)
from tools.scripted_engine import ScriptedEngine

COMMANDS = [
    ("/pause_generation", lambda c: c.pause("retract"), {"mode": "retract"}),
    ("/continue_generation", lambda c: c.resume(), {}),
    ("/flush_cache?timeout=0", lambda c: c.flush_cache(), {}),
    ("/abort_request", lambda c: c.abort("r-1."), {"rid": "r-1.", "abort_all": False}),
    ("/abort_request", lambda c: c.abort(all=True), {"rid": "", "abort_all": True}),
    ("/end_weight_update", lambda c: c.command("end_weight_update"), {}),
    ("/release_memory_occupation", lambda c: c.release_memory(), {}),
    ("/resume_memory_occupation", lambda c: c.resume_memory(["kv_cache"]), {"tags": ["kv_cache"]}),
    (
        "/update_weights_from_distributed",
        lambda c: c.command("update_weights_from_distributed", shapes=[(2, 3)], weight_version=None),
        {"shapes": [[2, 3]], "weight_version": None},
    ),
    ("/flush_cache?timeout=2.5", lambda c: c.flush_cache(2.5), {}),
]


def answered_by(handler, call):
    """What `call(client)` returns or raises when `handler` serves."""
    outcome = []

    async def body():
        runner, url = await serve(handler)
        client = EngineClient(url, "secret", timeout_s=0.5)
        try:
            outcome.append(await call(client))
        except EngineError as error:
            outcome.append(error)
        await client.close()
        await runner.cleanup()

    within_deadline(body)
    return outcome[0]


def test_every_call_carries_the_key_and_says_what_the_server_reads():
    seen = []

    async def handler(request):
        seen.append((request.path_qs, request.headers["Authorization"], await request.json()))
        return web.json_response({"success": True, "message": ""})

    async def all_calls(client):
        for _, call, _ in COMMANDS:
            await call(client)
        return await client.generate({"input_ids": [1]}, 1.0)

    assert answered_by(handler, all_calls) == {"success": True, "message": ""}
    wanted = [(path, body) for path, _, body in COMMANDS] + [("/generate", {"input_ids": [1]})]
    assert [(path, body) for path, _, body in seen] == wanted
    assert {key for _, key, _ in seen} == {"Bearer secret"}


@pytest.mark.parametrize("command", [COMMANDS[i] for i in (5, 8)], ids=lambda command: command[0])
def test_a_command_that_did_not_succeed_raises(command):
    async def handler(request):
        return web.json_response({"success": False, "message": "no such group"})

    error = answered_by(handler, command[1])
    assert isinstance(error, EngineRefused)
    assert "no such group" in error.reason


@pytest.mark.parametrize(("status", "text"), [(500, "broken"), (400, "bad request"), (401, "Unauthorized")])
def test_an_error_status_is_told_with_the_servers_words(status, text):
    async def handler(request):
        return web.Response(status=status, text=text)

    error = answered_by(handler, lambda c: c.generate({}, 1.0))
    assert isinstance(error, EngineRefused)
    assert error.status == status
    assert error.url.startswith("http://127.0.0.1:")
    assert error.reason == f"HTTP {status}: /generate: {text}"


PAGE = "<!DOCTYPE html>\n<html><head><title>Not here</title></head>\n" + "<p>no</p>\n" * 1000


@pytest.mark.parametrize("status", [200, 404, 502])
@pytest.mark.parametrize(
    "text", [PAGE, "\n\n  <div>x</div>", f"nginx: {PAGE}", "a\nb\tc\r\nd\x1b[31m\x00", "x" * 10**7, "{'é': \u2028 1}"]
)
def test_whatever_a_server_writes_an_error_is_one_short_printable_line(status, text):
    async def handler(request):
        return web.Response(status=status, text=text)

    error = answered_by(handler, lambda c: c.info())
    assert str(error).isprintable()
    assert len(error.reason) <= 250
    assert not re.search("<[a-z/!]", error.reason, re.IGNORECASE)


def test_a_servers_message_in_json_is_one_short_line_too():
    async def handler(request):
        return web.json_response({"success": False, "message": "Traceback:\n" + "  line\n" * 5000})

    error = answered_by(handler, lambda c: c.command("begin_weight_update"))
    assert error.reason.startswith("HTTP 200: /begin_weight_update: Traceback: line line")
    assert len(error.reason) <= 400


def test_redirects_are_not_followed_and_the_key_goes_nowhere_else():
    seen = []

    async def handler(request):
        seen.append(request.path)
        raise web.HTTPTemporaryRedirect("/elsewhere")

    for call in (lambda c: c.probe(1.0), lambda c: c.generate({}, 1.0), lambda c: c.info()):
        error = answered_by(handler, call)
        assert error.status == 307
        assert "redirects to /elsewhere" in error.reason
    assert "/elsewhere" not in seen


@pytest.mark.parametrize("url", ["http://engine-7..cluster:9", f"http://{'e' * 64}.cluster:9", "http://10.0.0..7:9"])
def test_a_host_that_cannot_be_is_no_engine(url):
    async def body():
        client = EngineClient(url, "secret")
        with pytest.raises(EngineGarbled) as caught:
            await client.probe(5.0)
        assert is_no_engine(caught.value)
        await client.close()

    asyncio.run(body())


HOSTILE_VALUES = (
    *(None, True, -1, 0, 0.5, 1e308, math.inf, math.nan, 10**400, 10**4000, "", "x\x1b[31m" * 10**5, "\ud800"),
    *([], {}, [[]], {"a": 1}),
)


def test_whatever_settings_a_server_says_they_are_bounded_or_it_is_no_engine():
    """Also a model configuration that no checkpoint has: whoever compares it decides, and raises nothing."""
    arch = find_family("qwen2").read(QWEN2)
    server = {"tp_size": 1, "dtype": "float32", "context_length": 2048, "vocab_size": VOCAB_SIZE}
    texts = [{**server, name: value} for value in HOSTILE_VALUES for name in (*server, "version", "quantization")]
    described = [{**QWEN2, name: value} for value in HOSTILE_VALUES for name in ("model_type", "num_hidden_layers")]
    texts += [{**server, "internal_states": [{MODEL_FIELD: json.dumps(model)}]} for model in described]
    states = [[{PROTOCOL_FIELD: value}] for value in HOSTILE_VALUES]
    states += [3, [3], [{MODEL_FIELD: "[" * 100_000}]]
    texts += [{**server, "internal_states": state} for state in states]
    texts += [{**server, "weight_version": value} for value in HOSTILE_VALUES]
    saying, errors = {}, []

    async def handler(request):
        return web.Response(text=json.dumps(saying if request.path == "/server_info" else {}))

    async def all_infos(client):
        for text in texts:
            saying.clear()
            saying.update(text)
            try:
                info = await client.info()
            except EngineError as error:
                errors.append(error)
                continue
            model_difference(info.model, arch)
            assert 0 < info.tp_size < 10**4, text
            assert 0 < (info.vocab_size or 1) < 10**10, text
            said = f"{info.version}{info.dtype}{info.quantization}{info.weight_version}{info.plugin_protocol}"
            assert len(said) < 1000, list(text)
            assert said.isprintable(), text
        assert all(map(is_no_engine, errors))
        return len(errors)

    assert answered_by(handler, all_infos) > len(HOSTILE_VALUES)


@pytest.mark.parametrize("answer", [b"\x15\x03\x01\x00\x02\x02\x46", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_what_speaks_no_http_is_no_engine(answer):
    async def body():
        async def talk(reader, writer):
            await reader.readline()
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "secret")
        with pytest.raises(EngineGarbled, match="not HTTP") as caught:
            await client.probe(5.0)
        assert is_no_engine(caught.value)
        await client.close()
        server.close()

    within_deadline(body)


def bomb(packing):
    return [b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: 99999999999\r\n\r\n" % packing, b"x" * 2**16]


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", b" " * 2**20),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" " * 2**20),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + b" " * 2**20 + b"\r\n"),
        (b"HTTP/1.1 500 No\r\n\r\n", b" " * 2**20),
        (b"HTTP/1.1 200 OK\r\n", b"A: 1\r\n" * 2**16),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 2**12),
        (b"", b"\r\n" * 2**16),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x" * 2**20),
        (b"HTTP/1.1 200 OK\r\nA: ", b"1" * 2**20),
        *(bomb(packing) for packing in (b"gzip", b"deflate", b"br", b"zstd", b"gzip, identity", b"unknown")),
    ],
)
def test_an_answer_without_end_or_packed_is_the_engines_fault_after_a_bounded_number_of_bytes(head, piece):
    sent = []

    async def body():
        async def talk(reader, writer):
            sent.append(0)
            try:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(head)
                while sent[-1] < 2**29:
                    writer.write(piece)
                    await writer.drain()
                    sent[-1] += len(piece)
            except OSError:
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "secret")
        calls = (client.probe(60.0), client.generate({}, 60.0), client.info(), client.command("begin_weight_update"))
        said = "is packed" if b"Content-Encoding" in head else ""
        for call in calls:
            with pytest.raises((EngineGarbled, EngineRefused, EngineDisconnected), match=said):
                await call
        await client.close()
        server.close()

    within_deadline(body)
    assert max(sent) < 2**25


def test_an_answers_limit_follows_from_the_tokens_asked_for():
    async def handler(request):
        return web.Response(body=b'"' + b" " * (6 * 2**20) + b'"')

    few, many = ({"input_ids": [1], "sampling_params": {"max_new_tokens": n}} for n in (16, 8192))
    assert isinstance(answered_by(handler, lambda c: c.generate(few, 5.0)), EngineGarbled)
    assert len(answered_by(handler, lambda c: c.generate(many, 5.0))) == 6 * 2**20
    scored = {**few, "input_ids": [1] * 8192, "logprob_start_len": 0}
    assert len(answered_by(handler, lambda c: c.generate(scored, 5.0))) == 6 * 2**20


def test_tls_where_there_is_none_is_no_engine():
    async def handler(request):
        return web.Response()

    async def body():
        runner, url = await serve(handler)
        client = EngineClient(url.replace("http:", "https:"), "secret")
        with pytest.raises(EngineGarbled, match="no TLS connection") as caught:
            await client.probe(5.0)
        assert is_no_engine(caught.value)
        await client.close()
        await runner.cleanup()

    within_deadline(body)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        *((status, True) for status in (301, 400, 403, 404, 405, 407)),
        *((status, False) for status in (408, 429, 500, 502, 503, 504)),
    ],
)
def test_answers_no_engine_gives_are_told_from_a_servers_trouble(status, expected):
    async def handler(request):
        return web.Response(status=status)

    assert is_no_engine(answered_by(handler, lambda c: c.probe(1.0))) == expected


def test_what_is_not_json_is_garbled():
    async def handler(request):
        return web.Response(text='{"output_ids": [1,')

    assert isinstance(answered_by(handler, lambda c: c.generate({}, 1.0)), EngineGarbled)


TEXTS = [
    *(b"[1e999]", b"[NaN, -Infinity]", b"[%d]" % 10**400, b"[-0, 1.0e5, 9007199254740993]", b'{"a": 1, "a": [2]}'),
    *(b'"\\ud800"', b"\xef\xbb\xbf[1]", '"\u00e9"'.encode("utf-16"), b'"\xff"', b"[" * 10**5, b"[1] 2", b"", b"nul"),
    *(b"[" * 900 + b"]" * 900, b'{"a": "\x00"}', b"[1,]", b"0.1234567890123456789"),
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_an_answer_is_what_pythons_parser_makes_of_it(text):
    async def handler(request):
        return web.Response(body=text)

    found = answered_by(handler, lambda c: c.generate({}, 5.0))
    try:
        wanted = json.loads(text)
    except (ValueError, RecursionError):
        assert isinstance(found, EngineGarbled)
        assert "the answer to /generate is not JSON" in found.reason
    else:
        assert repr(found) == repr(wanted)


def test_ids_of_a_prompt_are_sent_as_whole_numbers_whatever_array_holds_them():
    seen = []

    async def handler(request):
        seen.append((await request.json(), request.headers["Content-Type"]))
        return web.json_response([])

    request = make_request()
    answered_by(handler, lambda c: c.generate(generate_payload(request, [], "r."), 5.0))
    ((body, kind),) = seen
    assert body["input_ids"] == request.prompt_token_ids.tolist()
    assert kind == "application/json"


def test_a_connection_is_used_again_unless_its_answer_was_not_read():
    connections, late = [], asyncio.Event()

    async def handler(request):
        connections.append(id(request.transport))
        body = await request.json()
        if body.get("late"):
            await late.wait()
        return web.json_response(body)

    async def calls(client):
        assert await client.generate({"call": 1}, 5.0) == {"call": 1}
        assert await client.generate({"call": 2}, 5.0) == {"call": 2}
        call = asyncio.create_task(client.generate({"late": 3}, 5.0))
        await until(lambda: len(connections) == 3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(EngineTimeout):
            await client.generate({"late": 4}, 0.1)
        late.set()
        assert await client.generate({"call": 5}, 5.0) == {"call": 5}

    answered_by(handler, calls)
    first, second, third, fourth, fifth = connections
    assert first == second == third
    assert len({third, fourth, fifth}) == 3


@pytest.mark.parametrize("key", ["a\r\nX: 1", "a\x00"])
def test_a_key_that_is_no_header_is_never_sent(key):
    async def handler(request):
        raise AssertionError

    async def body():
        runner, url = await serve(handler)
        for target in (url, url.replace("http://", "ftp://"), url.replace("http://", "http://user:word@")):
            client = EngineClient(target, key if target == url else "secret")
            with pytest.raises(EngineGarbled):
                await client.probe(5.0)
            await client.close()
        await runner.cleanup()

    within_deadline(body)


def test_silence_is_a_timeout():
    async def handler(request):
        await asyncio.sleep(60)

    assert isinstance(answered_by(handler, lambda c: c.generate({}, 0.1)), EngineTimeout)
    assert isinstance(answered_by(handler, lambda c: c.command("end_weight_update")), EngineTimeout)
    assert isinstance(answered_by(handler, lambda c: c.probe(0.1)), EngineTimeout)


@pytest.mark.parametrize("begins", [False, True])
def test_a_connection_that_breaks_is_told_from_one_that_never_was(begins):
    async def handler(request):
        if begins:
            response = web.StreamResponse(headers={"Content-Length": "100"})
            await response.prepare(request)
            await response.write(b"{")
        request.transport.abort()
        return web.Response()

    assert isinstance(answered_by(handler, lambda c: c.generate({}, 1.0)), EngineDisconnected)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"  # Bound but not listening: refuses.

        async def body():
            client = EngineClient(url, "secret")
            with pytest.raises(EngineUnreachable):
                await client.generate({}, 1.0)
            await client.close()

        within_deadline(body)


def test_an_abort_does_not_queue_behind_the_requests_in_flight():
    async def body():
        engine = ScriptedEngine(VOCAB_SIZE, tokens_per_s=0.001)
        async with serving(engine) as (client,):
            payloads = [generate_payload(make_request(), [], f"{i}.") for i in range(150)]
            calls = [asyncio.create_task(client.generate(payload, 20.0)) for payload in payloads]
            await until(lambda: engine.in_flight == 150)
            await client.abort(all=True)
            answers = await asyncio.gather(*calls)
            assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}

    within_deadline(body)


def test_info_tells_settings_weights_and_which_process_it_is():
    async def body():
        engine = ScriptedEngine(VOCAB_SIZE)
        async with serving(engine) as (client,):
            first = await client.info()
            assert (first.url, first.tp_size, first.dtype, first.context_length) == (engine.url, 1, "float32", 32768)
            assert (first.weight_version, first.supports_sessions, first.quantization) == ("default", True, None)
            assert await client.info() == first
            engine.process = "second"
            assert (await client.info()).process != first.process

    within_deadline(body)


def test_a_server_without_weight_sessions_is_recognised():
    async def handler(request):
        if request.path in ("/server_info", "/model_info"):
            return web.json_response({"tp_size": 2, "dtype": "bfloat16", "context_length": 4096})
        return web.Response(status=404)

    info = answered_by(handler, lambda c: c.info())
    assert not info.supports_sessions
    assert (info.tp_size, info.context_length, info.process) == (2, 4096, "")


def test_a_server_that_is_not_sglang_is_told_so():
    async def handler(request):
        return web.json_response({"hello": "world"})

    error = answered_by(handler, lambda c: c.info())
    assert isinstance(error, EngineGarbled)
    assert "/server_info" in error.reason


def info_with(**settings):
    async def body():
        engine = ScriptedEngine(VOCAB_SIZE)
        engine.settings = settings
        async with serving(engine) as (client,):
            found.append(await client.info())

    found = []
    within_deadline(body)
    return found[0]
