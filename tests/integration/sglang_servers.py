"""Real SGLang engines on the CPU, started by launch/serve_rollouts.py, for all tests that talk to engines."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.distributed.launching import REPOSITORY, free_ports

SERVE = REPOSITORY / "launch" / "serve_rollouts.py"
ENGINE_FORKS = Path(__file__).parent / "engine_forks"
API_KEY = "the-key-of-the-tests"
VOCAB_SIZE, NUM_TOKENS = 200, 190
START_LIMIT_S = 300.0
"""Two engines are there after 40 s on two idle cores."""


def sglang_python() -> Path:
    """The interpreter that has SGLang; skips the test where there is none."""
    if given := os.environ.get("DAPO_MEGA_SGLANG_PYTHON"):
        return Path(given)
    folder = REPOSITORY / ".venv-sglang"
    if not (folder / ".dapo_mega_installed").is_file():
        pytest.skip("no SGLang: run tools/install_sglang.sh, or set DAPO_MEGA_SGLANG_PYTHON to an interpreter with it")
    return folder / "bin" / "python"


def tiny_model(folder: Path, **changes: Any) -> Path:
    """A random float32 Qwen2 of VOCAB_SIZE tokens (end of sequence: 1) with a character tokenizer of NUM_TOKENS."""
    from transformers import Qwen2Config

    from dapo_mega.data.tokenizer import build_character_tokenizer
    from tests.distributed.tiny import save_random

    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    build_character_tokenizer(map(chr, (*range(32, 127), *range(161, 161 + NUM_TOKENS - 99)))).save_pretrained(folder)
    return save_random(Qwen2Config(**{**sizes, **changes}), folder)


def call(url: str, path: str, body: dict[str, Any] | None = None, key: str | None = API_KEY) -> tuple[int, Any]:
    """(status, decoded answer) of one HTTP call; GET without a body, else POST."""
    target = urlsplit(url)
    connection = http.client.HTTPConnection(str(target.hostname), target.port, timeout=240)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content else None
    finally:
        connection.close()


def _variables(modules: Path | None, gpus: str) -> dict[str, str]:
    return {
        **os.environ,
        "DAPO_MEGA_API_KEY": API_KEY,
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, [modules, ENGINE_FORKS, REPOSITORY]))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": gpus,
    }


@cache
def _launchers() -> tuple[socket.socket, IO[bytes]]:
    """Where `engine_forks/launchers.py`, which ends with this process, is asked for launchers, and its output."""
    asking, asked = socket.socketpair()
    output = tempfile.TemporaryFile()  # noqa: SIM115
    # What SGLang asks for when it is imported, as engines have it.
    variables = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with asked:
        subprocess.Popen(
            [sglang_python(), ENGINE_FORKS / "launchers.py"],
            env=_variables(None, "") | variables,
            stdin=asked,
            stdout=output,
            stderr=output,
        )
    return asking, output


class _LauncherFork:
    """What `Launcher` asks of a subprocess.Popen."""

    def __init__(self, request: list[Any]) -> None:
        """`request`: environment variables, log, script and its arguments."""
        asking, output = _launchers()
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other, suppress(OSError):
            socket.send_fds(asking, [b"\n"], [other.fileno()])
            self._connection.send(json.dumps(request).encode())
        self._status: int | None = None
        self.pid = self._number(START_LIMIT_S) or 0
        if self.pid <= 0:
            output.seek(0)
            raise AssertionError(f"no launcher can be forked: {output.read()[-3000:].decode()}")

    def _number(self, timeout: float) -> int | None:
        """The next number that is sent, None when none comes in time, -9 when none will."""
        if not select.select([self._connection], [], [], timeout)[0]:
            return None
        with suppress(ConnectionResetError):
            return int(self._connection.recv(16) or b"-9")
        return -9

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._number(0.0)
        return self._status

    def wait(self, timeout: float = START_LIMIT_S) -> int:
        if self._status is None:
            self._status = self._number(timeout)
        if self._status is None:
            raise subprocess.TimeoutExpired("a launcher", timeout)
        return self._status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Launcher:
    """A running launch/serve_rollouts.py and what it has said about its engines."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        num_engines: int,
        *options: str,
        gpus: str = "",
        modules: Path | None = None,
        anew: bool = False,
    ) -> None:
        """On the CPU unless `gpus` names devices. Engines find the Python files of the folder `modules` first.
        Launcher and engines are forks of a process that has imported SGLang, but on GPUs and with `anew`: then they
        start Python as for users."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        first = free_ports(num_engines)
        self.urls = [f"http://127.0.0.1:{first + index}" for index in range(num_engines)]
        self._output = folder / "serve_rollouts.log"
        arguments = ["--model", str(model), "--num-engines", str(num_engines), "--port", str(first)]
        arguments += ["--python", str(sglang_python()), "--log-folder", str(folder / "engines"), *options]
        variables = _variables(modules, gpus)
        self.process: subprocess.Popen[bytes] | _LauncherFork
        with self._output.open("w") as output:
            if anew or gpus:
                command = [sys.executable, str(SERVE), *arguments]
                self.process = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
            else:
                self.process = _LauncherFork([variables, output.name, str(SERVE), arguments])

    def pid(self, url: str) -> int | None:
        """Main process of the engine's latest start."""
        pids = re.findall(rf"^engine {re.escape(url)} starts \(pid (\d+)", self._output.read_text(), re.MULTILINE)
        return int(pids[-1]) if pids else None

    def instances(self, url: str) -> list[str]:
        """Instance ids of the engine, one for each time that it came to serve."""
        pattern = rf"^engine {re.escape(url)} serves \(pid \d+, instance (\w+)\)"
        return re.findall(pattern, self._output.read_text(), re.MULTILINE)

    def wait_until(self, condition: Callable[[], bool], limit_s: float = START_LIMIT_S) -> None:
        """AssertionError with all logs when the launcher ends or time is up before the condition holds."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(self.logs())
            time.sleep(0.1)

    def wait_until_serving(self, num_times: int = 1) -> None:
        """Wait until every engine has come to serve so often."""
        self.wait_until(lambda: all(len(self.instances(url)) >= num_times for url in self.urls))

    def processes(self) -> list[psutil.Process]:
        """The launcher and everything that it started, and that those started."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def stop(self, limit_s: float = 60.0) -> None:
        """SIGTERM to the launcher; AssertionError when a process of it is left."""
        processes = self.processes()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(limit_s) == 0, self.logs()
        _, left = psutil.wait_procs(processes, timeout=60)
        assert not left, f"processes outlived the launcher: {left}"

    def kill(self) -> None:
        """End whatever still runs, by force."""
        if self.process.poll() is None:
            processes = self.processes()
            for process in reversed(processes):
                process.kill()
            self.process.wait()
            psutil.wait_procs(processes, timeout=10)

    def logs(self) -> str:
        """The ends of all logs."""
        files = [self._output, *sorted((self.folder / "engines").glob("*.log"))]
        return "\n".join(f"--- {file}\n{file.read_text()[-3000:]}" for file in files)


@contextmanager
def serving_engines(model: Path, folder: Path, num_engines: int, *options: str, **settings: Any) -> Iterator[Launcher]:
    """The engines of a Launcher, which serve; nothing of them is left afterwards."""
    launcher = Launcher(model, folder, num_engines, *options, **settings)
    try:
        launcher.wait_until_serving()
        yield launcher
        if launcher.process.poll() is None:
            launcher.stop()
    finally:
        launcher.kill()
