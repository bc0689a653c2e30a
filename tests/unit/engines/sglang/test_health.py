"""Verdicts on engines, from probes of scripted ones."""

import asyncio
import re
from contextlib import asynccontextmanager

import pytest

from dapo_mega.engines.sglang.engine_client import EngineClient
from dapo_mega.engines.sglang.health import HealthMonitor
from tests.unit.engines.sglang.scripted_server import DEADLINE_S, serving, until, within_deadline
from tools.scripted_engine import ScriptedEngine

HEARTBEAT_S = 0.05
HUNG_AFTER_S = 1.0


@asynccontextmanager
async def monitoring(clients, **options):
    """A monitor of the engines, with the changes it reported as (url, old, new, reason)."""
    changes = []

    async def on_change(url, old, new, reason):
        changes.append((url, old, new, reason))

    settings = {"heartbeat_s": HEARTBEAT_S, "hung_after_s": HUNG_AFTER_S, **options}
    monitor = HealthMonitor(on_change=on_change, **settings)
    for client in clients:
        monitor.watch(client)
    try:
        yield monitor, changes
    finally:
        await monitor.close()


@asynccontextmanager
async def watching(*engines, **options):
    """`monitoring` of engines that it starts."""
    async with serving(*engines) as clients, monitoring(clients, **options) as monitored:
        yield monitored


def states(changes):
    return [(old, new) for _, old, new, _ in changes]


def test_an_engine_that_loads_is_starting_until_it_answers():
    async def body():
        engine = ScriptedEngine()
        engine.health = "loading"
        async with watching(engine) as (monitor, changes):
            await until(lambda: engine.calls["/health"] >= 3)
            assert changes == []
            assert monitor.watches[engine.url].state == "starting"
            engine.health = "ok"
            await until(lambda: changes)
            assert changes[0] == (engine.url, "starting", "healthy", "it answers")

    within_deadline(body)


def test_an_engine_that_is_silent_hangs_and_returns_as_the_same_process():
    async def body():
        engine = ScriptedEngine()
        async with watching(engine) as (monitor, changes):
            await until(lambda: changes)
            engine.health = "silent"
            await until(lambda: len(changes) == 2)
            assert states(changes)[1] == ("healthy", "hung")
            assert "for 1 s" in changes[1][3]
            engine.health = "ok"
            await until(lambda: len(changes) == 3)
            assert states(changes)[2] == ("hung", "healthy")
            assert "same process" in changes[2][3]
            assert monitor.watches[engine.url].restarts == 0

    within_deadline(body)


def test_an_engine_that_is_paused_is_told_to_go_on_unless_it_is_in_use():
    async def body():
        engine = ScriptedEngine()
        async with serving(engine) as (client,):
            await client.pause("abort")
            async with monitoring([client]) as (_, changes):
                await until(lambda: changes)
                await client.pause("retract")
                await until(lambda: len(changes) == 3)
        assert states(changes) == [("starting", "healthy"), ("healthy", "hung"), ("hung", "healthy")]

    within_deadline(body)


def test_a_foreign_server_is_known_at_once_until_an_engine_answers():
    async def body():
        engine = ScriptedEngine()
        engine.health = "not_found"
        async with watching(engine, hung_after_s=60.0) as (monitor, changes):
            await until(lambda: changes)
            assert states(changes) == [("starting", "foreign")]
            assert "HTTP 404: /health" in changes[0][3]
            engine.health = "loading"
            await until(lambda: len(changes) == 2)
            engine.health = "ok"
            await until(lambda: len(changes) == 3)
            assert states(changes)[1:] == [("foreign", "starting"), ("starting", "healthy")]
            engine.health = "not_found"
            await until(lambda: len(changes) == 4)
            assert states(changes)[3] == ("healthy", "foreign")
            assert monitor.watches[engine.url].silence_s < 10

    within_deadline(body)


def test_silence_shorter_than_the_limit_is_no_verdict():
    async def body():
        engine = ScriptedEngine()
        async with watching(engine, hung_after_s=5.0) as (_, changes):
            await until(lambda: changes)
            engine.health_delay_s = 0.3
            await until(lambda: engine.calls["/health"] >= 5)
            assert len(changes) == 1

    within_deadline(body)


def test_a_server_that_says_it_is_unhealthy_hangs():
    async def body():
        engine = ScriptedEngine()
        async with watching(engine) as (monitor, changes):
            await until(lambda: changes)
            engine.health = "loading"  # The server says the same, 503, when its scheduler does not answer it.
            await until(lambda: len(changes) == 2)
            assert states(changes)[1] == ("healthy", "hung")
            await until(lambda: "lastly" in (reason := monitor.watches[engine.url].reason) and "HTTP 503" in reason)

    within_deadline(body)


def test_an_engine_that_is_gone_is_dead_and_a_restart_is_recognised():
    async def body():
        engine = ScriptedEngine()
        async with watching(engine, hung_after_s=2 * DEADLINE_S) as (monitor, changes):
            await until(lambda: changes)
            url, port = engine.url, int(engine.url.rsplit(":", 1)[1])
            await engine.stop()
            await until(lambda: len(changes) == 2)
            assert states(changes)[1] == ("healthy", "dead")
            engine.process, engine.health = "second", "loading"
            await engine.start(port)
            await until(lambda: len(changes) == 3)
            engine.health = "ok"
            await until(lambda: len(changes) == 4)
            assert states(changes)[2:] == [("dead", "starting"), ("starting", "healthy")]
            assert "new process" in changes[3][3]
            assert monitor.watches[url].restarts == 1

    within_deadline(body)


