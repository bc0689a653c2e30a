"""DAPO runs through real SGLang engines, and the faults that engines and trainers have."""

import base64
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch

from dapo_mega.commands import evaluate as evaluate_command
from dapo_mega.engines.sglang.engine_client import EngineClient
from dapo_mega.engines.sglang.engine_commands import Node, router_command, router_environment
from dapo_mega.engines.sglang.registry import EngineRegistry
from dapo_mega.engines.sglang.serving import ProcessGroup
from dapo_mega.engines.sglang.weight_protocol import PACKED_LOGPROBS, limited_group
from dapo_mega.errors import FleetError
from dapo_mega.megatron.processes import stop_processes
from dapo_mega.metrics import read_metrics
from dapo_mega.samples.table import trajectory_of
from dapo_mega.training import loop
from dapo_mega.training.replay import replay
from dapo_mega.types import sampled_rows
from tests.distributed.launching import REPOSITORY, free_port, free_ports, run_script, start_workers, wait_for

from .conftest import one_engine
from .fleet_runs import (
    AT_WORK,
    check_restarted_run,
    checked_records,
    deviation_after_update,
    fleet_values,
    num_serving,
    responses_over_an_update,
    run,
    saboteur,
    signal_engine,
    stop_at_work,
    total,
    train_to_the_end,
    training_run_of,
    wait_for_both_engines,
    wait_until,
    write_config,
)
from .runs import run_that_starts_again
from .sglang_servers import API_KEY, NUM_TOKENS, call, serving_engines, sglang_python, tiny_model
from .soak import Soak
from .test_benchmarks import FORMS, printed_by_fork

pytestmark = pytest.mark.integration
TRAIN = REPOSITORY / "launch" / "train_dapo.py"
DYING_TRAINER = REPOSITORY / "tests" / "integration" / "dying_trainer.py"
RESTART_LIMIT_S = 240


@pytest.fixture(autouse=True)
def api_key(monkeypatch):
    monkeypatch.setenv("DAPO_MEGA_API_KEY", API_KEY)


def start_run(folder, values, world_size, script=TRAIN):
    return start_workers(script, world_size, ["--config", str(write_config(folder, values))], folder / "logs")


def finish_run(workers, folder, timeout_s=300):
    statuses = wait_for(workers, timeout_s)
    assert statuses == [0] * len(workers), "\n".join(
        log.read_text()[-4000:] for log in sorted((folder / "logs").glob("*.log"))
    )


SAMPLING = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [5, 6, 7], "sampling_params": SAMPLING}),
        ("/begin_weight_update", {}),
        ("/update_weights_from_disk", {"model_path": "elsewhere"}),
        ("/init_weights_update_group", {}),
        ("/update_weights_from_distributed", {}),
        ("/update_weights_from_tensor", {}),
        ("/pause_generation", {"mode": "abort"}),
        ("/release_memory_occupation", {}),
        ("/abort_request", {"abort_all": True}),
        ("/model_info", None),
    ],
)
def test_nothing_is_answered_without_the_key(two_engines, path, body):
    for url in two_engines.launcher.urls:
        assert call(url, path, body, key=None)[0] == 401
        assert call(url, path, body, key=API_KEY + "x")[0] == 401


def test_engines_answer_token_ids_with_the_key_and_pack_log_probs_if_asked(two_engines):
    greedy = {**SAMPLING, "temperature": 0.0}
    packed = {**greedy, "custom_params": {PACKED_LOGPROBS: True}}
    for url in two_engines.launcher.urls:
        body = {"input_ids": [5, 6, 7], "sampling_params": greedy, "return_logprob": True}
        status, answer = call(url, "/generate", body)
        assert status == 200
        logprobs, ids, _ = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
        assert list(ids) == answer["output_ids"]
        assert len(ids) == 8
        again = call(url, "/generate", {**body, "sampling_params": packed})[1]
        found = base64.b64decode(again["meta_info"]["output_token_logprobs"])
        assert np.frombuffer(found[:32], np.int32).tolist() == again["output_ids"] == answer["output_ids"]
        assert np.frombuffer(found[32:], np.float32) == pytest.approx(logprobs, abs=1e-5)


