"""Engines become known to the trainer by signed announcements; nobody else's count."""

import logging
import socket
import threading
import time
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from dapo_mega.errors import InputError
from dapo_mega.rollout import registry
from dapo_mega.rollout.registry import EngineRegistry, Registration, announce, parse_address, require_api_key
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
    host, port = parse_address(address)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    store.queue_push(registry._QUEUE, message)


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
        signed = registry._signed(ENGINE, False, KEY)
        push(address, signed.replace(b":30000", b":40000"))
        assert trainer.poll() == []
    assert [record.message for record in caplog.records] == [
        "an engine's announcement is ignored: it is not signed with this run's API key; give the engines the trainer's "
        "key"
    ]


def test_a_replayed_announcement_brings_no_engine_back(trainer, address):
    replayed = registry._signed(ENGINE, False, KEY)
    restarted = Registration(url=ENGINE.url, instance="second")
    announce(address, KEY, [restarted])
    push(address, replayed)
    assert trainer.poll() == [restarted]
    announce(address, KEY, [restarted], leaving=True)
    push(address, replayed)
    assert trainer.poll() == []


def test_an_old_announcement_is_refused_by_a_trainer_that_starts_anew(trainer, address, monkeypatch, caplog):
    old = time.time() - 2 * registry._MAX_AGE_S
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: old)
        message = registry._signed(ENGINE, False, KEY)
    push(address, message)
    with caplog.at_level(logging.WARNING):
        assert trainer.poll() == []
    assert "set the machines' clocks right" in caplog.text


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

    monkeypatch.setattr(registry.socket, "create_connection", connect_to_itself)
    monkeypatch.setattr(registry, "TCPStore", lambda *_, **__: pytest.fail("no store is there"))
    assert not announce(address, KEY, [ENGINE])
    monkeypatch.undo()
    monkeypatch.setattr(registry, "_LISTEN_PATIENCE_S", 0.0)
    EngineRegistry(address, KEY).close()


def test_an_address_that_stays_in_use_is_an_input_error(monkeypatch):
    monkeypatch.setattr(registry, "_LISTEN_PATIENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=f"rollout.fleet.rendezvous={address} cannot be listened at"):
            EngineRegistry(address, KEY)


def test_an_address_of_another_machine_is_an_input_error_at_once(monkeypatch):
    monkeypatch.setattr(registry.time, "sleep", lambda _: pytest.fail("waiting makes no address this machine's"))
    with pytest.raises(InputError, match="cannot be listened at"):
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
