"""The launcher of rollout engines, with real SGLang: protected, restarted, announced, and gone when it is."""

import json
import os
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dapo_mega.commands import serve as serve_rollouts
from dapo_mega.engines.sglang.engine_commands import Node, command, router_command, router_environment
from dapo_mega.engines.sglang.registry import EngineRegistry
from dapo_mega.engines.sglang.serving import ProcessGroup
from dapo_mega.errors import InputError
from tests.distributed.launching import free_ports

from .sglang_servers import API_KEY, Launcher, call, sglang_python, tiny_model

pytestmark = pytest.mark.integration

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


_PARSE = """
import json, sys
from sglang.srt.server_args import prepare_server_args
for arguments, names in json.loads(sys.argv[1]):
    taken = prepare_server_args(arguments)
    print("taken", json.dumps({name: getattr(taken, name) for name in names}))
"""


def test_sglang_takes_the_arguments_that_stand_for_a_nodes_choices(tmp_path):
    key_path = tmp_path / "key.yaml"
    key_path.write_text("api-key: the-key\n")
    on_gpus = Node(sglang_python(), Path("model"), 2, 2, "10.0.0.7", 30000, "bf16", gpus=("0", "1", "2", "3"))
    on_cpu = replace(on_gpus, gpus=(), dtype="fp32")
    everywhere = {"api_key": "the-key", "model_path": "model", "host": "10.0.0.7", "port": 30001, "tp_size": 2}
    cases = [
        (on_gpus, {**everywhere, "dtype": "bfloat16", "quantization": None, "skip_tokenizer_init": True}),
        (replace(on_gpus, dtype="fp8", memory_fraction=0.6), {"quantization": "fp8", "mem_fraction_static": 0.6}),
        (replace(on_gpus, colocated=True), {"enable_memory_saver": True, "base_gpu_id": 2}),
        (replace(on_gpus, with_text=True), {"skip_tokenizer_init": False, "sleep_on_idle": False}),
        (on_cpu, {**everywhere, "dtype": "float32", "device": "cpu", "sleep_on_idle": True}),
        (
            replace(on_cpu, extra=("--max-total-tokens", "99")),
            {"max_total_tokens": 99},
        ),  # The user's come last and win.
    ]
    asked = [(command(node, 1, key_path)[3:], list(wanted)) for node, wanted in cases]
    parsing = [on_gpus.python, "-c", _PARSE, json.dumps(asked)]
    parsed = subprocess.run(parsing, capture_output=True, text=True, timeout=300)
    assert parsed.returncode == 0, parsed.stderr[-300:]
    taken = [json.loads(line[6:]) for line in parsed.stdout.splitlines() if line.startswith("taken ")]
    assert taken == [wanted for _, wanted in cases]


def test_engines_answer_token_ids_with_the_key(two_engines):
    for url in two_engines.launcher.urls:
        body = {"input_ids": [5, 6, 7], "sampling_params": SAMPLING, "return_logprob": True}
        status, answer = call(url, "/generate", body)
        assert status == 200
        assert len(answer["output_ids"]) == 8
        assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]


def test_a_stop_token_ends_a_response_although_no_tokenizer_is_loaded(two_engines):
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 64, "stop_token_ids": list(range(2, 200))}}
    answer = call(two_engines.launcher.urls[0], "/generate", body)[1]
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(answer["output_ids"]) == 1


def test_engines_listen_on_the_given_interface_and_hide_their_key(two_engines):
    launcher = two_engines.launcher
    for url in launcher.urls:
        main = psutil.Process(launcher.pid(url))
        listening = [c.laddr for c in main.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
        assert [(address.ip, f"http://127.0.0.1:{address.port}") for address in listening] == [("127.0.0.1", url)]
    for process in launcher.processes()[1:]:
        assert API_KEY not in " ".join(process.cmdline())
        assert API_KEY not in process.environ().values()
    for log in (launcher.folder / "engines").glob("*.log"):
        assert API_KEY not in log.read_text()
        assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_trainer_learns_that_a_killed_engine_is_a_new_instance(two_engines):
    launcher = two_engines.launcher
    killed, other = launcher.urls
    trainer = EngineRegistry(two_engines.rendezvous, API_KEY)

    def registered():
        return {registration.url: registration.instance for registration in trainer.poll()}

    try:
        launcher.wait_until(lambda: set(registered()) == {killed, other}, 30)
        before = registered()
        os.kill(launcher.pid(killed), 9)
        launcher.wait_until(lambda: killed not in registered(), 30)
        launcher.wait_until(lambda: killed in registered())
        after = registered()
    finally:
        trainer.close()
    assert after[other] == before[other]
    assert after[killed] not in (before[killed], before[other])
    assert call(killed, "/health")[0] == 200


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

    try:
        two_engines.launcher.wait_until(answers, 60)
        assert API_KEY not in " ".join(psutil.Process(router.pid).cmdline())
        assert call(router_url, "/generate", body, key=None)[0] == 401
        assert call(router_url, "/workers", {"url": "http://127.0.0.1:9"}, key=None)[0] == 401
        assert {worker["url"] for worker in call(router_url, "/workers")[1]["workers"]} == set(urls)
    finally:
        router.end(time.monotonic())


def test_no_process_and_no_key_outlives_a_killed_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    launcher = Launcher(tiny_model(tmp_path / "model"), tmp_path / "served", 1)
    try:
        # SGLang's scheduler and detokenizer exist and are still importing, before they watch over their parent.
        launcher.wait_until(lambda: launcher.pid(launcher.urls[0]) is not None)
        engine = psutil.Process(launcher.pid(launcher.urls[0]))
        launcher.wait_until(lambda: len(engine.children()) >= 3)
        processes = launcher.processes()
        launcher.process.kill()
        launcher.process.wait()
        _, left = psutil.wait_procs(processes, timeout=30)
        assert not left
    finally:
        launcher.kill()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(API_KEY.encode() in path.read_bytes() for path in files)


def start(monkeypatch, *arguments):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["serve_rollouts.py", *map(str, arguments)])
    serve_rollouts.main()


def test_a_missing_key_is_refused_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.delenv("DAPO_MEGA_API_KEY", raising=False)
    with pytest.raises(InputError, match="DAPO_MEGA_API_KEY is not set"):
        start(monkeypatch, "--model", tmp_path)


def test_an_interpreter_without_sglang_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("DAPO_MEGA_API_KEY", API_KEY)
    with pytest.raises(InputError, match="No package metadata was found for sglang"):
        start(monkeypatch, "--model", tmp_path)
    with pytest.raises(InputError, match="nowhere cannot be started"):
        start(monkeypatch, "--model", tmp_path, "--python", "nowhere")


def test_a_taken_port_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("DAPO_MEGA_API_KEY", API_KEY)
    model = tiny_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 is taken"):
            start(monkeypatch, "--model", model, "--python", sglang_python(), "--port", port)
