"""What SGLang is told: a share of the GPUs each, the run's precision, and nothing that loses the protection."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from dapo_mega.engines.sglang.engine_commands import (
    INSTALL_PLUGIN,
    Node,
    check_node,
    check_router,
    command,
    environment,
    router_command,
    router_environment,
    sglang_gpus,
    share_of_gpus,
    store_variables,
)
from dapo_mega.errors import InputError
from tests.distributed.launching import free_port

NODE = Node(Path("python"), Path("model"), 2, 2, "10.0.0.7", 30000, "bf16", gpus=("0", "1", "2", "3"))
KEY_FILE = Path("key.yaml")


def options(arguments):
    return dict(pairwise(arguments))


def test_each_engine_has_its_own_gpus_and_port():
    assert [environment(NODE, engine, {})["CUDA_VISIBLE_DEVICES"] for engine in (0, 1)] == ["0,1", "2,3"]
    assert [options(command(NODE, engine, KEY_FILE))["--port"] for engine in (0, 1)] == ["30000", "30001"]
    assert [NODE.url(engine) for engine in (0, 1)] == ["http://10.0.0.7:30000", "http://10.0.0.7:30001"]


def test_without_gpus_engines_run_on_the_cpu_in_bounded_memory():
    node = replace(NODE, gpus=(), dtype="fp32")
    arguments = options(command(node, 0, KEY_FILE))
    assert arguments["--device"] == "cpu"
    assert arguments["--dtype"] == "float32"
    assert int(arguments["--max-total-tokens"]) > 0
    variables = environment(node, 1, {"PATH": "kept"})
    assert variables["SGLANG_USE_CPU_ENGINE"] == variables["OMP_NUM_THREADS"] == "1"
    assert len(variables["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == node.tp_size
    assert variables["PATH"] == "kept"
    assert "--device" not in command(NODE, 0, KEY_FILE)


def test_only_engines_in_float32_keep_convolved_inputs_in_it():
    dtypes = {dtype: environment(replace(NODE, dtype=dtype), 0, {}) for dtype in ("fp32", "bf16")}
    assert [dtypes[dtype].get("SGLANG_MAMBA_CONV_DTYPE") for dtype in ("fp32", "bf16")] == ["float32", None]


def test_deterministic_engines_on_the_cpu_compute_prompts_one_by_one():
    node = replace(NODE, gpus=(), extra=("--enable-deterministic-inference",))
    assert options(command(node, 0, KEY_FILE))["--prefill-max-requests"] == "1"
    for other in (replace(node, extra=()), replace(NODE, extra=node.extra)):
        assert "--prefill-max-requests" not in command(other, 0, KEY_FILE)


def test_engines_on_the_cpu_have_cores_of_their_own_if_there_are_enough(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    node = replace(NODE, gpus=(), dtype="fp32")
    bound = [environment(node, engine, {})["SGLANG_CPU_OMP_THREADS_BIND"] for engine in (0, 1)]
    assert bound == ["0|1", "2|3"]
    assert environment(node, 0, {})["TORCHDYNAMO_DISABLE"] == "1"
    assert environment(node, 0, {"TORCHDYNAMO_DISABLE": "0"})["TORCHDYNAMO_DISABLE"] == "0"
    assert "TORCHDYNAMO_DISABLE" not in environment(NODE, 0, {})
    assert environment(node, 0, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_an_engine_of_one_machine_opens_no_port_for_its_own_processes(tmp_path):
    name = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
    store = tmp_path / "a folder" / "store"
    assert store_variables(NODE, 0, store) == {name: f"file://{tmp_path}/a folder/store"}
    on_cpu = replace(NODE, gpus=())
    assert store_variables(on_cpu, 1, store)["MASTER_PORT"] == "30001"
    for extra in (("--nnodes", "2"), ("--nnodes=2",), ("--dist-init-addr", "10.0.0.7:5000")):
        assert store_variables(replace(NODE, extra=extra), 0, store) == {}


def test_a_colocated_engine_numbers_its_gpus_as_the_trainer_does():
    node = replace(NODE, colocated=True)
    assert environment(node, 1, {})["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert options(command(node, 1, KEY_FILE))["--base-gpu-id"] == "2"


def test_the_router_listens_on_one_interface_and_reaches_all_engines():
    arguments = json.loads(router_command(NODE, 8000)[-1])
    assert (arguments["host"], arguments["prometheus_host"]) == (NODE.host, NODE.host)
    assert arguments["worker_urls"] == ["http://10.0.0.7:30000", "http://10.0.0.7:30001"]


def test_the_router_gets_the_key_where_no_list_of_processes_shows_it(tmp_path):
    """With a stand-in for the router's package that says what it was given."""
    package = tmp_path / "sglang_router"
    package.mkdir()
    package.joinpath("router_args.py").write_text("RouterArgs = dict")
    package.joinpath("launch_router.py").write_text(
        "import json, os\n"
        "def launch_router(arguments):\n"
        "    print(json.dumps([arguments['api_key'], arguments['port'], dict(os.environ)]))\n"
    )
    arguments = router_command(replace(NODE, python=Path(sys.executable)), 8000)
    assert "the-key" not in " ".join(arguments)
    variables = router_environment({**os.environ, "PYTHONPATH": str(tmp_path)}, "the-key")
    said = subprocess.run(arguments, env=variables, capture_output=True, text=True, check=True, timeout=60).stdout
    key, port, environment = json.loads(said)
    assert (key, port) == ("the-key", 8000)
    assert "the-key" not in environment.values()