def test_a_stop_token_ends_a_response_although_no_tokenizer_is_loaded(two_engines):
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 64, "stop_token_ids": list(range(2, 200))}}
    answer = call(two_engines.launcher.urls[0], "/generate", body)[1]
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(answer["output_ids"]) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_that_pad_the_vocabulary_are_not_drawn(two_engines, temperature):
    """Its ten last of 200 have no token. The run's agreement with the trainer, which counts them, is tested below."""
    sampling = {"temperature": temperature, "max_new_tokens": 32, "ignore_eos": True}
    body = {"input_ids": [[first, 6] for first in range(5, 25)], "sampling_params": sampling}
    answers = call(two_engines.launcher.urls[0], "/generate", body)[1]
    drawn = {token for answer in answers for token in answer["output_ids"]}
    assert len(drawn) > 20
    assert max(drawn) < NUM_TOKENS


def listening(process):
    """What the process listens on, as address:port."""
    sockets = process.net_connections(kind="inet")
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in sockets if c.status == psutil.CONN_LISTEN]


def test_engines_listen_on_the_given_interface_and_log_no_key(two_engines):
    launcher = two_engines.launcher
    for url in launcher.urls:
        main = psutil.Process(launcher.pid(url))
        assert [f"http://{address}" for address in listening(main)] == [url]
        elsewhere = [address for process in main.children(recursive=True) for address in listening(process)]
        assert all(address.startswith("127.0.0.1:") for address in elsewhere), elsewhere
    for log in (launcher.folder / "engines").glob("*.log"):
        assert API_KEY not in log.read_text()
        assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_router_asks_for_the_key_and_reaches_every_engine(two_engines, tmp_path):
    python = sglang_python()
    if subprocess.run([python, "-c", "import sglang_router"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"sglang-router is not installed in the environment of {python}")
    urls = two_engines.launcher.urls
    first = int(urls[0].rsplit(":", 1)[1])
    node = Node(python, two_engines.model, len(urls), 1, "127.0.0.1", first, "fp32", gpus=())
    port = free_ports(2)
    router_url = f"http://127.0.0.1:{port}"
    router = ProcessGroup(router_command(node, port), router_environment(os.environ, API_KEY), tmp_path / "router.log")
    body = {"input_ids": [5, 6, 7], "sampling_params": SAMPLING}

    def answers():
        with suppress(OSError):
            return call(router_url, "/generate", body)[0] == 200

    def workers():
        return {worker["url"] for worker in call(router_url, "/workers")[1]["workers"]}

    try:
        two_engines.launcher.wait_until(answers)
        two_engines.launcher.wait_until(lambda: workers() == set(urls))
        assert API_KEY not in " ".join(psutil.Process(router.pid).cmdline())
        assert call(router_url, "/generate", body, key=None)[0] == 401
        assert call(router_url, "/workers", {"url": "http://127.0.0.1:9"}, key=None)[0] == 401
        assert workers() == set(urls)
    finally:
        router.end(time.monotonic())


def test_engines_agree_with_a_trainer_of_two_by_two_processes(tmp_path, two_engines):
    values = fleet_values(tmp_path, two_engines, num_steps=2, parallel={"tensor": 2, "pipeline": 2, "sequence": True})
    values["rollout"]["fleet"] |= {"urls": [], "rendezvous": two_engines.rendezvous}
    values["data"]["evaluation"] = values["data"]["train"] | {"max_rows": 6}
    values["evaluation"] = {"at_start": True, "at_end": True, "samples_per_prompt": 2}
    finish_run(start_run(tmp_path, values, 4), tmp_path)
    output_dir = tmp_path / "run"
    records = checked_records(output_dir, 2, num_evaluated=2 * 6 * 2)
    assert records[-1]["evaluation/failed"] == 0
    assert all(record["weight_sync/engines"] == 2 for record in records)
    for url in two_engines.launcher.urls:
        assert call(url, "/model_info")[1]["weight_version"].endswith(":2")


@pytest.fixture(scope="module")
def split_engine(tmp_path_factory):
    """An engine of two tensor-parallel processes that compute with copies of their weights, without prefix cache, as
    pause=in_place needs it, which samples by seeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "tests.integration.engine_models")
        options = ("--tensor-parallel", "2", "--", "--disable-radix-cache", "--enable-deterministic-inference")
        wide = 512
        folder = tmp_path_factory.mktemp("split")
        with one_engine(folder, *options, hidden_size=wide, intermediate_size=2 * wide) as engine:
            yield engine


@pytest.mark.parametrize(("transport", "bucket_mib"), [("distributed", 64), ("tensor", 0.5)])
def test_an_engine_and_what_it_derives_from_weights_are_new_after_an_update(
    tmp_path, split_engine, transport, bucket_mib
):
    values = fleet_values(
        tmp_path,
        split_engine,
        rollout={"max_response_tokens": 16, "fleet": {"min_engines": 1}},
        weight_sync={"transport": transport, "bucket_mib": bucket_mib},
    )
    with training_run_of(values) as training_run:
        run(training_run)
    assert call(split_engine.launcher.urls[0], "/model_info")[1]["weight_version"].endswith(":3")


def join_dead_trainer(url, port, num_processes, limit_s):
    """What the engine answers to a trainer that was killed right after this call went out."""
    body = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 1 + num_processes,
        "group_name": limited_group(f"trainer-that-died-{port}", limit_s),
        "backend": "gloo",
    }
    return call(url, "/init_weights_update_group", body)


def test_all_processes_of_an_engine_give_up_a_trainer_that_is_silent(split_engine):
    (url,) = split_engine.launcher.urls
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        status, answer = join_dead_trainer(url, stopped.getsockname()[1], 2, 2.0)
    assert status == 400
    assert "did not come within 2 s" in answer["message"]
    assert call(url, "/health")[0] == 200


def test_a_trainer_gets_engines_back_that_one_left_while_they_joined_it(tmp_path, two_engines):
    with socket.create_server(("127.0.0.1", 0)) as stopped, ThreadPoolExecutor(2) as executor:
        ports = [stopped.getsockname()[1], free_port()]  # One accepts and never answers, at the other nobody listens.
        joins = [
            executor.submit(join_dead_trainer, *to, 1, 5.0) for to in zip(two_engines.launcher.urls, ports, strict=True)
        ]
        time.sleep(1)
        with training_run_of(fleet_values(tmp_path, two_engines, num_steps=1)) as training_run:
            (record,) = run(training_run)
        assert [join.result()[0] for join in joins] == [400, 400]
    assert record["weight_sync/engines"] == 2


@pytest.mark.parametrize("pause", ["abort", pytest.param("retract", marks=pytest.mark.whole_table), "in_place"])
def test_responses_that_meet_an_update_carry_two_versions_and_lose_nothing(tmp_path, request, pause):
    engines = request.getfixturevalue("split_engine" if pause == "in_place" else "two_engines")
    num_engines = len(engines.launcher.urls)
    values = fleet_values(
        tmp_path,
        engines,
        num_steps=2,
        rollout={
            "schedule": "partial" if pause == "retract" else "asynchronous",
            "max_response_tokens": 64,
            "mismatch_stop": None if pause == "in_place" else 0.5,
            # The rest waits for a place, so that an update of `responses_over_an_update` meets engines at work.
            "fleet": {"min_engines": num_engines, "requests_per_engine": 16 // num_engines},
        },
        batch={"tokens_per_microbatch": 1024, "generation_groups": 12},
        weight_sync={"in_flight": "continue", "pause": pause},
    )
    keeps_old_keys = pause == "in_place"
    if pause == "abort":  # Groups start and are scored while the evaluation waits for its own answers.
        values["data"]["evaluation"] = values["data"]["train"] | {"max_rows": 4}
        values["evaluation"] = {"every": 1, "samples_per_prompt": 2}
    with training_run_of(values) as training_run:
        num_evaluated = 2 * 4 * 2 if pause == "abort" else 0
        records = run(training_run, num_evaluated=num_evaluated, max_deviation=math.inf if keeps_old_keys else 1e-4)
        continued = responses_over_an_update(training_run)
    assert total(records, "evaluation/failed") == 0
    assert sum("evaluation/reward_mean" in record for record in records) == (2 if pause == "abort" else 0)
    assert continued
    deviations = [deviation_after_update(engines.launcher.urls[0], *sample) for sample in continued]
    # The new weights go on from keys and values of the old ones, or from their own.
    assert max(deviations) > 1e-2 if keeps_old_keys else max(deviations) < 1e-4, sorted(deviations)


GAME = """
class Game:
    def reset(self, task, seed):
        self.wanted = seed % 2

    def step(self, action):
        is_right = sum(action["token_ids"]) % 2 == self.wanted
        return {"reward": float(is_right), "correct": is_right, "text": "12", "done": action["turn"] == 2}
"""


def test_all_turns_agree_with_the_trainer_behind_prefixes_that_engines_keep(tmp_path, two_engines, monkeypatch):
    (code := tmp_path / "game.py").write_text(GAME)
    environment = {"kind": "function", "path": f"{code}:Game", "max_turn_tokens": 8}
    values = fleet_values(tmp_path, two_engines, environment=environment)
    values["algorithm"]["dynamic_sampling_on"] = "unequal_scores"
    values["reward"] = {"components": [{"kind": "environment"}]}
    generate, kept = EngineClient.generate, {}

    async def noted(client, payload, *limits):
        answer = await generate(client, payload, *limits)
        kept[np.array(payload["input_ids"], np.int32).tobytes()] = answer["meta_info"]["cached_tokens"]
        return answer

    monkeypatch.setattr(EngineClient, "generate", noted)
    with training_run_of(values) as training_run:
        records = train_to_the_end(training_run)
    assert max(record.get("rollout/logprob_abs_diff_max", 0) for record in records) < 1e-4
    assert {record["rollout/turns_mean"] for record in records if "rollout/turns_mean" in record} == {3}
    assert all(f"rollout/logprob_abs_diff_mean_turn_{number}" in records[0] for number in (1, 2, 3))
    is_kept = []
    for row in pq.read_table(tmp_path / "run" / "samples").to_pylist():
        trajectory = trajectory_of(row)
        for before, turn in pairwise(trajectory.turns):
            sampled = sampled_rows(trajectory.sampled, before.stop, turn.stop)
            prompt = np.array([*row["prompt_ids"], *trajectory.token_ids[: sampled.start]], np.int32)
            # All but the last token that was sampled, whose keys and values nobody needed.
            is_kept.append(kept[prompt.tobytes()] >= len(row["prompt_ids"]) + before.stop - 1)
    assert np.mean(is_kept) > 0.9


@contextmanager
def announcements(engines):
    """A function that says which instances of the engines their launcher announces: {URL: instance}."""
    registry = EngineRegistry(engines.rendezvous, API_KEY)

    def announced():
        return {registration.url: registration.instance for registration in registry.poll()}

    try:
        wait_until(lambda: set(announced()) == set(engines.launcher.urls))
        yield announced
    finally:
        registry.close()


def test_a_killed_engines_work_moves_and_the_run_waits_for_it(tmp_path, two_engines, caplog):
    engine = two_engines.launcher.urls[1]
    served = len(two_engines.launcher.instances(engine))
    values = fleet_values(tmp_path, two_engines, rollout=AT_WORK)
    fleet = values["rollout"]["fleet"]
    with announcements(two_engines) as announced, training_run_of(values) as training_run:
        before = announced()

        def act():
            stop_at_work(training_run, two_engines, 1)
            signal_engine(two_engines, 1, signal.SIGKILL)
            # Its connections break: nothing waits for hung_after_s.
            wait_until(lambda: num_serving(training_run) == 1, fleet["hung_after_s"] / 2)
            two_engines.launcher.wait_until(lambda: len(two_engines.launcher.instances(engine)) == served + 1)
            wait_until(lambda: num_serving(training_run) == 2, values["weight_sync"]["timeout_s"])

        with saboteur(act), caplog.at_level(logging.WARNING, logger="dapo_mega"):
            records = run(training_run)
        instance = two_engines.launcher.instances(engine)[served]
        wait_until(lambda: announced().get(engine) == instance)
        assert announced() == {**before, engine: instance} != before
    assert total(records, "rollout/requests_moved") + total(records, "rollout/failed_calls") > 0
    assert total(records, "fleet/engines_dead") >= 1
    assert "the run is paused: 1 of 2 required engines" in caplog.text
    assert records[-1]["weight_sync/engines"] == 2


def test_a_hung_engines_work_moves_within_its_time_and_it_comes_back(tmp_path, two_engines):
    rollout = {**AT_WORK, "fleet": {"min_engines": 1, "hung_after_s": 10}}
    values = fleet_values(tmp_path, two_engines, num_steps=4, rollout=rollout)
    with training_run_of(values) as training_run:

        def act():
            stop_at_work(training_run, two_engines, 0)
            stopped = time.monotonic()
            try:
                wait_until(lambda: num_serving(training_run) == 1)
                assert time.monotonic() - stopped < 3 * values["rollout"]["fleet"]["hung_after_s"]
            finally:
                signal_engine(two_engines, 0, signal.SIGCONT)

        wait_for_both_engines(training_run)
        with saboteur(act):
            records = run(training_run)
        wait_until(lambda: training_run.fleet.has_outdated() or num_serving(training_run) == 2)
        training_run.weight_sync.push(training_run.step)
        assert num_serving(training_run) == 2
    assert total(records, "fleet/engines_hung") == 1
    assert total(records, "rollout/requests_moved") > 0


def run_losing_an_engine(training_run, engines, index, fault):
    """Train to the end, with the fault at this engine in the middle of the update after step 2."""
    weights = training_run.trainer.policy.weights

    def interrupted(*arguments):
        for number, bucket in enumerate(weights(*arguments)):
            if training_run.step == 2 and number == 3:
                signal_engine(engines, index, fault)
            yield bucket

    training_run.trainer.policy.weights = interrupted
    wait_for_both_engines(training_run)
    try:
        records = run(training_run)
    finally:
        training_run.trainer.policy.weights = weights
    assert [record["weight_sync/engines"] for record in records[:2]] == [2, 1]
    assert records[1]["time/weight_sync_s"] < 60
    assert call(engines.launcher.urls[1 - index], "/model_info")[1]["weight_version"].endswith(":3")


LOSING = {"rollout": {**AT_WORK, "fleet": {"min_engines": 1}}, "weight_sync": {"timeout_s": 8}}


def test_an_engine_that_hangs_in_an_update_gets_it_later(tmp_path, two_engines):
    with training_run_of(fleet_values(tmp_path, two_engines, **LOSING)) as training_run:
        try:
            run_losing_an_engine(training_run, two_engines, 1, signal.SIGSTOP)
        finally:
            signal_engine(two_engines, 1, signal.SIGCONT)
        wait_until(lambda: training_run.fleet.has_outdated())
        training_run.weight_sync.push_to_outdated(training_run.step)
        assert num_serving(training_run) == 2
    assert call(two_engines.launcher.urls[1], "/model_info")[1]["weight_version"].endswith(":3")


def restarted_values(folder, engines, num_steps):
    """A run that can go on after each step. No time limit of an engine ends before a restart must have succeeded."""
    return fleet_values(
        folder,
        engines,
        num_steps=num_steps,
        rollout={**AT_WORK, "schedule": "asynchronous", "fleet": {"hung_after_s": 2 * RESTART_LIMIT_S}},
        weight_sync={"in_flight": "continue", "timeout_s": 2 * RESTART_LIMIT_S},
        checkpoint={"every": 1, "asynchronous": False},
    )


def check_evaluations_beside(output_dir, num_steps):
    """What came of the evaluation of every step is recorded once, at its step, and its responses are of its weights; at
    most one was lost by a kill."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    evaluated = {}
    for record in lines:
        if any(name.startswith("evaluation/") for name in record):
            assert record["step"] not in evaluated
            evaluated[record["step"]] = record
    assert sorted(evaluated) == list(range(num_steps + 1))
    assert sum("evaluation/lost" in record for record in evaluated.values()) <= 1
    for step, record in evaluated.items():
        if "evaluation/lost" in record:
            continue
        assert (record["evaluation/failed"], record["evaluation/unfinished"]) == (0, 0)
        rows = pq.read_table(output_dir / "samples" / f"evaluation_{step:08d}.parquet").to_pylist()
        assert len(rows) == 4 * 2
        assert {span["version"] for row in rows for span in row["version_spans"]} == {step}
        assert len({span["engine"] for row in rows for span in row["engine_spans"]}) == record["evaluation/engines"]


def test_engines_wait_for_a_trainer_killed_in_a_weight_update(tmp_path, two_engines):
    """Of two processes one is killed. The other one names no fault of its own, and torchrun starts both again, which
    have each group and each evaluation beside training once."""
    values = restarted_values(tmp_path, two_engines, 3)
    values["data"]["evaluation"] = values["data"]["train"] | {"max_rows": 4}
    beside = {"every": 1, "at_start": True, "samples_per_prompt": 2, "beside_training": True, "limit_s": 120}
    values["evaluation"] = beside
    values["rollout"]["fleet"]["min_engines"] = 1
    log = run_that_starts_again(DYING_TRAINER, "--config", write_config(tmp_path, values), limit_s=RESTART_LIMIT_S)
    assert log.count("exitcode: -9") == 1, log
    assert "Traceback" not in log, log
    check_restarted_run(tmp_path / "run", 3)
    check_evaluations_beside(tmp_path / "run", 3)


def test_a_controller_lives_on_when_its_trainer_is_killed_in_a_weight_update(tmp_path, two_engines):
    """The next trainer learns what was not saved again, and no request is asked twice."""
    values = fleet_values(
        tmp_path,
        two_engines,
        num_steps=4,
        rollout={"schedule": "partial", "max_response_tokens": 64},
        data={"max_prompt_tokens": 32},
        controller={"own_process": True},
        checkpoint={"every": 2, "asynchronous": False},
        weight_sync={"timeout_s": 20},
    )
    log = run_that_starts_again(DYING_TRAINER, "--config", write_config(tmp_path, values), limit_s=RESTART_LIMIT_S)
    assert log.count("exitcode: -9") == 1, log
    assert log.count("waits for another trainer") == 1, log
    assert "Traceback" not in log, log
    output = tmp_path / "run"
    checked_records(output, 4)
    # The third step began with weights that the second trainer has learnt again, from the first step on.
    shutil.rmtree(output / "checkpoints")
    try:
        found = replay(output, 3, tolerance=1e-3)
    finally:
        stop_processes()
    assert len(found.all) > 10
    assert [difference for difference in found.all if difference.excess > 1] == []


@pytest.mark.parametrize("way", ["disk", "tensor", "sglangs_own"])
def test_weights_travel_by_other_ways_too(tmp_path, two_engines, monkeypatch, way):
    if way == "sglangs_own":  # What an engine without the plugin is sent.
        monkeypatch.setattr("dapo_mega.engines.sglang.engine_client.PROTOCOL", "unknown")
    values = fleet_values(
        tmp_path,
        two_engines,
        num_steps=2,
        rollout={"placement": "colocated" if way == "tensor" else "fleet"},
        weight_sync={"transport": "distributed" if way == "sglangs_own" else way},
    )
    with training_run_of(values) as training_run:
        records = run(training_run)
        infos = [member.info for member in training_run.fleet._membership.members.values()]
    assert all(record["weight_sync/engines"] == 2 for record in records)
    assert {info.has_plugin for info in infos} == {way != "sglangs_own"}


def test_a_trainer_lends_its_memory_to_colocated_engines_that_generate(tmp_path, two_engines):
    """A checkpoint holds what the trainer held, and a run goes on from one that was written before its step was
    recorded."""
    rollout = {"placement": "colocated", "offload_trainer": True}
    values = fleet_values(tmp_path, two_engines, num_steps=2, rollout=rollout, checkpoint={"every": 1})
    lent = []
    with training_run_of(values) as training_run:
        trainer, generate = training_run.trainer, training_run.fleet.generate

        def noted(request):
            lent.append(trainer._lent.num_bytes)
            return generate(request)

        training_run.collector._engine.generate = noted
        records = run(training_run)
        assert trainer.is_lent
        loop.take_turn(training_run)
        assert not trainer.is_lent
        trainer.finish_saving()
        weights = {name: t.clone() for bucket in trainer.policy.weights(1 << 20) for name, t in bucket}
    assert len(lent) >= 32
    assert set(lent) == {0}
    assert all(record.get("rollout/logprob_abs_diff_mean", 0) < 1e-3 for record in records)
    values["rollout"]["offload_trainer"] = False
    with training_run_of(values) as again:
        loop.restore(again, again.trainer.load(again.trainer.store.latest()))
        found = {name: t for bucket in again.trainer.policy.weights(1 << 20) for name, t in bucket}
        assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())
        assert again.unrecorded
        loop.begin(again)
        assert again.trainer._lent is None
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_engines_that_got_only_changes_hold_the_whole_new_weights(tmp_path, two_engines):
    with serving_engines(two_engines.model, tmp_path / "served", 1, "--dtype", "bf16") as launcher:
        values = fleet_values(
            tmp_path,
            two_engines,
            num_steps=4,
            rollout={"dtype": "bf16", "fleet": {"urls": launcher.urls, "min_engines": 1}},
            optimizer={"learning_rate": 1e-5},
        )
        with training_run_of({**values, "checkpoint": {"every": 1, "asynchronous": False}, "num_steps": 1}) as first:
            full = train_to_the_end(first)[0]["weight_sync/bytes"]
        values["weight_sync"]["full_every"] = 10
        with training_run_of(values) as training_run:
            loop.restore(training_run, training_run.trainer.load(training_run.trainer.store.latest()))
            records = train_to_the_end(training_run)[1:]
            changed = weights_checksum(launcher.urls[0])
            training_run.trainer.sender._encodings._full_every = 1
            training_run.weight_sync._transport._plans.clear()
            everything = training_run.weight_sync.push(training_run.step)
        assert changed == weights_checksum(launcher.urls[0])
    sizes = [record["weight_sync/bytes"] for record in records]
    assert all(0 < size < 0.5 * everything["weight_sync/bytes"] / 2 for size in sizes), sizes  # bf16 against fp32.
    assert len(sizes) == 3
    assert full > 2 * max(sizes)


