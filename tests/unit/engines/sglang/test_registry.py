"""Engines become known to the trainer by signed announcements; nobody else's count."""

import json
import logging
import math
import socket
import threading
import time
from datetime import timedelta
from http import HTTPStatus

import psutil
import pytest
from torch.distributed import DistError, TCPStore

from dapo_mega.config.fleet import parse_address, require_api_key
from dapo_mega.engines.sglang import announcements, registry, rendezvous
from dapo_mega.engines.sglang.announcements import MAX_AGE_S, MAX_MESSAGE_BYTES, MAX_REGISTRATIONS, signed_announcement
from dapo_mega.engines.sglang.registry import EngineRegistry, Registration, announce
from dapo_mega.errors import InputError
from tests.distributed.launching import free_port

KEY = "the-key-of-this-run"
ENGINE = Registration(url="http://127.0.0.1:30000", instance="first")
OTHER = Registration(url="http://127.0.0.1:30001", instance="other")


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def trainer(address):
    trainer = EngineRegistry(address, KEY)
    yield trainer
    trainer.close()


def push(address, message):
    """The status that the trainer answers with."""
    status, _ = rendezvous.post(*parse_address(address), message)
    return status


def signed(*registrations, leaving=False):
    return signed_announcement(registrations, leaving, KEY)


def test_announced_engines_stay_known_until_they_leave(trainer, address):
    assert trainer.poll() == []
    assert announce(address, KEY, [ENGINE, OTHER])
    assert trainer.poll() == trainer.poll() == [ENGINE, OTHER]
    announce(address, KEY, [ENGINE, OTHER])
    assert trainer.poll() == [ENGINE, OTHER], "an announcement repeated is no second engine"
    announce(address, KEY, [ENGINE], leaving=True)
    assert trainer.poll() == [OTHER]


def test_a_restarted_engine_replaces_the_one_at_its_url(trainer, address):
    announce(address, KEY, [ENGINE])
    restarted = Registration(url=ENGINE.url, instance="second")
    announce(address, KEY, [restarted])
    assert trainer.poll() == [restarted]


def test_announcements_of_strangers_are_ignored_and_logged_once(trainer, address, caplog):
    with caplog.at_level(logging.WARNING):
        announce(address, "the-key-of-another-run", [ENGINE])
        announce(address, "the-key-of-another-run", [OTHER])
        push(address, b"")
        push(address, b"no signature at all, but long enough to have one")
        push(address, signed(ENGINE).replace(b":30000", b":40000"))
        assert trainer.poll() == []
    assert [record.message for record in caplog.records] == [
        "an engine's announcement is ignored: not signed with this run's API key; give the engines the trainer's key"
    ]


def test_a_replayed_announcement_brings_no_engine_back(trainer, address):
    replayed = signed(ENGINE)
    restarted = Registration(url=ENGINE.url, instance="second")
    announce(address, KEY, [restarted])
    push(address, replayed)
    assert trainer.poll() == [restarted]
    announce(address, KEY, [restarted], leaving=True)
    push(address, replayed)
    assert trainer.poll() == []


def test_an_old_announcement_is_refused_by_a_trainer_that_starts_anew(trainer, address, monkeypatch, caplog):
    old = time.time() - 2 * MAX_AGE_S
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: old)
        message = signed(ENGINE)
    push(address, message)
    with caplog.at_level(logging.WARNING):
        assert trainer.poll() == []
    assert "synchronise the clocks" in caplog.text


def body_signed(content):
    return announcements._signed(announcements._ANNOUNCEMENT, content, KEY)


def fields(**changes):
    entries = {"registrations": [vars(ENGINE)], "leaving": False, "sent_at": time.time(), **changes}
    return json.dumps(entries).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no JSON",
        b"\xff\xfe",
        b"null",
        b"[1]",
        b"[" * 8000,
        b'{"sent_at": ' + b"9" * 5000 + b"}",
        dict(sent_at=math.nan),
        dict(sent_at=math.inf),
        dict(sent_at=None),
        dict(sent_at="now"),
        dict(sent_at=10**4000),
        dict(leaving=1),
        dict(leaving=None),
        dict(registrations=None),
        dict(registrations={"url": ENGINE.url}),
        dict(registrations=[[["http://127.0.0.1:30000"]]]),
        dict(registrations=[vars(ENGINE)] * (MAX_REGISTRATIONS + 1)),
        dict(registrations=[vars(OTHER), {"url": ENGINE.url}]),
        *(
            dict(registrations=[{"url": ENGINE.url, "instance": i}])
            for i in (None, 3, "", "a b", "\n", "\ud800", "x" * 65)
        ),
        *(
            dict(registrations=[{"url": url, "instance": "first"}])
            for url in (
                *(None, 3, [], "", "no URL", "ftp://127.0.0.1:30000", "http://", "http://host", "http://:30000"),
                *("http://host:70000", "http://host:port", "http://[::1", "http://host:1/", "http://host:1/path"),
                *("http://user@host:1", "http://host:1?", "http://host:1#x", "http://ho st:1", "http://host:1\n"),
                "http://" + "h" * 400 + ":30000",
            )
        ),
    ],
    ids=lambda content: type(content).__name__,
)
def test_a_signed_malformed_announcement_is_refused_with_one_warning(trainer, address, caplog, content):
    content = content if isinstance(content, bytes) else fields(**content)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert push(address, body_signed(content)) in (400, 409)
        assert trainer.poll() == []
    (record,) = caplog.records
    assert "an engine's announcement is ignored" in record.message
    assert len(record.message) < 250
    assert announce(address, KEY, [ENGINE])
    assert trainer.poll() == [ENGINE]


