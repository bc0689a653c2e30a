"""Who is in the fleet: engines join with current weights only, leave at once, come back, and the run waits for them.

The engines are scripted servers; tests/integration has real ones.
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp import web

from dapo_mega.engines.sglang import fleet_client as fleet_driver
from dapo_mega.engines.sglang import membership
from dapo_mega.engines.sglang.event_loop import LoopThread
from dapo_mega.engines.sglang.fleet_client import SyncTarget
from dapo_mega.engines.sglang.health import HealthMonitor
from dapo_mega.engines.sglang.registry import Registration, announce
from dapo_mega.engines.sglang.weight_protocol import MODEL_FIELD, PROTOCOL, PROTOCOL_FIELD
from dapo_mega.errors import FleetError, StopRequested
from dapo_mega.models.families import find_family
from dapo_mega.types import Response
from tests.distributed.launching import free_port
from tests.unit.engines.sglang.client_of_scripted import answers, give_weights, requests, wait_until
from tests.unit.engines.sglang.scripted_server import (
    DEADLINE_S,
    KEY,
    QWEN2,
    SLOW,
    assert_exact,
    hurry,
    serve,
)


def num_serving(driver):
    return driver.pop_metrics()["fleet/engines_serving"]


def test_nothing_is_asked_of_an_engine_before_it_has_the_weights(servers, drive):
    group = servers(2)
    driver = drive(group.urls, min_engines=2)
    assert {target.url for target in driver.targets(only_outdated=True)} == set(group.urls)
    driver.submit(requests(20))
    assert driver.next_answer(0.5) is None
    assert not any(engine.payloads for engine in group.engines)
    give_weights(driver)
    assert {answer.request_id for answer in answers(driver, 20)} == set(range(20))
    assert driver.targets(only_outdated=True) == []


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"dtype": "bfloat16"}, {}, "computes in bfloat16 but the run expects float32; start it with --dtype fp32"),
        ({"max_req_input_len": 40}, {}, "context of 46 tokens is shorter than .* = 80; start it with --context-length"),
        ({"vocab_size": 999}, {}, "vocabulary of 999 .* 1000"),
        ({}, {"rollout": {"dtype": "fp8"}}, "not quantized to fp8"),
        ({}, {"rollout": {"routing_replay": True}}, "start it with -- --enable-return-routed-experts"),
        ({}, {"rollout": {"stop": ["</search>"]}}, "start it with --with-text"),
        ({}, {"lora": {"send": "adapters"}}, "rank 0 at most .* lora.rank=32; start it with --lora-rank 32"),
        ({"enable_lora": True, "max_lora_rank": 32}, {"lora": {"send": "adapters"}}, "needs this version of dapo_mega"),
        ({}, {"weight_sync": {"in_flight": "continue", "pause": "in_place"}}, "--disable-radix-cache"),
    ],
)
def test_engines_that_do_not_fit_the_run_are_refused_with_the_reason(servers, drive, settings, changes, message):
    group = servers(1)
    group.engines[0].settings = settings
    driver = drive(group.urls, **changes)
    with pytest.raises(FleetError, match=message):
        driver.targets(only_outdated=False)


def test_a_task_that_ends_with_an_unexpected_exception_ends_the_run_at_once(servers, drive, monkeypatch):
    async def judge(monitor, watch, error, seconds):
        raise KeyError("judge")

    monkeypatch.setattr(HealthMonitor, "_judge", judge)
    with pytest.raises(FleetError, match=r"probing http.* unexpected exception, so the run ends: KeyError"):
        drive(servers(1).urls).targets(only_outdated=False)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"num_hidden_layers": 3}, "num_layers is 3 instead of 2"),
        ({"rope_theta": 1e6}, "rope_theta is 1e\\+06 instead of 10000"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 500000 instead of 10000"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is LinearScaling.* instead of None"),
        ({"tie_word_embeddings": True}, "tied_embeddings is True instead of False"),
        ({"rms_norm_eps": 1e-5}, "norm_epsilon is 1e-05 instead of 1e-06"),
        ({"num_key_value_heads": 4}, "num_query_groups is 4 instead of 2"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "use_sliding_window=True"),
        ({"model_type": "qwen3", "head_dim": 16}, "qkv_bias is False instead of True, qk_norm is True"),
        ({"num_hidden_layers": "3\x1b" * 10**5}, "num_layers is 3 3 .*[.]{3}"),
        ({"max_position_embeddings": 512}, None),
        ({"model_type": "unheard of"}, None),
        ({"model_type": ["qwen2"]}, None),
        ({"hidden_size": None}, None),
    ],
)
def test_an_engine_with_another_model_than_the_policys_is_refused(servers, drive, changes, difference):
    group = servers(1)
    described = {**QWEN2, **changes}
    group.engines[0].settings = {"internal_states": [{MODEL_FIELD: json.dumps(described)}]}
    driver = drive(group.urls, arch=find_family("qwen2").read(QWEN2))
    if difference is None:
        assert give_weights(driver)
        return
    with pytest.raises(FleetError, match=f"{group.urls[0]}: its model is not the policy's: .*{difference}") as caught:
        driver.targets(only_outdated=False)
    assert len(str(caught.value)) < 3000


def test_an_engine_that_computes_otherwise_twice_is_refused(servers, drive):
    group = servers(2)
    driver = drive(group.urls, min_engines=1)
    for engine in group.engines:
        engine.version = "1"
    for number_of_tries in (1, 2):
        wait_until(lambda: len(driver.targets(only_outdated=False)) == 2)
        targets = driver.pause_generation(driver.targets(only_outdated=False))
        assert len(targets) == 2
        driver.resume_generation(targets)
        driver.synced(group.urls[0], 1)
        driver.disagrees(group.urls[1], "scripted")
        assert (driver._members[group.urls[1]].state == "refused") == (number_of_tries == 2)
    driver.submit(requests(4))
    assert len(answers(driver, 4)) == 4
    assert not group.engines[1].payloads


def test_an_engine_back_while_being_compared_gets_the_weights_again(servers, drive):
    group = servers(1)
    driver = drive(group.urls)
    targets = driver.pause_generation(driver.targets(only_outdated=False))
    driver.resume_generation(targets)
    driver.failed(group.urls[0], "scripted")
    wait_until(driver.has_outdated)
    driver.synced(group.urls[0], 1)
    driver.disagrees(group.urls[0], "scripted")
    assert driver.has_outdated()


def test_an_engine_that_does_not_know_the_key_is_refused_at_once(servers, drive):
    group = servers(1)
    group.engines[0].api_key = "another"
    with pytest.raises(FleetError, match="rejects the API key in DAPO_MEGA_API_KEY"):
        drive(group.urls).targets(only_outdated=False)


PAGE = "<!DOCTYPE html>\n<html><body>It works!</body></html>\n"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/health": ""}, r"HTTP 404: /server_info: a page"),
        ({}, r"HTTP 404: /health: a page"),
        (dict.fromkeys(("/health", "/server_info", "/model_info"), PAGE), r"the answer to /server_info is not JSON: a"),
        (dict.fromkeys(("/health", "/server_info", "/model_info"), "{}"), r"are not SGLang's: KeyError"),
        ({"/health": "", "/server_info": web.HTTPFound("/login")}, r"HTTP 302: /server_info: redirects to /login"),
        ({"/health": web.HTTPForbidden(text=PAGE)}, r"HTTP 403: /health: a page"),
    ],
)
def test_a_web_server_is_refused_at_once_in_one_line(drive, caplog, answers, message):
    async def handler(request):
        answer = answers.get(request.path, web.Response(status=404, text=PAGE))
        if isinstance(answer, web.HTTPException):
            return web.Response(status=answer.status, headers=answer.headers, text=PAGE)
        return answer if isinstance(answer, web.Response) else web.Response(text=answer)

    thread = LoopThread("web-server")
    _, url = thread.run(serve(handler), 10)
    driver = drive([url], hung_after_s=600.0, wait_limit_s=600.0)
    with pytest.raises(
        FleetError, match=rf"no engine fits the run: {url}: .* no SGLang server \(.*{message}"
    ) as caught:
        driver.targets(only_outdated=False)
    thread.close()
    for text in (
        str(caught.value),
        *(record.getMessage() for record in caplog.records if record.name.startswith("dapo_mega")),
    ):
        assert text.isprintable()
        assert "<" not in text
        assert not text.startswith("WARNING")


def test_a_pause_is_told_again_and_again_with_the_states_of_now(servers, drive, caplog, monkeypatch):
    monkeypatch.setattr(fleet_driver, "_REMIND_EVERY_S", 0.4)
    group = servers(3)
    lost = group.urls[2]
    group.stop(2)
    driver = drive(group.urls, min_engines=3, hung_after_s=1.0, wait_limit_s=600.0)
    wait_until(lambda: driver.pop_metrics()["fleet/engines_away"] == 1)

    def told(*parts):
        def is_told():
            lines = [record.getMessage() for record in caplog.records if "run is paused" in record.getMessage()]
            return lines and all(part in lines[-1] for part in parts)

        return is_told

    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(driver.wait_for_engines)
        wait_until(told("paused: 2 of 3 required engines", f"missing: {lost} since ", "s): dead for "))
        group.engines[0].health = "silent"
        hung = (f"missing: {group.urls[0]} since", "1 of 3 required", "hung for ", "restart the hung engines")
        wait_until(told(*hung, f"{lost} since", "restart the dead engines"))
        group.engines[0].health = "ok"
        wait_until(told("paused: 2 of 3 required engines", f"missing: {lost} since "))
        assert "hung" not in [r.getMessage() for r in caplog.records if "run is paused" in r.getMessage()][-1]
        group.start_again(2)
        waiting.result(DEADLINE_S)
    assert driver.pop_metrics()["fleet/pauses"] == 1
    assert caplog.records[-1].getMessage() == "the run continues with 3 engines"


def test_a_pause_says_so_when_fewer_engines_are_named_than_needed(servers, drive, caplog):
    driver = drive(servers(1).urls, min_engines=2, wait_limit_s=0.5)
    wait_until(driver.has_outdated)
    with pytest.raises(FleetError, match=r"1 of 2 required engines .*no others are known"):
        driver.targets(only_outdated=False)
    assert (
        "missing: no others are known; what to do: start engines with launch/serve_rollouts.py and name them in "
        in (caplog.text)
    )


def test_launchers_are_told_of_engines_that_hang_longer_than_an_update(servers, drive):
    group = servers(1)
    address = f"127.0.0.1:{free_port()}"
    driver = drive([], weight_sync={"timeout_s": 0.5}, rendezvous=address, hung_after_s=1.0)
    engine = Registration(group.urls[0], "first")

    def hung():
        return announce(address, KEY, [engine]).hung

    assert hung() == set()
    give_weights(driver)
    assert hung() == set()
    group.engines[0].health = "silent"
    wait_until(lambda: hung() == {"first"})
    group.engines[0].health = "ok"
    wait_until(lambda: hung() == set())


def test_an_engine_with_other_weights_than_it_was_given_gets_them_again(servers, drive):
    group = servers(2)
    driver = drive(group.urls, min_engines=1)
    give_weights(driver, 4)
    group.engines[0].version = "3"
    driver.submit(requests(20))
    found = answers(driver, 20)
    assert {answer.weight_version for answer in found} == {4}
    wait_until(driver.has_outdated)
    assert driver.targets(only_outdated=True) == [SyncTarget(group.urls[0], 1, is_outdated=True)]


@pytest.mark.parametrize("reports_spans", [True, False])
def test_two_trainers_use_only_their_own_samples_and_one_ends(servers, drive, reports_spans):
    (engine,) = (group := servers(1)).engines
    sampled_by = {}
    answer_one = engine._answer

    async def note_who_samples(payload, **options):
        answer = await answer_one(payload, **options)
        sampled_by.setdefault(payload["rid"].split("-")[1], []).append(engine.version)
        if not reports_spans:
            del answer["meta_info"]["weight_versions"]
        return answer

    engine._answer = note_who_samples
    drivers = {run: drive(group.urls, run=run) for run in ("first@a-1", "second@b-2")}
    endings, accepted = {}, []
    for round_ in range(6):
        for number, (run, driver) in enumerate(drivers.items()):
            if run in endings:
                continue
            try:
                if round_ == 0 or driver.has_outdated() or number == 0:
                    give_weights(driver, 5, run)
                first = 1000 * number + 100 * round_
                driver.submit(requests(6, first=first))
                num_open, deadline = 6, time.monotonic() + DEADLINE_S
                while num_open:
                    assert time.monotonic() < deadline
                    driver.wait_for_engines()
                    if driver.has_outdated():
                        give_weights(driver, 5, run)
                    if answer := driver.next_answer(0.02):
                        accepted.append((run, answer))
                        num_open -= 1
            except FleetError as error:
                endings[run] = str(error)
    assert endings, "two trainers used one engine to the end"
    for run, ending in endings.items():
        (other,) = drivers.keys() - {run}
        assert f"another trainer uses this engine: {group.urls[0]}" in ending
        assert f"run {other} after step 5" in ending
    for run, answer in accepted:
        if isinstance(answer, Response):
            assert sampled_by[str(answer.request_id)][-1] == f"{run}:5"


@pytest.mark.parametrize("comes_late", [False, True])
def test_what_a_killed_trainer_left_in_an_engine_ends_no_run(servers, drive, comes_late):
    (engine,) = (group := servers(1)).engines
    engine.version = "mine@host-old:5"
    driver = drive(group.urls, run="mine@host-new")
    give_weights(driver, 5, "mine@host-new")
    if comes_late:
        engine.version = "mine@host-old:6"
    driver.submit(requests(4))
    if comes_late:
        wait_until(driver.has_outdated)
        give_weights(driver, 5, "mine@host-new")
    assert {answer.weight_version for answer in answers(driver, 4)} == {5}
    give_weights(driver, 6, "mine@host-new")
    driver.wait_for_engines()


def test_an_update_finds_an_engine_that_another_run_has_updated(servers, drive):
    (engine,) = (group := servers(1)).engines
    driver = drive(group.urls, run="mine")
    give_weights(driver, 0, "mine")
    engine.version = "other:0"
    assert driver.pause_generation(driver.targets(only_outdated=False)) == []
    driver.resume_generation([])
    give_weights(driver, 1, "mine")
    engine.version = "other:1"
    assert driver.pause_generation(driver.targets(only_outdated=False)) == []
    driver.resume_generation([])
    with pytest.raises(FleetError, match=f"another trainer uses this engine: {group.urls[0]} .* run other after step"):
        driver.targets(only_outdated=False)


def test_an_engine_lost_while_responses_finish_is_not_part_of_the_update(servers, drive):
    group = servers(2, SLOW)
    driver = drive(group.urls, min_engines=2, hung_after_s=1.0)
    give_weights(driver)
    driver.submit(requests(8, length=60))
    wait_until(lambda: all(engine.in_flight for engine in group.engines))
    targets = driver.targets(only_outdated=False)
    group.engines[0].health = "silent"
    hurry(group.engines[1:])
    assert driver.pause_generation(targets) == [SyncTarget(group.urls[1], 1)]
    driver.resume_generation(targets)


def test_an_engine_that_registers_anew_is_taken_up_once(servers, drive, caplog):
    group = servers(1)
    driver = drive(group.urls)
    give_weights(driver)
    asked = group.engines[0].calls["/continue_generation"]
    membership = driver._membership

    async def both_find_out():
        membership.leave(group.urls[0], "dead: scripted")
        await membership._changed(group.urls[0], "dead", "healthy", "it answers again")
        await membership._changed(group.urls[0], "dead", "healthy", "it answers again")

    driver._thread.run(both_find_out())
    wait_until(driver.has_outdated)
    give_weights(driver, 1)
    time.sleep(0.5)
    # One join and one release: an overtaken join does not touch an engine that serves.
    assert group.engines[0].calls["/continue_generation"] == asked + 2
    assert num_serving(driver) == 1


def test_a_dead_engines_work_moves_and_a_restarted_one_waits_for_weights(servers, drive):
    group = servers(2, SLOW)
    driver = drive(group.urls, min_engines=2)
    give_weights(driver)
    driver.submit(requests(12, length=60))
    wait_until(lambda: all(engine.in_flight for engine in group.engines))
    group.stop(1)
    hurry(group.engines)
    found = answers(driver, 12)
    assert sorted(answer.request_id for answer in found) == list(range(12))
    assert all(isinstance(answer, Response) for answer in found)
    asked = len(group.engines[1].payloads)
    group.start_again(1)
    wait_until(driver.has_outdated)
    driver.submit(requests(6, first=100, length=2))
    answers(driver, 6)
    assert len(group.engines[1].payloads) == asked
    assert driver.targets(only_outdated=True) == [SyncTarget(group.urls[1], 1, is_outdated=True)]
    metrics = driver.pop_metrics()
    assert metrics["fleet/engines_dead"] == 1
    assert metrics["rollout/requests_answered"] == metrics["rollout/requests_submitted"] == 18


def test_a_hung_engines_work_moves(servers, drive):
    group = servers(2, tokens_per_s=100)
    driver = drive(group.urls, min_engines=2, hung_after_s=1.0)
    give_weights(driver)
    group.engines[0].tokens_per_s, group.engines[0].health = 1e-6, "silent"
    driver.submit(requests(8))
    assert {answer.request_id for answer in answers(driver, 8)} == set(range(8))
    assert driver.pop_metrics()["fleet/engines_hung"] == 1


def test_an_engine_with_another_plugin_is_told_how_to_install_it(servers, drive, caplog):
    group = servers(3)
    for engine, protocol in zip(group.engines, (PROTOCOL, PROTOCOL - 1, None), strict=True):
        states = [{PROTOCOL_FIELD: protocol}] if protocol else [{}]
        engine.settings = {"internal_states": states}
    driver = drive(group.urls, min_engines=3)
    targets = driver.targets(only_outdated=False)
    assert {target.url: target.has_plugin for target in targets} == dict(
        zip(group.urls, (True, False, False), strict=True)
    )
    warnings = [record.getMessage() for record in caplog.records if "protocol" in record.getMessage()]
    assert len(warnings) == 1
    assert group.urls[1] in warnings[0]
    assert "pip install --no-deps --editable ." in warnings[0]


def test_too_few_engines_pause_the_run_until_they_return(servers, drive, caplog):
    group = servers(2)
    driver = drive(group.urls, min_engines=2)
    give_weights(driver)
    caplog.clear()  # The run may have waited for its engines at the start, too.
    group.stop(0)
    wait_until(lambda: num_serving(driver) == 1)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(driver.wait_for_engines)
        wait_until(lambda: "the run is paused" in caplog.text)
        group.start_again(0)
        waiting.result(DEADLINE_S)
    (line,) = (record.getMessage() for record in caplog.records if "the run is paused" in record.getMessage())
    assert line.startswith("the run is paused: 1 of 2 required engines are reachable, ")
    assert f"; missing: {group.urls[0]} since " in line
    assert driver.targets(only_outdated=True) == [SyncTarget(group.urls[0], 1, is_outdated=True)]


def test_too_few_engines_for_too_long_end_the_run_with_what_to_do(servers, drive):
    group = servers(1)
    driver = drive([*group.urls, "http://127.0.0.1:9"], min_engines=2, wait_limit_s=1.0)
    wait_until(driver.has_outdated)
    with pytest.raises(FleetError, match=r"1 of 2 required engines .*min_engines.*serve_rollouts\.py.*same command"):
        driver.targets(only_outdated=False)


def test_an_engine_that_keeps_failing_updates_is_refused_in_the_end(servers, drive):
    group = servers(2)
    driver = drive(group.urls, min_engines=1)
    give_weights(driver)
    for _ in range(3):
        wait_until(lambda: num_serving(driver) + driver.has_outdated() == 2)
        driver.failed(group.urls[0], "scripted")
    probes = group.engines[0].calls["/health"]
    wait_until(lambda: group.engines[0].calls["/health"] > probes + 5)
    assert not driver.has_outdated()
    assert [target.url for target in driver.targets(only_outdated=False)] == [group.urls[1]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place", "finish"])
def test_an_update_under_thousands_of_requests_loses_and_doubles_none(servers, drive, mode):
    """Half of them are in flight and half wait. `mode` is weight_sync.pause, or weight_sync.in_flight=finish."""
    num_requests = 2400
    sync = {"in_flight": "finish"} if mode == "finish" else {"in_flight": "continue", "pause": mode}
    group = servers(3, tokens_per_s=1)  # None ends before the update.
    for engine in group.engines:
        engine.settings = {"disable_radix_cache": True}
        engine.release_at = num_requests // 6
    driver = drive(group.urls, weight_sync=sync, min_engines=3, requests_per_engine=num_requests // 6)
    give_weights(driver, 0)
    asked = requests(num_requests, length=48)
    driver.submit(asked)
    wait_until(lambda: sum(engine.in_flight for engine in group.engines) == num_requests // 2)

    if mode == "finish":
        hurry(group.engines)
    update = threading.Thread(target=give_weights, args=(driver, 1), daemon=True)
    update.start()
    update.join(DEADLINE_S)
    assert not update.is_alive(), "the update did not end"
    hurry(group.engines)
    found = answers(driver, num_requests)
    assert driver.next_answer(0) is None
    by_id = {answer.request_id: answer for answer in found}
    assert len(by_id) == num_requests, "answered twice"
    for request in asked:
        assert_exact(by_id[request.request_id], request)
    metrics = driver.pop_metrics()
    assert metrics["rollout/requests_submitted"] == metrics["rollout/requests_answered"] == num_requests
    assert metrics["rollout/requests_taken_back"] == (num_requests // 2 if mode == "abort" else 0)
    assert not any(metrics[f"rollout/requests_{state}"] for state in ("open", "in_flight", "waiting", "failed"))
    ended_with = [answer.version_spans[-1][0] if answer.version_spans else answer.weight_version for answer in found]
    num_old = ended_with.count(0)
    assert ended_with[num_old:] == [1] * (num_requests - num_old), "old weights after the update"
    assert num_requests // 2 <= num_old < num_requests if mode == "finish" else num_old == 0


def test_requests_for_which_too_few_files_may_be_open_wait(servers, drive, caplog, monkeypatch):
    monkeypatch.setattr(membership, "raise_file_limit", lambda: 100)
    group = servers(1)
    engine = group.engines[0]
    engine.release_at = 50
    driver = drive(group.urls, requests_per_engine=256)
    give_weights(driver)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Both ends of 50 connections, and a few; there are 400 requests.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 130, hard))
    try:
        driver.submit(requests(400))
        found = answers(driver, 400)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(isinstance(answer, Response) for answer in found)
    assert engine.most_in_flight == 50
    metrics = driver.pop_metrics()
    assert metrics["rollout/failed_calls"] == metrics["fleet/engines_dead"] == 0
    assert caplog.text.count("only 50 requests are sent at a time: this process may not open more files") == 1


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be():
    program = (
        "import resource; from dapo_mega.rewards.bounded_http import raise_file_limit; "
        "print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    command = ["bash", "-c", 'ulimit -Sn 100; ulimit -Hn 300; exec "$@"', "-", sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S).stdout.split() == ["300"] * 3


@pytest.mark.parametrize("pause", ["abort", "retract"])
def test_responses_in_flight_continue_with_the_new_weights(servers, drive, pause):
    (engine,) = (group := servers(1, SLOW)).engines
    driver = drive(group.urls, weight_sync={"in_flight": "continue", "pause": pause})
    give_weights(driver, 0)
    driver.submit(requests(4, length=60))
    wait_until(lambda: engine.in_flight == 4 and engine.all_have_tokens)
    give_weights(driver, 1)
    hurry([engine])
    for answer in answers(driver, 4):
        assert [version for version, _ in answer.version_spans] == [0, 1]
        assert answer.version_spans[-1][1] == len(answer.token_ids) == 60
        assert answer.weight_version == 0


def test_a_call_that_comes_during_aborts_does_not_delay_the_update(servers, drive):
    (engine,) = (group := servers(1, SLOW)).engines
    engine.keeps_calls_waiting = True
    driver = drive(group.urls, weight_sync={"in_flight": "continue", "pause": "abort"})
    give_weights(driver, 0)
    driver.submit(requests(4, length=60))
    wait_until(lambda: engine.calls["/generate"] == 4)
    with ThreadPoolExecutor(1) as executor:
        aborts = engine.calls["/abort_request"]
        update = executor.submit(give_weights, driver, 1)
        wait_until(lambda: engine.calls["/abort_request"] > aborts)  # This one finds nothing.
        engine.keeps_calls_waiting = False
        update.result(30)
    assert engine.calls["/abort_request"] >= aborts + 2
    hurry([engine])
    assert driver.pop_metrics()["rollout/requests_taken_back"] == 4
    assert {len(answer.token_ids) for answer in answers(driver, 4)} == {60}


def test_an_engine_that_stays_paused_leaves_and_joins_again(servers, drive, caplog):
    group = servers(2)
    driver = drive(group.urls, min_engines=2)
    give_weights(driver)
    targets = driver.pause_generation(driver.targets(only_outdated=False))
    for target in targets:
        driver.synced(target.url, 1)
    group.stop(1)
    driver.resume_generation(targets)
    assert "has left the fleet (no connection for /continue_generation" in caplog.text
    group.start_again(1)
    wait_until(driver.has_outdated)
    assert driver.targets(only_outdated=True) == [SyncTarget(group.urls[1], 1, is_outdated=True)]


def test_colocated_engines_sleep_until_the_next_update(servers, drive):
    group = servers(1)
    driver = drive(group.urls, rollout={"placement": "colocated"})
    give_weights(driver, 0)
    driver.sleep()
    calls = group.engines[0].calls
    assert calls["/release_memory_occupation"] == 1
    probes = calls["/health"]
    time.sleep(0.5)
    assert calls["/health"] == probes
    give_weights(driver, 1)
    # First the weights, then, after they have been filled, the rest.
    assert calls["/resume_memory_occupation"] == 2
    give_weights(driver, 2)
    assert calls["/resume_memory_occupation"] == 2


@pytest.mark.parametrize("waits_for", ["engines", "answers"])
def test_waiting_ends_when_the_run_is_to_stop(servers, drive, waits_for):
    told = threading.Event()

    def check_stop():
        if told.is_set():
            raise StopRequested("told so")

    driver = drive(servers(1, SLOW).urls if waits_for == "answers" else ["http://127.0.0.1:9"], check_stop=check_stop)
    if waits_for == "answers":
        give_weights(driver)
    timer = threading.Timer(0.3, told.set)
    timer.start()

    async def work():
        await driver.generate(*requests(1, length=10**4))

    with pytest.raises(StopRequested):
        driver.run(work())
    assert driver.pop_metrics()["rollout/requests_cancelled"] == 1
    timer.join()


def test_engines_that_join_while_work_waits_for_answers_get_the_weights(servers, drive):
    """And what was started before goes on meanwhile."""
    driver = drive(servers(1).urls)

    updates = []
    driver.update_outdated = lambda: updates.append(give_weights(driver, 3))

    async def all_of(asked):
        async with asyncio.timeout(DEADLINE_S):
            return [(await driver.generate(request)).weight_version for request in asked]

    started = driver.start(all_of(requests(5)))
    assert driver.run(all_of(requests(3, first=50))) == [3] * 3
    assert started.result(DEADLINE_S) == [3] * 5
    assert len(updates) == 1