def weights_checksum(url):
    status, answer = call(url, "/weights_checker", {"action": "checksum"})
    assert status == 200
    return answer["ranks"][0]["checksums"]


# The engines serve two layers with rope_theta 10000 and a head of their own.
OTHER_MODELS = {
    "layer": ({"num_hidden_layers": 3}, "num_layers is 2 instead of 3"),
    "rotation": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta is 10000 instead of 1e"),
    "head": ({"tie_word_embeddings": True}, "tied_embeddings is False instead of True"),
    "layer, not described": ({"num_hidden_layers": 3}, r"it has no place for model\.layers\.2\."),
    "head, not described": (
        {"tie_word_embeddings": True},
        r"it has lm_head\.weight \[\d+, \d+\], for which no weights",
    ),
    "rotation, not described": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        r"nats from the trainer's on average, which is not within rollout\.engine_tolerance=0\.001",
    ),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
def test_engines_of_another_model_are_refused_by_name_and_difference(tmp_path, two_engines, monkeypatch, other):
    changes, difference = OTHER_MODELS[other]
    if "not described" in other:  # What is sent must show it then, or what the engine computes.
        monkeypatch.setattr("dapo_mega.engines.sglang.engine_client.described_model", lambda states: None)
    values = fleet_values(tmp_path, two_engines)
    values["model"]["path"] = str(tiny_model(tmp_path / "model", **changes))
    with training_run_of(values) as training_run, pytest.raises(FleetError, match="no engine fits the run") as caught:
        training_run.weight_sync.push(0)
    for url in two_engines.launcher.urls:
        assert re.search(f"{url}: [^;]*{difference}", str(caught.value))


