"""A full update that misses a parameter, or brings a tensor without a place, is told; loaders work as without that."""

import pytest
import torch

from dapo_mega.sglang_plugin.receiving import LoadTrace

SHAPE = (6, 6)
NAMES = ("gate", "up", "down", "wide")


def values_of(version):
    random = torch.Generator().manual_seed(version)
    return {name: torch.randn(SHAPE, generator=random) for name in NAMES}


class Model:
    """Keeps gate and up in one parameter, down transposed, and wide in bf16."""

    def __init__(self):
        self.gate_up = torch.zeros(12, 6)
        self.down = torch.zeros(6, 6)
        self.wide = torch.zeros(SHAPE, dtype=torch.bfloat16)

    def load(self, weights):
        for name, tensor in weights:
            if name == "gate":
                self.gate_up[:6].copy_(tensor)
            elif name == "up":
                self.gate_up.narrow(0, 6, 6).copy_(tensor)
            elif name == "down":
                self.down.copy_(tensor.t())
            else:
                for part in range(2):
                    self.wide.chunk(2)[part].copy_(tensor.chunk(2)[part])

    def holds(self, version):
        new = values_of(version)
        return (
            torch.equal(self.gate_up, torch.cat([new["gate"], new["up"]]))
            and torch.equal(self.down, new["down"].t())
            and torch.equal(self.wide, new["wide"].bfloat16())
        )


class Fusing(Model):
    """Copies gate and up together, has a head and a scale that nobody sends, and no place for `wide`."""

    def __init__(self):
        super().__init__()
        self.head, self.scale = torch.zeros(3, 2), torch.zeros(1)

    def load(self, weights):
        tensors = dict(weights)
        self.gate_up.copy_(torch.cat([tensors["gate"], tensors["up"]]))
        self.down.copy_(tensors["down"].t())


def update(model, trace, version):
    """What a session finds that brings the weights of the version."""
    trace.begin()
    model.load((name, trace.traced(name, tensor)) for name, tensor in values_of(version).items())
    return trace.differences(vars(model).items())


def test_a_model_that_fits_gets_its_weights_and_has_no_differences():
    model, trace = Model(), LoadTrace()
    for version in range(2):
        assert update(model, trace, version) == ([], set())
        assert model.holds(version)


def test_unreached_parameters_and_tensors_without_a_place_are_named():
    model, trace = Fusing(), LoadTrace()
    for version in range(2):
        assert update(model, trace, version) == (["wide [6, 6]", "head [3, 2]"], {"wide"})


def test_what_an_earlier_session_brought_does_not_count():
    model, trace = Model(), LoadTrace()
    assert update(model, trace, 0) == ([], set())
    trace.traced("extra", torch.zeros(SHAPE))
    assert trace.differences(vars(model).items()) == ([], {"extra"})
    trace.begin()
    model.load([("down", trace.traced("down", values_of(1)["down"]))])
    assert trace.differences(vars(model).items()) == (["gate_up [12, 6]", "wide [6, 6]"], set())


def test_single_values_need_not_be_copied():
    trace = LoadTrace()
    model = Model()
    update(model, trace, 0)
    assert trace.traced("scale", torch.tensor([3.5])).item() == 3.5
    assert trace.differences([*vars(model).items(), ("scale", torch.zeros(1))]) == ([], set())


@pytest.mark.parametrize("use", [lambda gate: gate[0, 0].item(), lambda gate: (gate * 2).content[0, 0] / 2])
def test_a_loader_can_compute_with_what_it_gets(use):
    gate = values_of(0)["gate"]
    assert use(LoadTrace().traced("gate", gate)) == gate[0, 0]


def test_sessions_without_traced_weights_are_not_reported():
    model, trace = Fusing(), LoadTrace()
    trace.begin()
    assert trace.differences(vars(model).items()) == ([], set())
    trace.begin()
    trace.miss()
    model.load((name, trace.traced(name, tensor)) for name, tensor in values_of(0).items())
    assert trace.differences(vars(model).items()) == ([], set())
    assert update(model, trace, 1) != ([], set())


def test_a_loader_that_cannot_be_traced_gets_plain_tensors():
    model, trace = Fusing(), LoadTrace()
    assert update(model, trace, 0) != ([], set())
    trace.close()
    assert trace.differences(vars(model).items()) == ([], set())
    assert type(trace.traced("gate", torch.zeros(SHAPE))) is torch.Tensor
    assert update(model, trace, 1) == ([], set())
