"""Chunks of a bucket are received as there is memory for them, and handed on as they come."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config

from dapo_mega import sglang_plugin
from dapo_mega.engines.sglang.engine_model import described_model
from dapo_mega.engines.sglang.weight_protocol import (
    ADAPTER,
    MODEL_FIELD,
    OTHER_MODEL,
    PROTOCOL,
    PROTOCOL_FIELD,
    PlanFormat,
    PlannedBucket,
    UpdatePlan,
)
from dapo_mega.sglang_plugin.receiving import ArrivingWeights, load_weights, receive_weights
from dapo_mega.types import WeightSpec

NAMES = ("a", "b", "c", "d")
SHAPE = (4, 4)
NUM_BYTES = 4 * 4 * 4
SPECS = tuple(WeightSpec(name, torch.float32, SHAPE) for name in NAMES)
BUCKET = PlannedBucket(0, SPECS, (1,) * len(NAMES))


class Group:
    """Keeps a record of what was begun and waited for; its third broadcast never comes if it `breaks`."""

    def __init__(self, breaks=False):
        self.begun = 0
        self.waited = []
        self._breaks = breaks

    def broadcast(self, tensor, root):
        tensor.view(torch.float32).fill_(self.begun)
        self.begun += 1
        return Work(self, self.begun)


class Work:
    def __init__(self, group, number):
        self._group, self._number = group, number

    def wait(self):
        self._group.waited.append(self._number)
        if self._group._breaks and self._number == 3:
            raise RuntimeError("connection closed by peer")


def arriving(group, window_bytes):
    return ArrivingWeights(group, "cpu", BUCKET, window_bytes)


@pytest.mark.parametrize(("window_bytes", "ahead"), [(0, 1), (NUM_BYTES, 1), (3 * NUM_BYTES - 1, 2), (10**6, 4)])
def test_the_window_limits_chunks_and_each_is_waited_for_alone(window_bytes, ahead):
    group = Group()
    weights = arriving(group, window_bytes)
    assert (group.begun, group.waited) == (ahead, [])
    for number, (name, tensor) in enumerate(weights, start=1):
        assert name == NAMES[number - 1]
        assert torch.equal(tensor, torch.full(SHAPE, number - 1.0))
        assert group.waited == list(range(1, number + 1))
        assert group.begun == min(ahead + number - 1, len(NAMES))
    assert group.begun == len(NAMES)


def test_a_chunk_that_does_not_come_is_told_from_a_loader_that_stops():
    weights = arriving(Group(breaks=True), 10**6)
    with pytest.raises(RuntimeError, match="closed by peer"):
        list(weights)
    assert weights.is_broken
    whole = arriving(Group(), 10**6)
    next(iter(whole))
    assert not whole.is_broken


def test_what_a_loader_leaves_behind_is_received_all_the_same():
    group = Group()
    weights = arriving(group, NUM_BYTES)
    next(iter(weights))  # It stops in the middle of the first chunk.
    assert group.begun == 1
    weights.drain()
    assert group.waited == [1, 2, 3, 4]
    broken = Group(breaks=True)
    arriving(broken, NUM_BYTES).drain()
    assert broken.waited == [1, 2, 3]


def test_what_is_no_longer_there_cannot_be_loaded_again():
    weights = arriving(Group(), 10**6)
    assert len(list(weights)) == len(NAMES)
    with pytest.raises(RuntimeError, match="these weights are freed"):
        list(weights)


ONE_BUCKET = UpdatePlan(1, NUM_BYTES, ((BUCKET,),))
PLAN = PlanFormat(ONE_BUCKET.digest, 0, ONE_BUCKET.text)


class Model:
    def __init__(self):
        self.held = {name: torch.zeros(SHAPE) for name in NAMES}

    def named_parameters(self):
        return self.held.items()


class Updater:
    """As much of SGLang's as the hooks use."""

    device = "cpu"

    def __init__(self):
        self._model = Model()
        self._model_update_group = {"g-0": Group(), "g-1": Group()}

    def get_model(self):
        return self._model

    def request(self, load_format=None):
        return {"names": [], "dtypes": [], "shapes": [], "group_name": "g", "load_format": load_format or str(PLAN)}

    def load(self, weights):
        for name, tensor in weights:
            if name in self._model.held:
                self._model.held[name].copy_(tensor)
        return True, ""