def test_a_run_ends_when_another_keeps_updating_its_engine(tmp_path, two_engines):
    urls = two_engines.launcher.urls
    # Trained at a temperature, at which engines do not score prompts.
    values = fleet_values(
        tmp_path, two_engines, num_steps=100, rollout={"temperature": 0.8, "fleet": {"min_engines": 1}}
    )
    with training_run_of(values) as training_run:
        member = training_run.fleet._membership.members[urls[1]]

        def act():
            wait_until(lambda: training_run.step >= 1)
            for count in (1, 2):
                # An update of the run's own may follow before anything has been sampled.
                while member.num_foreign < count:
                    body = {"new_version": f"other:{count}", "abort_all_requests": False}
                    assert call(urls[1], "/update_weight_version", body)[0] == 200
                    time.sleep(0.5)

        message = f"another trainer uses this engine: {urls[1]} .* run other after step [12]"
        with saboteur(act), pytest.raises(FleetError, match=message):
            train_to_the_end(training_run)
        sampled_by = [url for _, response in training_run.collector.recent for url, _ in response.engine_spans]
    assert set(sampled_by) <= set(urls)
    assert len(sampled_by) >= len(training_run.collector.recent) > 0


def test_a_run_without_a_key_or_of_another_dtype_than_its_engines_says_what_to_do(tmp_path, two_engines, monkeypatch):
    config = write_config(tmp_path, fleet_values(tmp_path, two_engines, rollout={"dtype": "bf16"}))
    status, said = run_script(TRAIN, ["--config", config])
    assert status == 4
    assert "computes in float32 but the run expects bfloat16" in said
    monkeypatch.delenv("DAPO_MEGA_API_KEY")
    status, said = run_script(TRAIN, ["--config", config])
    assert status == 2
    assert "DAPO_MEGA_API_KEY is not set" in said


