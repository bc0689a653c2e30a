"""Engines that outnumber the trainer's processes pass weights on to each other; one that fails takes nobody with it."""

import pytest

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.stores import open_store
from dapo_mega.engines.sglang.weight_protocol import limited_group, meeting_key, relay_group
from dapo_mega.sglang_plugin.relaying import Relays
from dapo_mega.weight_sync.broadcast import BroadcastTransport
from dapo_mega.weight_sync.fleet_sync import FleetWeightSync

from .made_weights import TIMEOUT_S, URLS, Policy, SlowlyChanging, holders


@pytest.fixture
def relaying(sync, fleet):
    """A sync with engines that pass on: e0 to e1, and that to e2."""
    fleet.without_plugin = set()
    return sync


@pytest.mark.usefixtures("one_by_one")
def test_where_engines_outnumber_senders_they_pass_buckets_on(relaying, fleet):
    policy = Policy()
    for version in (1, 2):
        metrics = relaying.push(policy.advance(), version)
        assert holders(fleet, policy) == URLS
        assert metrics["weight_sync/relayed_share"] == pytest.approx(2 / 3)
        assert metrics["weight_sync/relays_failed"] == 0
    assert [engine.sources for engine in fleet.engines.values()] == [["trainer"] * 6, ["engine"] * 6, ["engine"] * 6]
    assert [engine.calls.count("join a relay") for engine in fleet.engines.values()] == [1, 2, 1]
    assert all(engine.versions[-1] == ("2", True) for engine in fleet.engines.values())


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize(
    ("call", "fault", "number"),
    [
        *((("update", 2), fault, number) for fault in ("die", "refuse") for number in range(3)),
        *((("update", 2), "hang", number) for number in range(2)),
        ("join a relay", "die", 2),
        ("join a relay", "refuse", 1),
        ("join a relay", "hang", 0),
        ("join a relay", "stall", 0),
    ],
)
def test_an_engine_that_fails_as_a_relay_takes_nobody_with_it(relaying, fleet, call, fault, number):
    url = URLS[number]
    fleet.engines[url].faults[call] = fault
    policy = Policy().advance()
    metrics = relaying.push(policy, 1)
    stays = call == "join a relay" or (fault == "refuse" and url != URLS[0])
    assert set(fleet.away) == (set() if stays else {url})
    assert set(holders(fleet, policy)) >= set(URLS) - set(fleet.away)
    assert metrics["weight_sync/engines"] == 3 - len(fleet.away)
    if stays and call != "join a relay":
        assert metrics["weight_sync/relays_failed"] == 1
    # It comes back, and there is a whole chain again. Two engines that said they cannot connect do not try again.
    fleet.return_all()
    relaying.push_to_outdated(policy, 1)
    metrics = relaying.push(policy.advance(), 2)
    assert holders(fleet, policy) == URLS
    assert metrics["weight_sync/relayed_share"] == pytest.approx(
        (1 if (call, fault) == ("join a relay", "refuse") else 2) / 3
    )


@pytest.mark.usefixtures("one_by_one")
def test_engines_that_join_too_slowly_stay_and_get_all_from_the_trainer(processes, fleet, monkeypatch):
    monkeypatch.setattr("dapo_mega.weight_sync.relays._CALL_LIMIT_S", 0.0)
    fleet.without_plugin = set()
    config = WeightSyncConfig(timeout_s=TIMEOUT_S)
    sync = FleetWeightSync(processes, fleet, config, BroadcastTransport(processes, config))
    policy = Policy().advance()
    metrics = sync.push(policy, 1)
    assert not fleet.away
    assert holders(fleet, policy) == URLS
    assert metrics["weight_sync/relayed_share"] == 0
    fleet.disconnect()
    sync.close()


def test_who_comes_after_the_other_was_sent_away_hears_so_instead_of_waiting():
    store, name = open_store("127.0.0.1", 60.0), limited_group(relay_group("r"), 60.0)
    store.compare_set(meeting_key(name), "", "sent away")
    where = {"address": "127.0.0.1", "port": store.port, "world_size": 2, "device": "cpu"}
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match="sent away"):
            Relays().join(name, rank=rank, is_sender=rank == 0, **where)


def test_engines_that_cannot_connect_to_each_other_are_tried_again_when_one_has_joined_anew(relaying, fleet, caplog):
    policy = Policy().advance()
    fleet.engines[URLS[2]].faults["join a relay"] = "refuse"
    relaying.push(policy, 1)
    assert "engine http://e2 gets its weights from the trainer, not from engine http://e1" in caplog.text
    fleet.failed(URLS[1], "restarted")
    fleet.return_all()
    assert relaying.push(policy.advance(), 2)["weight_sync/relayed_share"] == pytest.approx(2 / 3)
    assert holders(fleet, policy) == URLS


@pytest.mark.parametrize("fault", ["refuse", "die"])
@pytest.mark.parametrize("url", URLS[:2])
def test_changes_are_passed_on_too_and_come_again_where_they_did_not_arrive(delta_sync, fleet, url, fault):
    policy = SlowlyChanging()
    for version in range(1, 5):
        if version == 2:
            fleet.engines[url].faults["update", 1] = fault
        metrics = delta_sync.push(policy.advance(), version)
        assert set(holders(fleet, policy)) >= set(URLS) - set(fleet.away)
        if fleet.away:
            fleet.return_all()
    assert holders(fleet, policy) == URLS
    assert metrics["weight_sync/relayed_share"] == pytest.approx(2 / 3)