def exchange(address, *pieces):
    """What the trainer answers to these bytes; the sender may find the connection closed."""
    with socket.create_connection(parse_address(address), timeout=10) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            return connection.recv(1000)
        except OSError:
            return b""


def post_head(length):
    return f"POST /engines HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode()


def test_nothing_of_what_strangers_send_is_kept_however_much_it_is(trainer, address):
    seven_mib = bytes(7 * 2**20)
    assert b" 413 " in exchange(address, post_head(len(seven_mib)))
    largest = post_head(MAX_MESSAGE_BYTES)
    for start in (post_head(len(seven_mib)), largest, b"POST /engines", b"POST /" + seven_mib[:4000], b"", b"GET /"):
        for _ in range(3):
            assert b" 200 " not in exchange(address, start, seven_mib)
    assert trainer.poll() == []
    assert not trainer._newest
    assert announce(address, KEY, [ENGINE])


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /other HTTP/1.1\r\nContent-Length: 1\r\n\r\na",
        b"POST /engines HTTP/1.1\r\n\r\n",
        b"POST /engines HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /engines HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /engines HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"POST /engines HTTP/1.1\r\nA: " + b"a" * 2000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
    ],
)
def test_other_requests_get_an_error_at_once(trainer, address, request_bytes):
    assert exchange(address, request_bytes).startswith(b"HTTP/1.1 4")


def test_open_connections_keep_no_engine_out_and_their_number_is_limited(trainer, address, monkeypatch):
    monkeypatch.setattr(rendezvous, "_LIMIT_S", 60.0)
    waiting = [socket.create_connection(parse_address(address)) for _ in range(500)]
    try:
        for connection in waiting[::2]:
            connection.sendall(b"POST /engi")
        assert announce(address, KEY, [ENGINE])
        assert trainer.poll() == [ENGINE]
        assert len(trainer._server._connections) <= rendezvous._MAX_CONNECTIONS
    finally:
        for connection in waiting:
            connection.close()


def test_a_connection_that_sends_nothing_is_closed_in_time(trainer, address, monkeypatch):
    monkeypatch.setattr(rendezvous, "_LIMIT_S", 0.1)
    assert exchange(address, b"POST /engi") == b""
    deadline = time.monotonic() + 10
    while trainer._server._connections:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_trainer_says_why_it_ignores_a_torch_store(trainer, address, caplog):
    host, port = parse_address(address)
    with caplog.at_level(logging.WARNING), pytest.raises(DistError):
        TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
    assert [record.message for record in caplog.records] == [
        "the rendezvous got a call that is not HTTP; if it came from an older launch/serve_rollouts.py, use the "
        "trainer's version"
    ]


def test_engines_that_went_are_forgotten_and_too_many_are_refused(trainer, address, monkeypatch, caplog):
    monkeypatch.setattr(registry, "_MAX_ENGINES", 20)
    many = [Registration(f"http://127.0.0.1:{port}", "first") for port in range(1, 21)]
    assert not announce(address, KEY, many[:10], leaving=True).refusal
    assert not announce(address, KEY, many[10:]).refusal
    assert "HTTP 507" in announce(address, KEY, [ENGINE]).refusal
    assert trainer.poll() == many[10:]
    assert len(trainer._newest) == 20
    later = time.time() + 2 * MAX_AGE_S
    monkeypatch.setattr(time, "time", lambda: later)
    assert not announce(address, KEY, [ENGINE]).refusal
    assert trainer.poll() == [*many[10:], ENGINE]
    assert len(trainer._newest) == 11


def test_more_engines_than_a_message_holds_are_announced_in_several(trainer, address):
    many = [
        Registration(f"http://{'h' * 200}:{port}", "x" * 32) for port in range(30000, 30000 + 5 * MAX_REGISTRATIONS)
    ]
    assert not announce(address, KEY, many).refusal
    assert trainer.poll() == many


