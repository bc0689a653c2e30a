"""The launcher of rollout engines, with real SGLang: protected, restarted, announced, and gone when it is."""

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dapo_mega.commands import serve as serve_rollouts
from dapo_mega.engines.sglang.engine_commands import Node, command
from dapo_mega.errors import InputError

from .sglang_servers import API_KEY, Launcher, sglang_python, tiny_model

pytestmark = pytest.mark.integration

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
    named = ("--attention-backend", "triton", "--context-length", "512")
    everywhere = {"api_key": "the-key", "model_path": "model", "host": "10.0.0.7", "port": 30001, "tp_size": 2}
    cases = [
        (on_gpus, {**everywhere, "dtype": "bfloat16", "quantization": None, "skip_tokenizer_init": True}),
        (replace(on_gpus, dtype="fp8", memory_fraction=0.6), {"quantization": "fp8", "mem_fraction_static": 0.6}),
        (replace(on_gpus, colocated=True), {"enable_memory_saver": True, "base_gpu_id": 2}),
        (replace(on_gpus, with_text=True), {"skip_tokenizer_init": False, "sleep_on_idle": False}),
        (replace(on_gpus, extra=named), {"attention_backend": "triton", "context_length": 512}),
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


def test_no_process_and_no_key_outlives_a_killed_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SGLANG_PLUGINS", "dapo_mega")  # Its processes start Python anew, as for users.
    launcher = Launcher(tiny_model(tmp_path / "model"), tmp_path / "served", 1, anew=True)
    try:
        # SGLang's scheduler and detokenizer exist and are still importing, before they watch over their parent.
        launcher.wait_until(lambda: launcher.pid(launcher.urls[0]) is not None)
        engine = psutil.Process(launcher.pid(launcher.urls[0]))
        launcher.wait_until(lambda: len(engine.children()) >= 3)
        processes = launcher.processes()
        for process in processes[1:]:
            assert API_KEY not in " ".join(process.cmdline())
            assert API_KEY not in process.environ().values()
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
