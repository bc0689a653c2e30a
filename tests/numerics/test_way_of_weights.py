"""The way of one tensor, from the policy's parameter to an engine's loader, is short: the page lists its functions."""

import re
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dapo_mega
from dapo_mega.config import ModelConfig, OptimizerConfig, ParallelConfig, WeightSyncConfig
from dapo_mega.engines.sglang.weight_protocol import PlanFormat, UpdatePlan
from dapo_mega.megatron.gathering import WeightGatherer, _Transfer
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.sglang_plugin.receiving import PlannedWeights, load_weights, receive_weights
from dapo_mega.weight_sync.broadcast import BroadcastSender, WeightCommands
from dapo_mega.weight_sync.update import EngineRoute, Update
from tests.distributed.tiny import make_model

PACKAGE = Path(dapo_mega.__file__).parent
PAGE = PACKAGE / "engines" / "README.md"
MOST_FUNCTIONS, MOST_FILES = 40, 6
WINDOW_BYTES = 2**20
GIVERS = (Iterator, WeightGatherer, MegatronPolicy, _Transfer, PlannedWeights)


class Way:
    """The functions of the package that are on the stack when one of them has a tensor, and those that return what
    gives it, while it is set as profiler. Commands are obeyed in between."""

    def __init__(self):
        self.functions = {}

    def __call__(self, frame, event, returned):
        if event == "return" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            if any(map(has_tensor, [returned, *frame.f_locals.values()])):
                while frame:
                    self.add(frame.f_code)
                    frame = frame.f_back
            elif isinstance(returned, GIVERS):
                self.add(frame.f_code)

    def add(self, code):
        path, name = Path(code.co_filename), code.co_qualname.replace(".<locals>", "")
        if path.is_relative_to(PACKAGE) and path.name != "commands.py" and "<" not in name:
            self.functions.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(name)

    def __enter__(self):
        sys.setprofile(self)

    def __exit__(self, *_):
        sys.setprofile(None)


def has_tensor(value, depth=2):
    if isinstance(value, list | tuple | dict) and depth:
        values = value.values() if isinstance(value, dict) else value
        return any(has_tensor(each, depth - 1) for each in list(values)[:4])
    return isinstance(value, torch.Tensor) or any(
        getattr(value, name, None) is not None for name in ("tensors", "memory")
    )


class Wire:
    """One end of an engine's group, and then the other."""

    def __init__(self):
        self.chunks = deque()
        self.is_sending = True

    def broadcast(self, tensor, root):
        if self.is_sending:
            self.chunks.append(tensor.clone())
        else:
            tensor.copy_(self.chunks.popleft())
        return self

    def is_completed(self):
        return True

    def wait(self): ...


@pytest.fixture
def policy(tmp_path):
    processes = start_processes(ParallelConfig(), 0)
    model = ModelConfig(path=str(make_model(tmp_path, tied=False)), dtype="fp32")
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    settings = {"temperature": 1.0, "updates_per_step": 1, "num_steps": 1}
    yield MegatronPolicy(model, ParallelConfig(), optimizer, processes, **settings)
    stop_processes()


def test_a_reader_passes_few_functions_in_few_files_and_the_page_lists_them(policy, monkeypatch):
    wire, way, held = Wire(), Way(), {}
    monkeypatch.setattr("dapo_mega.weight_sync.broadcast.join_group", lambda *_: wire)
    commands = WeightCommands(None)
    commands.policy = policy
    commands.sender = BroadcastSender(policy.processes, WeightSyncConfig())
    plan = UpdatePlan(1, WINDOW_BYTES, tuple(map(tuple, commands.weight_plan(True))))
    route = EngineRoute("http://engine", 0, 0, "g", 2, joins=True)
    target = SimpleNamespace(has_plugin=True, url=route.url)
    with way:
        commands.send_weights(Update(1, 1, "1", (target,), frozenset(), True, (route,)), ())
    wire.is_sending = False
    model = torch.nn.Module()
    updater = SimpleNamespace(device="cpu", _model_update_group={"g-0": wire}, get_model=lambda: model)

    def load(updater, weights):
        for name, tensor in weights:
            held[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
            held[name].copy_(tensor)
        return True, ""

    request = {"group_name": "g", "load_format": str(PlanFormat(plan.digest, 0, plan.text))}
    with way:
        assert load_weights(load, updater, receive_weights(None, updater, **request)) == (True, "")
    exact = {name: tensor for bucket in policy.weights(WINDOW_BYTES) for name, tensor in bucket}
    assert held.keys() == exact.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in exact.items())

    section = PAGE.read_text().split("### The way of one tensor")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(\S+\.py)` \| (.*) \|$", section, re.MULTILINE)
    assert {file: set(re.findall("`(.+?)`", functions)) for file, functions in rows} == way.functions
    assert sum(map(len, way.functions.values())) <= MOST_FUNCTIONS
    assert len(way.functions) <= MOST_FILES
