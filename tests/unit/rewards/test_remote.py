"""A remote reward: its wire format, and servers that misbehave in every way, which are failures and never scores."""

import asyncio
import json
import socket
from contextlib import ExitStack

import numpy as np
import pytest
from aiohttp import web

from dapo_mega.errors import InputError
from dapo_mega.rewards.endpoints import EndpointSettings
from dapo_mega.rewards.records import RewardRecord, Score, ScoringFailure
from dapo_mega.rewards.remote import RemoteReward
from tests.unit.rewards.local_server import serving

KEY = "sk-very-secret-0123456789"


def records(count):
    fields = {"level": 3, "tags": ["a"], "array": np.arange(2)}
    return [
        RewardRecord(
            f"p{n}", ({"role": "user", "content": "p"},), f"r{n}", np.arange(3), "stop", str(n), "math", fields
        )
        for n in range(count)
    ]


def asking(*urls, batch_size=2, **settings):
    limits = {"timeout_s": 60.0, "deadline_s": 60.0, "attempts": 1, **settings}
    return RemoteReward(EndpointSettings(urls, **limits), batch_size)


async def length(request):
    given = (await request.json())["records"]
    return web.json_response({"scores": [float(record["response"][1:]) for record in given]})


def test_records_travel_in_batches_and_scores_come_back_in_order():
    seen = []

    async def answer(request):
        given = (await request.json())["records"]
        seen.append(given)
        scores = [
            {"score": int(record["ground_truth"]), "correct": True, "parts": {"style": 0.5}, "answer": "x"}
            if record["ground_truth"] != "3"
            else {"error": "no idea"}
            for record in given
        ]
        return web.json_response({"scores": scores})

    with serving(answer) as url:
        scores = asking(url).score(records(5))
    assert scores[:3] == [Score(float(n), True, {"style": 0.5}, "x") for n in range(3)]
    assert scores[3] == ScoringFailure("the server says: no idea")
    assert scores[4].value == 4.0
    assert sorted(len(batch) for batch in seen) == [1, 2, 2]
    (first,) = [record for batch in seen for record in batch if record["prompt"] == "p0"]
    assert first == {
        "prompt": "p0",
        "messages": [{"role": "user", "content": "p"}],
        "response": "r0",
        "opened_thought": "",
        "token_ids": [0, 1, 2],
        "finish_reason": "stop",
        "ground_truth": "0",
        "data_source": "math",
        "fields": {"level": 3, "tags": ["a"], "array": [0, 1]},
    }


def test_requests_are_in_flight_together():
    waiting, everybody = 0, asyncio.Event()

    async def answer(request):
        nonlocal waiting
        waiting += 1
        if waiting == 16:
            everybody.set()
        await asyncio.wait_for(everybody.wait(), 30)
        return await length(request)

    with serving(answer) as url:
        scores = asking(url, batch_size=1, concurrency=16).score(records(16))
    assert [score.value for score in scores] == list(range(16))


async def closes(request):
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"scores": [1')
    request.transport.close()
    return response


async def never_ends(request):
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * 2**16)


async def never_begins(request):
    while not request.transport.is_closing():
        request.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n" * 2**12)
        await asyncio.sleep(0)
    return web.Response()


async def drips(request):
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


async def sleeps(request):
    await asyncio.sleep(30)
    return web.Response()


def body(text, **options):
    async def answer(request):
        return web.Response(text=text, **options)

    return answer


def scores(value):
    return body(json.dumps({"scores": value}))


