"""The command line, environment variables and GPUs with which each SGLang engine is started."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dapo_mega.atomic_files import read_json_object
from dapo_mega.data.tokenizer import load_tokenizer, num_ids
from dapo_mega.engines.sglang.weight_protocol import NUM_TOKENS
from dapo_mega.errors import FleetError, InputError

EngineDtype = Literal["fp32", "bf16", "fp8"]

# Run in SGLang's environment. Editable: a copy would not follow changes of the project.
INSTALL_PLUGIN = "pip install --no-deps --editable ."

_DTYPE_ARGUMENTS: dict[EngineDtype, list[str]] = {
    "fp32": ["--dtype", "float32"],
    "bf16": ["--dtype", "bfloat16"],
    "fp8": ["--dtype", "bfloat16", "--quantization", "fp8"],
}
_CPU_ARGUMENTS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    # An idle scheduler would busy-wait and take a core from the trainer.
    "--sleep-on-idle",
    # Without a limit the KV cache takes most of the machine's memory.
    *("--max-total-tokens", "16384"),
]
_LORA_TARGETS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
DETERMINISTIC = "--enable-deterministic-inference"
# A prompt that is computed in parts is rounded otherwise, and where it is parted depends on those computed with it.
_CPU_DETERMINISTIC_ARGUMENTS = ["--prefill-max-requests", "1"]
_OURS = {
    *("--model-path", "--model", "--host", "--port", "--tp", "--tp-size", "--tensor-parallel-size"),
    *("--config", "--api-key", "--admin-api-key"),
}
_OF_SEVERAL_MACHINES = {"--nnodes", "--dist-init-addr", "--nccl-init-addr"}
_INSPECTION = """
import importlib.metadata, torch
importlib.metadata.version("sglang")
print(torch.cuda.device_count())
"""
# glibc then keeps freed memory in the process. Otherwise every bucket of a weight update goes into fresh pages, which
# the kernel zeroes first; zeroing takes longer than receiving the bucket.
_KEEP_FREED_MEMORY = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184"
_FIRST_PORT, _LAST_PORT = 30000, 32000
_ROUTER_KEY = "ROUTER_API_KEY"
_ROUTER = f"""
import json, os, sys
from sglang_router.launch_router import launch_router
from sglang_router.router_args import RouterArgs
launch_router(RouterArgs(api_key=os.environ.pop("{_ROUTER_KEY}"), **json.loads(sys.argv[1])))
"""


@dataclass(frozen=True)
class Node:
    """The engines of one machine. Engine i serves at `port` + i on `tp_size` of the `gpus`, or on the CPU without GPUs.

    `with_text` loads the tokenizer, which the trainer does not need. With `lora_rank` they take LoRA adapters of up to
    this rank. `extra` goes to SGLang verbatim.
    """

    python: Path
    model: Path
    num_engines: int
    tp_size: int
    host: str
    port: int
    dtype: EngineDtype
    gpus: tuple[str, ...]
    memory_fraction: float | None = None
    colocated: bool = False
    with_text: bool = False
    lora_rank: int = 0
    extra: tuple[str, ...] = ()

    def url(self, engine: int) -> str:
        return f"http://{self.host}:{self.port + engine}"


def sglang_gpus(python: Path) -> int:
    """How many GPUs the interpreter's torch sees. Raises InputError where SGLang is not installed."""
    try:
        result = subprocess.run([python, "-c", _INSPECTION], capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(
            f"--python {python} cannot be started ({error.strerror}); give a Python interpreter"
        ) from error
    if result.returncode != 0:
        reason = (result.stderr.strip() or "no output").splitlines()[-1]
        raise InputError(
            f"SGLang is not usable from {python} ({reason}); install it (pip install sglang, then in the project "
            f"folder {INSTALL_PLUGIN}; without a GPU bash tools/install_sglang.sh does both) and name its interpreter "
            "with --python"
        )
    return int(result.stdout.splitlines()[-1])


def share_of_gpus(chosen: str | None, num_seen: int, num_needed: int) -> tuple[str, ...]:
    """The first `num_needed` GPUs of `chosen` ("0,2"), of CUDA_VISIBLE_DEVICES, or of those seen; none on a machine
    without. Raises InputError where there are too few."""
    listed = chosen or os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [gpu.strip() for gpu in listed.split(",") if gpu.strip()] if listed else [str(i) for i in range(num_seen)]
    if num_seen == 0 and not chosen:
        return ()
    if len(gpus) < num_needed:
        raise InputError(
            f"the engines need {num_needed} GPUs (--num-engines times --tensor-parallel) and {len(gpus)} are there; "
            "start fewer or smaller engines"
        )
    return tuple(gpus[:num_needed])


def check_node(node: Node) -> None:
    """Raises InputError for options that would fail later or leave the engines unprotected."""
    if not (node.model / "config.json").is_file():
        raise InputError(f"--model {node.model} holds no config.json; give the folder of a Hugging Face checkpoint")
    if node.dtype == "fp8" and not _has_fp8_blocks(node.model):
        raise InputError(
            "--dtype fp8 needs a checkpoint with FP8 blocks of 128 x 128 (quantization_config.weight_block_size in its "
            f"config.json), whose weights can be updated, and --model {node.model} has none; quantize it so, or use "
            "--dtype bf16"
        )
    if node.host in ("", "0.0.0.0", "::"):
        raise InputError(
            f"--host {node.host} means every interface; give the address by which the trainer reaches this machine"
        )
    for argument in node.extra:
        if argument.split("=")[0] in _OURS:
            raise InputError(f"{argument} after -- is decided by serve_rollouts itself; use its own options")
    _num_tokens(node.model)
    for engine in range(node.num_engines):
        _check_port(node.host, node.port + engine, "--port")


@functools.cache
def _num_tokens(model: Path) -> int:
    """0 of a model without a tokenizer. Raises InputError for one that cannot be loaded."""
    return num_ids(load_tokenizer(str(model))) if (model / "tokenizer_config.json").is_file() else 0


def _has_fp8_blocks(model: Path) -> bool:
    quantization = read_json_object(model / "config.json").get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("weight_block_size") == [128, 128]


def _restated(file: Path) -> dict[str, Any]:
    """What transformers 5 writes into config.json in another form than SGLang 0.5.23 reads it in, in SGLang's."""
    config = read_json_object(file) if file.is_file() else {}
    rope, kinds = config.get("rope_parameters") or {}, config.get("layer_types") or []
    found: dict[str, Any] = {}
    if "partial_rotary_factor" in rope:  # Phi-4-mini.
        found["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if config.get("model_type") == "olmo3" and (full := rope.get("full_attention")):
        found |= {"rope_theta": full.get("rope_theta"), "rope_scaling": full}
    if "linear_attention" in kinds and "full_attention" in kinds:  # Qwen3-Next, Qwen3.5.
        found["full_attention_interval"] = kinds.index("full_attention") + 1
    return {name: value for name, value in found.items() if name not in config}


def command(node: Node, engine: int, key_path: Path) -> list[str]:
    """The engine's command line. SGLang reads the key at `key_path`, as all users of a machine see command lines."""
    arguments = ["--config", str(key_path), "--model-path", str(node.model), "--tp-size", str(node.tp_size)]
    arguments += ["--host", node.host, "--port", str(node.port + engine), *_DTYPE_ARGUMENTS[node.dtype]]
    # At level info SGLang logs its arguments, including the key.
    arguments += ["--log-level", "warning"]
    if not node.gpus:
        arguments += _CPU_ARGUMENTS
        arguments += _CPU_DETERMINISTIC_ARGUMENTS if DETERMINISTIC in node.extra else []
    if overrides := _restated(node.model / "config.json"):
        arguments += ["--json-model-override-args", json.dumps(overrides)]
    if not node.with_text:
        arguments += ["--skip-tokenizer-init"]
    if node.lora_rank:
        arguments += ["--enable-lora", "--max-lora-rank", str(node.lora_rank), "--max-loras-per-batch", "2"]
        arguments += ["--lora-target-modules", *_LORA_TARGETS]
        arguments += [] if node.gpus else ["--lora-backend", "torch_native"]
    if node.memory_fraction is not None:
        arguments += ["--mem-fraction-static", str(node.memory_fraction)]
    if node.colocated:
        arguments += ["--enable-memory-saver", "--base-gpu-id", str(engine * node.tp_size)]
    return [str(node.python), "-m", "sglang.launch_server", *arguments, *node.extra]


def environment(node: Node, engine: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment variables."""
    variables = {**inherited, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if num_tokens := _num_tokens(node.model):
        variables[NUM_TOKENS] = str(num_tokens)
    if node.dtype == "fp32":  # Else gated delta layers keep inputs of convolutions in bfloat16.
        variables.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    if node.gpus:
        if node.colocated:
            # CUDA IPC names memory by GPU number, so trainer and engine must number the GPUs alike.
            return variables | {"CUDA_VISIBLE_DEVICES": ",".join(node.gpus)}
        first = engine * node.tp_size
        return variables | {"CUDA_VISIBLE_DEVICES": ",".join(node.gpus[first : first + node.tp_size])}
    variables |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1")}
    variables.setdefault("GLIBC_TUNABLES", _KEEP_FREED_MEMORY)
    # SGLang would compile the vocabulary-parallel lookup and seeded sampling, and CPU environments lack the compiler.
    variables.setdefault("TORCHDYNAMO_DISABLE", "1")
    if node.tp_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        ranks = range(engine * node.tp_size, (engine + 1) * node.tp_size)
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in ranks)
    return variables


def store_variables(node: Node, engine: int, store: Path) -> dict[str, str]:
    """Environment variables with which the engine's processes find each other by the new file `store`. By default torch
    lets them meet at a port, which listens on all interfaces of the machine.
    """
    if not _OF_SEVERAL_MACHINES.isdisjoint(argument.partition("=")[0] for argument in node.extra):
        return {}
    # On some CPUs SGLang names the memory that an engine's processes share by the place where they meet.
    names = {} if node.gpus else {"MASTER_ADDR": node.host, "MASTER_PORT": str(node.port + engine)}
    return {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{store.resolve()}", **names}


def router_command(node: Node, port: int) -> list[str]:
    """The command line of sglang-router in front of the node's engines, for clients besides the trainer.

    The router requires the same API key. The trainer calls the engines directly, not through the router.
    """
    arguments = {
        "host": node.host,
        "port": port,
        "prometheus_host": node.host,
        "prometheus_port": port + 1,
        "worker_urls": [node.url(engine) for engine in range(node.num_engines)],
        "policy": "round_robin",
        "health_check_interval_secs": 5,
        "log_level": "warn",
    }
    return [str(node.python), "-c", _ROUTER, json.dumps(arguments)]


def router_environment(inherited: Mapping[str, str], api_key: str) -> dict[str, str]:
    """The router's environment variables, with the API key, which the router removes from them."""
    return {**inherited, _ROUTER_KEY: api_key}


def check_router(node: Node, port: int) -> None:
    """Raises InputError where sglang-router is not installed or its port is taken."""
    if subprocess.run([node.python, "-c", "import sglang_router"], capture_output=True, check=False).returncode != 0:
        raise InputError(f"--router needs sglang-router in the environment of {node.python}: pip install sglang-router")
    _check_port(node.host, port, "--router")


def free_ports(count: int) -> int:
    """The first of `count` ports of 127.0.0.1 that follow one another and are free now."""
    for first in range(_FIRST_PORT, _LAST_PORT, count):
        with contextlib.suppress(InputError):
            for port in range(first, first + count):
                _check_port("127.0.0.1", port, "port")
            return first
    raise FleetError(f"no {count} free ports that follow one another between {_FIRST_PORT} and {_LAST_PORT}")


def _check_port(host: str, port: int, option: str) -> None:
    if port > 65535:
        raise InputError(f"port {port} does not exist; give a smaller {option}")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} of {host} is taken; give another {option}") from error
        raise InputError(
            f"cannot listen on {host}:{port} ({error.strerror}); give an address of this machine as --host"
        ) from error