def test_one_broken_connection_is_no_death():
    async def body():
        engine = ScriptedEngine()
        async with watching(engine, hung_after_s=2 * DEADLINE_S) as (_, changes):
            await until(lambda: changes)
            engine.health = "reset"
            seen = engine.calls["/health"]
            await until(lambda: engine.calls["/health"] > seen)
            engine.health = "ok"
            await until(lambda: engine.calls["/health"] > seen + 3)
            assert len(changes) == 1

    within_deadline(body)


def test_a_suspended_engine_is_neither_probed_nor_judged():
    async def body():
        engine = ScriptedEngine()
        async with watching(engine) as (monitor, changes):
            await until(lambda: changes)
            engine.health = "silent"
            probes = engine.calls["/health"]
            await until(lambda: engine.calls["/health"] > probes)
            await monitor.suspend(engine.url)
            probes = engine.calls["/health"]
            await asyncio.sleep(1.5)
            assert engine.calls["/health"] == probes
            assert len(changes) == 1
            engine.health = "loading"  # The silence before is not held against it either.
            monitor.resume(engine.url)
            await until(lambda: engine.calls["/health"] > probes)
            engine.health = "ok"
            await until(lambda: engine.calls["/health"] > probes + 3)
            assert len(changes) == 1

    within_deadline(body)


def test_a_suspension_ends_the_probe_that_is_under_way():
    async def body():
        engine = ScriptedEngine()
        async with watching(engine, hung_after_s=2 * DEADLINE_S) as (monitor, changes):
            await until(lambda: changes)
            engine.health = "silent"
            probes = engine.calls["/health"]
            await until(lambda: engine.calls["/health"] > probes)
            await monitor.suspend(engine.url)
            engine.health = "ok"
            monitor.resume(engine.url)
            await until(lambda: engine.calls["/health"] > probes + 2)
            assert len(changes) == 1

    within_deadline(body)


def test_an_engine_that_hangs_after_its_suspension_is_found():
    async def body():
        engine = ScriptedEngine()
        async with watching(engine) as (monitor, changes):
            await until(lambda: changes)
            await monitor.suspend(engine.url)
            engine.health = "silent"
            monitor.resume(engine.url)
            await until(lambda: len(changes) == 2)
            assert states(changes)[1] == ("healthy", "hung")

    within_deadline(body)


def test_an_engine_whose_probes_lag_far_behind_shows_in_the_metrics():
    async def body():
        engines = [ScriptedEngine() for _ in range(3)]
        for engine in engines:
            engine.health_delay_s = 0.1
        engines[1].health_delay_s = 0.8
        async with watching(*engines, hung_after_s=5.0) as (monitor, changes):
            await until(lambda: monitor.metrics()["fleet/probe_latency_max_s"] >= 0.5)
            await until(lambda: monitor.metrics()["fleet/slowest_probe_ratio"] > 2)
            assert monitor.metrics()["fleet/engines_healthy"] == 3
            assert len(changes) == 3

    within_deadline(body)


def test_trouble_is_looked_into_before_the_next_heartbeat():
    async def body():
        engine = ScriptedEngine()
        async with watching(engine, heartbeat_s=2 * DEADLINE_S, hung_after_s=3 * DEADLINE_S) as (monitor, changes):
            await until(lambda: changes)
            await engine.stop()
            await asyncio.sleep(0.3)
            assert len(changes) == 1
            monitor.watches[engine.url].wanted.set()
            await until(lambda: len(changes) == 2)
            assert states(changes)[1] == ("healthy", "dead")

    within_deadline(body)


def test_probing_that_ends_by_a_fault_of_the_program_is_reported(caplog):
    async def on_change(url, old, new, reason):
        raise KeyError(url)

    async def body():
        engine = ScriptedEngine()
        async with serving(engine) as (client,):
            monitor = HealthMonitor(heartbeat_s=HEARTBEAT_S, hung_after_s=HUNG_AFTER_S, on_change=on_change)
            monitor.watch(client)
            await until(lambda: caplog.records)
            await monitor.close()

    within_deadline(body)
    assert re.search(r"probing http://\S+ ended with an unexpected exception", caplog.text)


def test_a_probe_that_fails_unexpectedly_makes_its_engine_foreign(monkeypatch):
    async def body():
        engine = ScriptedEngine()
        async with watching(engine) as (_, changes):
            await until(lambda: changes)
            monkeypatch.setattr(EngineClient, "probe", lambda self, timeout_s: int("x"))
            await until(lambda: len(changes) == 2)
            assert states(changes)[1] == ("healthy", "foreign")
            monkeypatch.undo()
            await until(lambda: len(changes) == 3)
            assert states(changes)[2] == ("foreign", "healthy")

    within_deadline(body)


def test_a_wrong_key_is_told_as_the_reason():
    async def body():
        engine = ScriptedEngine(api_key="other")
        async with serving(engine) as (client,):
            engine.api_key = "yet another"
            changes = []

            async def on_change(*change):
                changes.append(change)

            monitor = HealthMonitor(heartbeat_s=HEARTBEAT_S, hung_after_s=HUNG_AFTER_S, on_change=on_change)
            monitor.watch(client)
            await until(lambda: changes)
            # Probes need no key, what tells the process does.
            assert changes[0][1:3] == ("starting", "healthy")
            assert "HTTP 401" in changes[0][3]
            await monitor.close()

    within_deadline(body)


def test_an_engine_is_watched_once():
    async def body():
        engine = ScriptedEngine()
        async with serving(engine) as (client,):

            async def on_change(*change):
                pass

            monitor = HealthMonitor(heartbeat_s=HEARTBEAT_S, hung_after_s=HUNG_AFTER_S, on_change=on_change)
            monitor.watch(client)
            with pytest.raises(AssertionError):
                monitor.watch(client)
            await monitor.close()

    within_deadline(body)