def test_prefixes_cached_before_an_update_are_computed_anew(tmp_path, two_engines):
    """Every step asks the same few prompts, whose keys and values the engines keep between requests."""
    values = fleet_values(tmp_path, two_engines, num_steps=4, optimizer={"learning_rate": 1e-2})
    values["data"]["train"]["max_rows"] = 6
    with training_run_of(values) as training_run:
        run(training_run)


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """`evaluate(engines, model, output, *options)` asks six problems; returns the result and the responses."""
    rows = [{"question": f"{i} + 1 =", "answer": f"#### {i + 1}"} for i in range(6)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("dapo_mega.commands.evaluate.leave_at_sigterm", lambda message: None)

    def run_command(engines, model, output, *options):
        arguments = ["--benchmarks", f"gsm8k={tmp_path / 'gsm8k.jsonl'}", "--k", "4", "--max-tokens", "16"]
        arguments += ["--template", "bare", *options]
        arguments += ["--urls", ",".join(engines.launcher.urls), "--output", str(tmp_path / output)]
        monkeypatch.setattr(sys, "argv", ["dapo-mega evaluate", str(model), *arguments])
        evaluate_command.main()
        result = json.loads((tmp_path / output / "results.json").read_text())["benchmarks"]["gsm8k"]
        table = pq.read_table(tmp_path / output / "gsm8k" / "samples" / "evaluation_00000000.parquet")
        assert (result["num_responses"], result["num_failed"]) == (24, 0)
        return result, table

    return run_command


def test_the_benchmark_of_weight_updates_prints_its_table(two_engines, tmp_path):
    given = ("--model", two_engines.model, "--url", two_engines.launcher.urls[0])
    assert printed_by_fork("weight_sync", tmp_path, *given) == FORMS["weight_sync"]


def serve_weights_of_model(engines):
    for url in engines.launcher.urls:
        assert call(url, "/update_weights_from_disk", {"model_path": str(engines.model)})[0] == 200


def test_an_evaluation_uses_engines_that_serve_its_model_and_no_others(tmp_path, two_engines, evaluate):
    serve_weights_of_model(two_engines)
    result, table = evaluate(two_engines, two_engines.model, "right", "--batch-rows", "4")
    assert re.fullmatch(r"SGLang [\d.]+", result["engines"][0])
    assert sorted(set(table["prompt_index"].to_pylist())) == list(range(6))
    asked = {span["engine"] for spans in table["engine_spans"].to_pylist() for span in spans}
    assert asked == set(two_engines.launcher.urls)
    # The same sizes, other weights.
    other = tiny_model(tmp_path / "other", initializer_range=0.5)
    with pytest.raises(FleetError, match=r"no engine fits the run: .*it serves another model than the one"):
        evaluate(two_engines, other, "wrong")
    assert not list((tmp_path / "wrong").rglob("*.parquet"))


def test_evaluations_on_engines_that_sample_by_seeds_come_out_the_same(split_engine, evaluate):
    serve_weights_of_model(split_engine)
    choices = {"whole": ["--batch-rows", "24"], "parts": ["--batch-rows", "4"], "other": ["--seed", "1"]}
    tokens = {}
    for output, options in choices.items():
        result, table = evaluate(split_engine, split_engine.model, output, *options)
        assert result["engines"][0].endswith(", deterministic")
        tokens[output] = table.select(["prompt_index", "sample", "token_ids", "engine_logprobs"]).to_pylist()
    assert tokens["whole"] == tokens["parts"]
    assert len({tuple(row["token_ids"]) for row in tokens["whole"] + tokens["other"]}) == 2 * 24


@pytest.mark.parametrize(
    ("kind", "victims"),
    [
        ("function", ["worker", "engine"]),
        pytest.param("program", ["program"] * 3, marks=pytest.mark.whole_table),  # test_resume.py kills programs, too.
    ],
)
def test_killed_at_random_moments_a_run_in_turns_loses_and_changes_nothing(tmp_path, two_engines, kind, victims):
    """The trainer is killed too. `python -m tests.integration.soak` does it for longer."""
    soak = Soak(tmp_path, two_engines, kind, random.Random(kind))
    soak.run(victims)
    assert soak.killed == Counter([*victims, "trainer"])


def test_an_engine_killed_in_an_update_leaves_the_others_all_weights(tmp_path, two_engines):
    """The last test of these engines: nobody waits for the one that the launcher starts again."""
    with training_run_of(fleet_values(tmp_path, two_engines, **LOSING)) as training_run:
        run_losing_an_engine(training_run, two_engines, 0, signal.SIGKILL)