def test_sglang_does_not_log_its_arguments_among_which_the_key_is():
    assert options(command(NODE, 0, KEY_FILE))["--log-level"] == "warning"


_FULL = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
_KINDS = ["linear_attention", "linear_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.75}}, {"partial_rotary_factor": 0.75}),
        ({"model_type": "phi3", "rope_scaling": None, "partial_rotary_factor": 0.75}, None),
        (
            {"model_type": "olmo3", "rope_parameters": {"full_attention": _FULL}},
            {"rope_theta": 500.0, "rope_scaling": _FULL},
        ),
        ({"model_type": "olmo3", "rope_theta": 500.0, "rope_scaling": _FULL}, None),
        ({"model_type": "qwen3_next", "layer_types": _KINDS}, {"full_attention_interval": 3}),
        ({"model_type": "qwen3_next", "layer_types": _KINDS, "full_attention_interval": 3}, None),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": _FULL}}, None),
    ],
)
def test_sglang_is_told_what_it_does_not_read_in_the_form_of_transformers_5(tmp_path, config, told):
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = options(command(replace(NODE, model=tmp_path), 0, KEY_FILE))
    assert json.loads(arguments.get("--json-model-override-args", "null")) == told


@pytest.mark.parametrize("blocks", [None, [64, 64]])
def test_fp8_needs_a_checkpoint_whose_weights_can_be_updated(tmp_path, blocks):
    node = replace(NODE, host="127.0.0.1", port=free_port(), num_engines=1, model=tmp_path, dtype="fp8")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"quantization_config": {"weight_block_size": [128, 128]}}))
    check_node(node)
    config.write_text(json.dumps({"quantization_config": {"weight_block_size": blocks}} if blocks else {}))
    with pytest.raises(InputError, match="--dtype fp8 needs a checkpoint with FP8 blocks of 128 x 128"):
        check_node(node)


def test_a_router_that_cannot_start_is_an_input_error(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    node = replace(NODE, host="127.0.0.1", python=python)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 is taken; give another --router"):
            check_router(node, port)
    python.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(InputError, match="pip install sglang-router"):
        check_router(node, free_port())


def test_gpus_are_those_chosen_then_those_visible_then_all(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert share_of_gpus(None, 8, 2) == ("0", "1")
    assert share_of_gpus("5, 7", 8, 2) == ("5", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6")
    assert share_of_gpus(None, 3, 2) == ("2", "3")
    assert share_of_gpus("6", 3, 1) == ("6",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert share_of_gpus(None, 0, 4) == ()
    assert share_of_gpus("1", 0, 1) == ("1",), "a choice is taken at its word"


def test_too_few_gpus_are_an_input_error(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(InputError, match=r"need 4 GPUs .* and 2 are there"):
        share_of_gpus(None, 2, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": Path("nowhere")}, "--model nowhere holds no config.json"),
        ({"host": "0.0.0.0"}, "means every interface"),
        ({"host": "192.0.2.1"}, "give an address of this machine as --host"),
        ({"port": 65535}, "port 65536 does not exist"),
        ({"extra": ("--api-key", "x")}, "--api-key after -- is decided by serve_rollouts itself"),
        ({"extra": ("--admin-api-key=x",)}, "--admin-api-key=x after --"),
        ({"extra": ("--config", "x")}, "--config after --"),
    ],
)
def test_what_could_only_fail_later_is_an_input_error(tmp_path, changes, message):
    (tmp_path / "config.json").write_text("{}")
    node = replace(NODE, host="127.0.0.1", port=free_port(), num_engines=1, model=tmp_path)
    check_node(node)
    with pytest.raises(InputError, match=message):
        check_node(replace(node, num_engines=2 if "port" in changes else 1, **changes))


def test_there_is_one_way_to_install_the_plugin_and_every_place_tells_it(tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho no sglang >&2\nexit 1\n")
    interpreter.chmod(0o755)
    with pytest.raises(InputError, match=re.escape(INSTALL_PLUGIN)):
        sglang_gpus(interpreter)
    for file in ("dapo_mega/engines/README.md", "tools/install_sglang.sh"):
        text = (Path(__file__).resolve().parents[4] / file).read_text()
        assert INSTALL_PLUGIN in text
        assert "--no-deps ." not in text, "a copy would stay behind when the project changes"
