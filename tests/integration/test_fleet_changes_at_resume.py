"""Every key of a fleet is changed at a resume, and its effect seen. Scripted engines show what a real one could only at
chance: who is asked, how it is paused, which way weights come, and what is done about failures.

A run is saved after a step without a fleet, as a checkpoint holds nothing of one; each case loads it with two engines
and one more key changed, sends the weights and collects the groups of the next step.
"""

import asyncio
import json
import socket
import threading
from collections import Counter

import pytest

from dapo_mega.errors import FleetError, InputError, StarvedError
from dapo_mega.megatron.processes import stop_processes
from dapo_mega.training import loop
from dapo_mega.training.build import build_run
from dapo_mega.training.evaluating import begin_beside
from dapo_mega.training.run import close
from tests.distributed.launching import free_port
from tests.distributed.tables import every_third
from tools.scripted_engine import ScriptedEngine

from .test_changes_at_resume import Resumes, assigned, heard

pytestmark = pytest.mark.integration

KEYS = ("a-key-of-these-tests", "another-key-of-them")


class Engine(ScriptedEngine):
    """Takes a while to load weights."""

    loading_s = 0.0

    async def _update_weights(self, request):
        await asyncio.sleep(self.loading_s)
        return await super()._update_weights(request)


class Engines:
    """Scripted engines, on an event loop in a thread: two, and a third that few runs name."""

    def __init__(self, vocab_size):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.all = [Engine(vocab_size, api_key=KEYS[0]) for _ in range(3)]
        self.both = self.all[:2]
        for engine in self.all:
            asyncio.run_coroutine_threadsafe(engine.start(), self.loop).result(30)

    def reset(self):
        for engine in self.all:
            engine.version, engine.fault, engine.health, engine.tokens_per_s = (
                "default",
                lambda payload: None,
                "ok",
                0.0,
            )
            engine.loading_s, engine.settings, engine.payloads, engine.calls, engine.most_in_flight = (
                0.0,
                {},
                [],
                Counter(),
                0,
            )

    def close(self):
        for engine in self.all:
            asyncio.run_coroutine_threadsafe(engine.stop(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    resumes = Resumes(tmp_path_factory.mktemp("fleet"))
    vocab_size = json.loads((resumes.folder / "model" / "config.json").read_text())["vocab_size"]
    engines = Engines(vocab_size)
    yield resumes, engines, resumes.saved(())
    engines.close()


def urls(engines):
    return ",".join(engine.url for engine in engines)


def resumed(fleet, overrides, prepare):
    """What is seen of the engines, and of the run, when it continues."""
    resumes, engines, output = fleet
    engines.reset()
    if prepare:
        prepare(engines)
    seen, run = {"error": ""}, None
    base = [
        output, "rollout.placement=fleet", f"rollout.fleet.urls={urls(engines.both)}",
        "rollout.fleet.min_engines=2",
        "weight_sync.transport=disk", "weight_sync.folder={folder}/weights", "rollout.engine_tolerance=1000",
        "rollout.mismatch_stop=null", "algorithm.dynamic_sampling=false", "rollout.fleet.wait_limit_s=20",
        "algorithm.max_staleness=2", "algorithm.max_generation_rounds=1",
    ]  # fmt: skip
    with heard() as seen["warnings"]:
        try:
            run = build_run(resumes.config([*base, *overrides]), 1)
            loop.restore(run, run.trainer.load(run.trainer.store.latest()))
            seen |= loop.send_weights(run)
            if run.config.evaluation.beside_training:
                begin_beside(run)
                seen |= run.beside.result(wait=True).metrics
            seen["listens"] = run.config.rollout.fleet.rendezvous is not None and is_open(run)
            _, collected = loop.collect(run)
            seen |= collected
            run.step += 1
            seen |= {f"second {name}": value for name, value in loop.send_weights(run).items()}
            seen |= run.fleet.pop_metrics()
        except (InputError, FleetError, StarvedError) as error:
            seen["error"] = str(error)
        finally:
            if run:
                close(run)
            stop_processes()
    calls = sum((engine.calls for engine in engines.both), Counter())
    seen |= {"generations": calls["/generate"] > 0, "groups": calls["/init_weights_update_group"] > 0}
    seen |= {
        "pauses": calls["/pause_generation"],
        "aborts": calls["/abort_request"],
        "many probes": calls["/health"] > 12,
    }
    seen["most"] = max(engine.most_in_flight for engine in engines.both)
    seen["folders"] = sorted(p.name for p in resumes.folder.iterdir() if "weights" in p.name)
    return seen


def is_open(run):
    host, port = run.config.rollout.fleet.rendezvous.split(":")
    try:
        socket.create_connection((host, int(port)), 2).close()
    except OSError:
        return False
    return True


def slow(engines, tokens_per_s=25.0):
    for engine in engines.both:
        engine.tokens_per_s = tokens_per_s


def lagging(engines):
    slow(engines)
    engines.both[1].health_delay_s = 1.5


def loading(engines):
    for engine in engines.both:
        engine.loading_s = 1.0


def failing(engines):
    """The first two calls of a request fail."""
    for engine in engines.both:
        engine.fault = lambda payload: "error_500" if payload.get("rid", "9").rstrip(".")[-2:] in ("-1", "-2") else None


TOO_FEW = "rollout.fleet.min_engines=3"
ONE, SHORT = "rollout.fleet.min_engines=1", "rollout.fleet.wait_limit_s=1"
BESIDE = ("evaluation.beside_training=true", ONE, "evaluation.at_start=false")
THREE = "rollout.fleet.urls={three}"
IN_FLIGHT = ("rollout.schedule=partial", "weight_sync.in_flight=continue", "batch.generation_groups=12")
# Key -> its value, what it must change, what else both runs have, and what the engines are like.
CHANGES = {
    "rollout.placement": ("embedded", "generations", (), None),
    "rollout.fleet.urls": ("{first}", "fleet/engines_serving", (ONE,), None),
    "rollout.fleet.rendezvous": ("{address}", "listens", (), None),
    "rollout.fleet.api_key_env": ("ANOTHER_KEY", "error", (SHORT,), None),
    "rollout.fleet.min_engines": (3, "error", (SHORT,), None),
    "rollout.fleet.engine_tensor": (2, "error", (SHORT,), None),
    "rollout.fleet.wait_limit_s": (2, "error", (TOO_FEW, SHORT), None),
    "rollout.fleet.requests_per_engine": (1, "most", (), slow),
    "rollout.fleet.request_timeout_s": (0.2, "error", ("rollout.max_attempts=1",), slow),
    "rollout.fleet.heartbeat_s": (0.05, "many probes", (), slow),
    "rollout.fleet.hung_after_s": (0.3, "fleet/engines_hung", (ONE, "rollout.fleet.heartbeat_s=0.1"), lagging),
    "rollout.max_attempts": (1, "error", (), failing),
    "rollout.engine_tolerance": (1e-6, "error", (), None),
    "rollout.schedule": ("asynchronous", "rollout/requests_submitted", (), slow),
    "weight_sync.transport": ("distributed", "groups", ("weight_sync.timeout_s=1",), None),
    "weight_sync.folder": ("{folder}/other weights", "folders", (), None),
    "weight_sync.timeout_s": (0.3, "error", (), loading),
    "weight_sync.in_flight": ("finish", "pauses", IN_FLIGHT, slow),
    "weight_sync.pause": ("retract", "aborts", IN_FLIGHT, slow),
    "evaluation.beside_training": (False, "evaluation/engines", BESIDE, None),
    "evaluation.engines": (2, "evaluation/engines", (*BESIDE, THREE), None),
    "evaluation.limit_s": (0.2, "evaluation/unfinished", BESIDE, slow),
}


def test_each_changed_key_of_a_fleet_changes_what_follows(fleet, monkeypatch, pytestconfig):
    monkeypatch.setenv("DAPO_MEGA_API_KEY", KEYS[0])
    monkeypatch.setenv("ANOTHER_KEY", KEYS[1])
    lost, befores = [], {}
    engines = fleet[1]
    for key, (value, name, context, prepare) in every_third(CHANGES.items(), pytestconfig):
        places = {"{first}": engines.both[0].url, "{address}": f"127.0.0.1:{free_port()}"}
        context = [override.replace("{three}", urls(engines.all)) for override in context]
        if (*context, prepare) not in befores:
            befores[*context, prepare] = resumed(fleet, context, prepare)
        before = befores[*context, prepare]
        without = ["rollout.fleet.urls=[]"] if value == "embedded" else []
        after = resumed(fleet, (*context, *without, assigned(key, places.get(value, value))), prepare)
        print(key, before.get(name), after.get(name), after["error"][:150])
        if before.get(name) == after.get(name) or (after["error"] and name != "error"):
            lost.append((key, name, before.get(name), before["error"], after["error"]))
    assert not lost, "\n".join(map(str, lost))
