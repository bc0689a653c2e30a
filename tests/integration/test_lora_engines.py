"""Engines that get only the adapters of a run with LoRA, by SGLang's own LoRA."""

import signal

import numpy as np
import pytest
import torch

from dapo_mega.engines.sglang.weight_protocol import ADAPTER
from dapo_mega.training import loop

from .conftest import one_engine
from .fleet_runs import (
    deviation_after_update,
    engine_logprobs,
    fleet_values,
    num_serving,
    responses_over_an_update,
    run,
    signal_engine,
    training_run_of,
    wait_until,
)
from .sglang_servers import API_KEY, VOCAB_SIZE

pytestmark = pytest.mark.integration

TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE - 1, 60).astype(np.int32)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with one_engine(tmp_path_factory.mktemp("engine"), "--lora-rank", "4", "--restart", "always") as engine:
        yield engine


@pytest.fixture(autouse=True)
def api_key(monkeypatch):
    monkeypatch.setenv("DAPO_MEGA_API_KEY", API_KEY)


def values_of(folder, engine, send="adapters", **changes):
    fleet = {"urls": engine.launcher.urls, "min_engines": 1}
    lora = {"rank": 4, "alpha": 8, "send": send, "path": None}
    changes = {"rollout": {"fleet": fleet}, "optimizer": {"learning_rate": 1e-2}, **changes}
    changes["checkpoint"] = {"every": 2, "asynchronous": False}
    return fleet_values(folder, engine, lora=lora, **changes)


def scores(engine, **adapter):
    triples = engine_logprobs(engine.launcher.urls[0], TOKENS.tolist(), **adapter)
    return np.array([score for score, _, _ in triples[1:]])


def test_an_engine_with_adapters_computes_what_the_trainer_does(tmp_path, engine):
    with training_run_of(values_of(tmp_path, engine, num_steps=2)) as training_run:
        trainer, fleet = training_run.trainer, training_run.fleet
        records = run(training_run)
        expected = trainer.logprobs(TOKENS)
        adapted, base = scores(engine, lora_path=ADAPTER), scores(engine)
        assert np.abs(adapted - expected).max() < 1e-5
        assert np.abs(base - expected).max() > 0.01

        signal_engine(engine, 0, signal.SIGKILL)
        wait_until(lambda: num_serving(training_run) == 0, 60)
        fleet.tend()
        assert np.abs(scores(engine, lora_path=ADAPTER) - adapted).max() < 1e-6

        numbers = {name: value.numel() for name, value in trainer.policy.lora.parameters.items()}
        assert [record["weight_sync/bytes"] for record in records] == [4 * sum(numbers.values())] * 2
    with training_run_of(values_of(tmp_path, engine, send="merged", num_steps=2)) as training_run:
        loop.restore(training_run, training_run.trainer.load(training_run.trainer.store.latest()))
        full = training_run.weight_sync.push(training_run.step)
        assert full["weight_sync/bytes"] > 5 * records[0]["weight_sync/bytes"]
        assert np.abs(scores(engine) - adapted).max() < 1e-5


def test_responses_that_meet_an_adapter_carry_two_versions(tmp_path, engine):
    values = values_of(
        tmp_path,
        engine,
        rollout={
            "schedule": "asynchronous",
            "max_response_tokens": 160,
            "fleet": {"urls": engine.launcher.urls, "min_engines": 1, "requests_per_engine": 16},
        },
        batch={"tokens_per_microbatch": 1024, "generation_groups": 12},
        weight_sync={"in_flight": "continue", "pause": "retract"},
    )
    with training_run_of(values) as training_run:
        training_run.weight_sync.push(0)
        with torch.no_grad():
            for parameter in training_run.trainer.policy.lora.parameters.values():
                parameter.normal_(0, 0.1)  # With twice as much, rounding alone came to the bound.
        training_run.weight_sync.push(0)
        met = responses_over_an_update(training_run)
        assert met
        assert max(deviation_after_update(engine.launcher.urls[0], *each, lora_path=ADAPTER) for each in met) < 1e-4