def test_launchers_hear_of_hung_engines_only_from_their_own_trainer(trainer, address):
    trainer.report_hung(["second", "first"])
    assert announce(address, KEY, [ENGINE]).hung == {"first", "second"}
    trainer.report_hung([])
    assert announce(address, KEY, [ENGINE]).hung == set()
    assert announce(address, "the-key-of-another-run", [ENGINE]) == registry.TrainerReply(
        "refuses the announcement: its API key is another one"
    )


def answering(handle):
    """(address, server) of one that answers announcements in another way."""
    server = rendezvous.PostServer("127.0.0.1", port := free_port(), handle, MAX_MESSAGE_BYTES)
    return f"127.0.0.1:{port}", server


def test_answers_of_strangers_or_old_ones_name_no_engine_nor_the_key():
    seen = []

    def replay(message):
        seen.append(message)
        return HTTPStatus.OK, announcements.signed_reply(seen[0], ["first"], KEY)

    address, server = answering(replay)
    try:
        assert announce(address, KEY, [ENGINE]).hung == {"first"}
        assert announce(address, KEY, [ENGINE]) == registry.TrainerReply("does not have this API key")
    finally:
        server.close()
    assert not any(KEY.encode() in message for message in seen)


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 2", b"\x00" * 100_000, None])
def test_what_is_no_trainer_is_not_waited_for(answer, monkeypatch):
    monkeypatch.setattr(rendezvous, "_LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            with connection:
                connection.recv(10_000)
                if answer is None:
                    time.sleep(1.5)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert announce(f"127.0.0.1:{listening.getsockname()[1]}", KEY, [ENGINE]) is None
        thread.join(10)


def test_a_restarted_trainer_finds_its_engines_again(address):
    first = EngineRegistry(address, KEY)
    announce(address, KEY, [ENGINE])
    assert first.poll() == [ENGINE]
    first.close()
    assert not announce(address, KEY, [ENGINE]), "nobody listens at a closed registry's address"
    second = EngineRegistry(address, KEY)
    assert second.poll() == []
    assert announce(address, KEY, [ENGINE])
    assert second.poll() == [ENGINE]
    second.close()


def test_the_registry_listens_on_the_given_interface_only(trainer, address):
    port = parse_address(address)[1]
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert listening == ["127.0.0.1"]


def test_an_address_in_use_is_waited_for(address):
    taken = socket.create_server(parse_address(address))
    threading.Timer(0.5, taken.close).start()
    trainer = EngineRegistry(address, KEY)
    assert announce(address, KEY, [ENGINE])
    assert trainer.poll() == [ENGINE]
    trainer.close()


def test_a_connection_that_meets_itself_is_no_trainer(address, monkeypatch):
    host, port = parse_address(address)

    def connect_to_itself(target, timeout):
        connection = socket.socket()
        connection.bind((host, port))
        connection.connect(target)
        return connection

    monkeypatch.setattr(socket, "create_connection", connect_to_itself)
    assert not announce(address, KEY, [ENGINE])
    monkeypatch.undo()
    monkeypatch.setattr(rendezvous, "_LISTEN_PATIENCE_S", 0.0)
    EngineRegistry(address, KEY).close()


def test_an_address_that_stays_in_use_is_an_input_error(monkeypatch):
    monkeypatch.setattr(rendezvous, "_LISTEN_PATIENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=f"cannot listen on rollout.fleet.rendezvous={address}"):
            EngineRegistry(address, KEY)


def test_an_address_of_another_machine_is_an_input_error_at_once(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waiting makes no address this machine's"))
    with pytest.raises(InputError, match="cannot listen on"):
        EngineRegistry("203.0.113.7:21600", KEY)


@pytest.mark.parametrize("address", ["", "21600", "host:", ":21600", "host:0", "host:70000", "host:port"])
def test_an_address_without_host_or_port_is_an_input_error(address):
    with pytest.raises(InputError, match="give host:port"):
        parse_address(address)


@pytest.mark.parametrize(
    "key", [None, "", "short", "sixteen chars but with spaces", "no-newlines-please\n", "sixteen-chars-ä-or-more"]
)
def test_a_key_that_cannot_protect_is_an_input_error(monkeypatch, key):
    if key is None:
        monkeypatch.delenv("A_KEY", raising=False)
    else:
        monkeypatch.setenv("A_KEY", key)
    with pytest.raises(InputError, match=r"export A_KEY=\$\(python3 -c"):
        require_api_key("A_KEY")


def test_a_good_key_is_returned(monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)
    assert require_api_key("A_KEY") == KEY