MISBEHAVING = [
    (sleeps, "no complete answer within timeout_s=0.3"),
    (drips, "no complete answer within timeout_s=0.3"),
    (never_ends, "the answer is longer than 16,777,216 bytes"),
    (never_begins, "more than 1,048,576 bytes are no content"),
    (body("", headers={"Content-Encoding": "gzip"}), "the answer is packed with gzip"),
    (closes, "the connection broke"),
    (body("boom", status=500), "HTTP 500: boom"),
    (body("no", status=401), "HTTP 401: no"),
    (body("", status=302, headers={"Location": "/elsewhere"}), "HTTP 302"),
    (body("<html><body>Login</body></html>", content_type="text/html"), "the answer is not JSON: <html>"),
    (body(""), "the answer is not JSON"),
    (body("[" * 100_000), "the answer is not JSON"),
    (body("[1, 2]"), 'the answer is not {"scores": [...]}'),
    (body('{"scores": {"0": 1}}'), 'the answer is not {"scores": [...]}'),
    (scores([1.0]), "1 scores for 2 records"),
    (scores([1.0, 2.0, 3.0]), "3 scores for 2 records"),
    (scores([1.0, float("nan")]), "score 1: a score is nan; give a finite number"),
    (scores([float("inf"), 1.0]), "score 0: a score is inf"),
    (scores([1.0, "1.0"]), "score 1: a score is '1.0'"),
    (scores([None, 1.0]), "score 0: a score is None"),
    (scores([True, 1.0]), "score 0: a score is True"),
    (scores([10**400, 1.0]), "give a finite number"),
    (scores([1e39, 1.0]), "of 1e+30 at most"),
    (scores([{"correct": True}, 1.0]), "score is None"),
    (scores([{"score": 1, "correct": "yes"}, 1.0]), "correct is 'yes'"),
    (scores([{"score": 1, "parts": {"a": float("nan")}}, 1.0]), "part 'a' is nan"),
    (scores([{"score": 1, "parts": {"a b": 1}}, 1.0]), "a part is called 'a b'"),
    (scores([{"score": 1, "reward": 2}, 1.0]), "unknown keys ['reward']"),
    (scores([{"score": 1, "answer": 5}, 1.0]), "answer is 5"),
]


@pytest.mark.parametrize(("answer", "reason"), MISBEHAVING, ids=[reason for _, reason in MISBEHAVING])
def test_a_server_that_misbehaves_fails_the_records_and_says_why(answer, reason):
    limits = {"timeout_s": 0.3} if answer in (sleeps, drips) else {}
    with serving(answer) as url:
        results = asking(url, **limits).score(records(2))
    assert [type(result) for result in results] == [ScoringFailure] * 2
    assert reason in results[0].reason
    assert "\n" not in results[0].reason


def test_a_server_that_is_down_fails_the_records():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (result,) = asking(f"http://127.0.0.1:{port}").score(records(1))
    assert "no connection" in result.reason


def test_what_fails_on_one_server_is_asked_again_on_another():
    with ExitStack() as stack:
        good = stack.enter_context(serving(length))
        for bad, _ in MISBEHAVING[:10]:
            url = stack.enter_context(serving(bad))
            limits = {"timeout_s": 2.0} if bad in (sleeps, drips) else {}  # In which the good one must answer, too.
            results = asking(url, good, attempts=2, **limits).score(records(4))
            assert [result.value for result in results] == [0, 1, 2, 3]


def test_nothing_waits_beyond_the_deadline():
    with serving(sleeps) as url:
        (result,) = asking(url, deadline_s=0.2).score(records(1))
    assert result == ScoringFailure("not answered within deadline_s=0.2")


def test_the_key_is_sent_and_appears_nowhere_else(monkeypatch, tmp_path, caplog):
    async def echo(request):
        return web.Response(status=500, text=f"you sent {dict(request.headers)}")

    monkeypatch.setenv("JUDGE_KEY", KEY)
    (tmp_path / "key").write_text(f"{KEY}\n")
    for source in ({"api_key_env": "JUDGE_KEY"}, {"api_key_file": str(tmp_path / "key")}):
        with serving(echo) as url:
            reward = asking(url, **source)
            (result,) = reward.score(records(1))
        assert "Bearer <key>" in result.reason
        assert KEY not in repr(result) + caplog.text + repr(reward)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": ["http://me:secret@host/"]}, "name or password"),
        ({"urls": ["http://host/?api_key=secret"]}, "secret among its parameters"),
        ({"urls": ["ftp://host/"]}, "no URL of a server"),
        ({"urls": ["host:80"]}, "no URL of a server"),
        ({"urls": ["http://host:secret/"]}, "no URL"),
        ({"urls": []}, "urls is empty"),
        ({"urls": ["http://h"], "api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE holds no key"),
        ({"urls": ["http://h"], "api_key_file": "/absent/key"}, "cannot be read"),
        ({"urls": ["http://h"], "api_key_env": "A", "api_key_file": "b"}, "both given"),
    ],
)
def test_unusable_settings_are_refused_without_repeating_a_secret(settings, message):
    with pytest.raises(InputError) as refused:
        asking(*settings.pop("urls"), **settings)
    assert message in str(refused.value)
    assert "secret@" not in str(refused.value)
    assert "=secret" not in str(refused.value)
