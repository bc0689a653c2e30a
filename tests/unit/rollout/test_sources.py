"""Metrics by source of prompts, and the sampler as the collector drives it."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dapo_mega.config import RunConfig
from dapo_mega.errors import StopRequested
from dapo_mega.metrics.catalogue import describe
from dapo_mega.rollout.sources import source_labels
from tests.unit.rollout.test_collector import PROMPTS, ScriptedEngine, StoppedEngine, collector, config, partial

NAMES = ("math", "code")
MIXED = [replace(p, dataset=NAMES[i >= 8], data_source=NAMES[i >= 8]) for i, p in enumerate(PROMPTS)]


def mixed(make=config, **sampling):
    """A run over 8 prompts of one dataset and 12 of another, twice as often."""
    values = make(algorithm={"max_generation_rounds": 9}).model_dump(mode="json")
    mixture = {"math": {"path": "m"}, "code": {"path": "c", "weight": 2}}
    data = {**values["data"], "train": None, "mixture": mixture, "sampling": sampling}
    return RunConfig.model_validate({**values, "data": data})


def half(prompt, request_id):
    """Prompts 0 to 3 are always right, the others half of the time."""
    return prompt < 4 or request_id % 2 == 0


def of_prompts(metrics):
    return {name: value for name, value in metrics.items() if name.startswith(("source/", "sampling/"))}


def by_source(metrics):
    return {name: value for name, value in of_prompts(metrics).items() if name.startswith("source/")}


def assert_same_order(resumed, whole):
    """All that decides which prompts come next is equal."""
    (values, arrays), (expected, expected_arrays) = resumed.state(), whole.state()
    assert json.dumps(values["collector"]) == json.dumps(expected["collector"])
    tables = [name for name in expected_arrays if name.startswith("sampler/")]
    assert len(tables) == 4
    assert all((arrays[name] == expected_arrays[name]).all() for name in tables)


def test_groups_are_counted_by_source_whatever_the_order_of_answers():
    found = []
    for order in (np.arange(200), np.random.default_rng(1).permutation(200)):
        engine = ScriptedEngine(half, order=lambda request, order=order: order[request.request_id])
        subject = collector(engine, mixed(), MIXED)
        _, metrics = subject.collect(0)
        found.append(by_source(metrics))
    assert found[0] == found[1]
    asked = [(prompt, request_id) for request_id, prompt, _ in engine.asked]
    for name, is_math in (("math", True), ("code", False)):
        own = [(prompt, request_id) for prompt, request_id in asked if (prompt < 8) == is_math]
        assert found[0][f"source/share_{name}"] == len(own) / len(asked)
        assert found[0][f"source/accuracy_{name}"] == np.mean([half(*each) for each in own])
        assert found[0][f"source/response_length_mean_{name}"] == np.mean([3 + i % 14 for _, i in own])
    assert all(describe(name) for name in metrics)
    assert not by_source(collector(ScriptedEngine(half), config()).collect(0)[1]), "one source has no such metrics"


def test_many_or_odd_sources_have_a_bounded_number_of_valid_names():
    odd = [replace(PROMPTS[0], data_source=source) for source in ("", "../x y", "a/b")]
    assert source_labels(odd) == {("", ""): "none", ("", "../x y"): "x_y", ("", "a/b"): "a_b"}
    shared = [replace(PROMPTS[0], dataset=d, data_source=s) for d, s in (("a", "web"), ("b", "web"), ("b", "book"))]
    assert source_labels(shared) == {("a", "web"): "a", ("b", "web"): "b", ("b", "book"): "book"}
    many = [replace(PROMPTS[0], data_source=f"s{i}") for i in range(50) for _ in range(i + 1)]
    labels = Counter(source_labels(many).values())
    assert len(labels) == 32
    assert labels["others"] == 19
    assert "s49" in labels
    assert all(describe(f"source/share_{label}") for label in labels)


SAMPLINGS = [{"order": "prioritised"}, {"order": "prioritised", "retire_after": 1}, {"retire_after": 1}]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("make", [config, partial])
def test_a_restored_collector_asks_the_same_prompts_with_the_same_metrics(make, sampling):
    run = mixed(make, **sampling)
    engines = [ScriptedEngine(half) for _ in range(2)]
    whole = collector(engines[0], run, MIXED)
    for version in range(3):
        engines[0].version = version
        whole.collect(version)
    values, arrays = whole.state()
    resumed = collector(engines[1], run, MIXED)
    resumed.load_state(json.loads(json.dumps(values)), arrays)
    for version in range(3, 6):
        engines[0].version = engines[1].version = version
        (groups, metrics), (expected, expected_metrics) = resumed.collect(version), whole.collect(version)
        assert [g.prompt.index for g in groups] == [g.prompt.index for g in expected]
        assert of_prompts(metrics) == of_prompts(expected_metrics)
    if "retire_after" in sampling:
        assert metrics["sampling/retired_math"] > 0
    assert_same_order(resumed, whole)


@pytest.mark.parametrize("make", [config, partial])
def test_a_step_that_is_stopped_counts_no_outcome_twice(make):
    run = mixed(make, order="prioritised", retire_after=1)
    engine, other = StoppedEngine(half, after=10**6), ScriptedEngine(half)
    undisturbed, stopped = collector(other, run, MIXED), collector(engine, run, MIXED)
    for subject in (undisturbed, stopped):
        subject.collect(0)
    engine.left, engine.version = 6, 1
    with pytest.raises(StopRequested):
        stopped.collect(1)
    values, arrays = stopped.state()
    again = ScriptedEngine(half)
    resumed = collector(again, run, MIXED)
    resumed.load_state(json.loads(json.dumps(values)), arrays)
    for version in (1, 2):
        again.version = other.version = version
        resumed.collect(version)
        undisturbed.collect(version)
    assert_same_order(resumed, undisturbed)