def test_a_failing_loader_gets_plain_tensors_and_the_rest_is_received():
    updater = Updater()
    group = updater._model_update_group["g-0"]
    kinds = []

    def load(updater, weights):
        for _, tensor in weights:
            kinds.append(type(tensor))
            if tensor.__class__ is not torch.Tensor:
                return False, "no tensor of mine"
        return True, ""

    weights = receive_weights(None, updater, **updater.request())
    assert load_weights(load, updater, weights) == (False, "no tensor of mine")
    assert group.waited == [1, 2, 3, 4]
    weights = receive_weights(None, updater, **updater.request())
    assert load_weights(load, updater, weights) == (True, "")
    assert kinds[1:] == [torch.Tensor] * 4


@pytest.fixture
def _alone(monkeypatch):
    """The engine has one process."""
    monkeypatch.setattr(sglang_plugin, "everywhere", lambda found: [found])


def answer_to(updater, *load_formats):
    """What the trainer hears at the end of a session with a bucket in each of these formats."""
    sglang_plugin._begin(None, updater)
    for load_format in load_formats:
        weights = receive_weights(lambda *_, **__: [], updater, **updater.request(load_format))
        assert load_weights(Updater.load, updater, weights) == (True, "")
    sglang_plugin._end(lambda *_, **__: None, updater, run_post_load=False)
    output = SimpleNamespace(success=True, message="")
    manager = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(weight_updater=updater)))
    sglang_plugin._answer(output, manager)
    return output.success, output.message


@pytest.mark.usefixtures("_alone")
def test_a_session_with_weights_of_another_model_is_refused_at_its_end():
    updater = Updater()
    assert answer_to(updater, str(PLAN)) == (True, "")
    held = updater.get_model().held
    assert held["d"].unique().tolist() == [3.0]
    del held["b"]
    held["head"] = torch.zeros(3, 2)
    difference = "it has head [3, 2], for which no weights come; it has no place for b"
    assert answer_to(updater, str(PLAN)) == (False, f"{OTHER_MODEL}: {difference}")
    # Of what comes in SGLang's own form it is not seen where it goes.
    assert answer_to(updater, str(PLAN), "flattened_bucket") == (True, "")


@pytest.mark.parametrize(("algorithm", "announced"), [(None, {PROTOCOL_FIELD: PROTOCOL}), ("EAGLE", {})])
def test_an_engine_with_a_draft_model_is_without_the_plugin(algorithm, announced):
    state = SimpleNamespace(internal_state={})
    model_config = SimpleNamespace(hf_config=Qwen2Config(num_hidden_layers=5))
    scheduler = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm=algorithm), model_config=model_config)
    sglang_plugin._announce(state, scheduler, "request")
    assert described_model([state.internal_state])["num_hidden_layers"] == 5
    del state.internal_state[MODEL_FIELD]
    assert state.internal_state == announced


def test_ranks_together_say_what_is_missing_or_has_no_place():
    ranks = [(["head [3, 2]"], {"expert_0", "bias"}), (["head [3, 2]", *"abcd"], {"expert_1", "bias"})]
    difference = "it has head [3, 2], a, b, c and 1 more, for which no weights come; it has no place for bias"
    assert sglang_plugin._model_difference(ranks) == f"{OTHER_MODEL}: {difference}"
    assert sglang_plugin._model_difference([([], {"expert_0"}), ([], {"expert_1"})]) == ""


def two_rounds():
    """Of two senders, the second of which has a bucket in the first round only; each bucket is one of the tensors."""
    first, second, third = (PlannedBucket(sender, (SPECS[i],), (1,)) for i, sender in enumerate((0, 1, 0)))
    return UpdatePlan(2, NUM_BYTES, ((first, second), (third,)))


@pytest.mark.parametrize(("turn", "order"), [(0, "abc"), (1, "bac"), (2, "abc"), (3, "bac")])
def test_engines_load_all_buckets_of_a_call_in_their_turn(turn, order):
    plan, updater, loaded = two_rounds(), Updater(), []

    def load(updater, weights):
        loaded.extend(name for name, _ in weights)
        return True, ""

    for text in (plan.text, ""):  # The second time it knows the plan.
        request = updater.request(str(PlanFormat(plan.digest, turn, text)))
        assert load_weights(load, updater, receive_weights(None, updater, **request)) == (True, "")
    assert "".join(loaded) == 2 * order
    assert [group.begun for group in updater._model_update_group.values()] == [2 * 2, 2 * 1]


def test_no_bucket_is_received_after_one_that_fails():
    plan, updater = two_rounds(), Updater()
    weights = receive_weights(None, updater, **updater.request(str(PlanFormat(plan.digest, 1, plan.text))))
    assert load_weights(lambda updater, weights: (False, "no"), updater, weights) == (False, "no")
    assert [group.begun for group in updater._model_update_group.values()] == [0, 1]


class Manager:
    """SGLang's, which knows an adapter by this name."""

    def __init__(self, name):
        self.lora_refs = {"id": SimpleNamespace(lora_name=name, lora_id="id")}
        self.configs = {"id": SimpleNamespace(hf_config={"r": 4})}
        self.calls = []

    def unload_lora_adapter(self, adapter):
        self.calls.append(adapter.lora_id)

    def load_lora_adapter_from_tensors(self, adapter, tensors, config):
        self.calls.append(
            (adapter.lora_id, {name: tensor.unique().tolist() for name, tensor in tensors.items()}, config)
        )
        return SimpleNamespace(success=True, error_message="")


@pytest.mark.parametrize(
    ("name", "breaks", "said"),
    [
        (ADAPTER, False, ""),
        (ADAPTER, True, "the adapter did not come: connection closed"),
        ("other", False, "it has no"),
    ],
)
def test_an_adapter_is_replaced_once_all_of_it_has_come(name, breaks, said):
    updater, manager = Updater(), Manager(name)
    updater._model_update_group["g-0"] = Group(breaks)
    updater.get_model_runner = lambda: SimpleNamespace(lora_manager=manager)
    plan = UpdatePlan(1, NUM_BYTES, ((BUCKET,),), is_adapter=True)
    weights = receive_weights(None, updater, **updater.request(str(PlanFormat(plan.digest, 0, plan.text))))
    success, message = load_weights(None, updater, weights)
    assert (success, message.startswith(said)) == (not said, True)
    values = {name: [float(number)] for number, name in enumerate(NAMES)}
    assert manager.calls == ([] if said else ["id", ("id", values, {"r": 4})])


def test_an_engine_that_forgot_the_plan_or_lacks_a_group_says_so_before_it_receives():
    plan, updater = two_rounds(), Updater()
    with pytest.raises(KeyError):
        receive_weights(None, updater, **updater.request(str(PlanFormat("another", 0, ""))))
    del updater._model_update_group["g-1"]
    with pytest.raises(KeyError):
        receive_weights(None, updater, **updater.request(str(PlanFormat(plan.digest, 0, plan.text))))
    assert updater._model_update_group["g-0"].begun == 0


def test_formats_say_the_same_at_both_ends():
    assert PlanFormat.parse(str(PLAN)) == PLAN
    assert PlanFormat.parse("flattened_bucket") is None
    assert UpdatePlan.parse(two_rounds().text) == two_rounds()
