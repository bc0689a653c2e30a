"""Weights are received where the engine keeps them as soon as that is known, and end up right in any case."""

import pytest
import torch

from dapo_mega.sglang_plugin.homes import Homes
from dapo_mega.sglang_plugin.receiving import ArrivingWeights
from dapo_mega.weight_sync.wire import PiecesFormat, tensor_specs

SHAPE = (6, 6)


class Group:
    """Its broadcasts bring the tensors of a version in turn; `places` is where they went."""

    def __init__(self, version):
        self._values = iter(values_of(version).values())
        self.places = []

    def broadcast(self, tensor, root):
        num_tensors = tensor.nbytes // (SHAPE[0] * SHAPE[1] * 4)
        tensor.copy_(torch.cat([next(self._values).flatten().view(torch.uint8) for _ in range(num_tensors)]))
        self.places.append(tensor.data_ptr())
        return self

    def wait(self):
        pass


def values_of(version):
    random = torch.Generator().manual_seed(version)
    return {name: torch.randn(SHAPE, generator=random) for name in ("gate", "up", "down", "wide")}


class Model:
    """Keeps gate and up in one parameter, down transposed, and wide in bf16."""

    def __init__(self):
        self.gate_up = torch.zeros(12, 6)
        self.down = torch.zeros(6, 6)
        self.wide = torch.zeros(SHAPE, dtype=torch.bfloat16)

        self.given = []

    def parameters(self):
        return [self.gate_up, self.down, self.wide]

    def load(self, weights):
        self.given = []
        for name, tensor in weights:
            self.given.append(name)
            if name == "gate":
                self.gate_up[:6].copy_(tensor)
            elif name == "up":
                self.gate_up.narrow(0, 6, 6).copy_(tensor)
            elif name == "down":
                self.down.copy_(tensor.t())
            else:
                self.wide.copy_(tensor)

    def holds(self, version):
        new = values_of(version)
        return (
            torch.equal(self.gate_up, torch.cat([new["gate"], new["up"]]))
            and torch.equal(self.down, new["down"].t())
            and torch.equal(self.wide, new["wide"].bfloat16())
        )


def update(model, homes, version, piece_lengths=(1, 1, 1, 1)):
    """The model takes the weights of the version; where pieces were received, by their first tensor."""
    group = Group(version)
    names = list(values_of(version))
    specs = tensor_specs(names, ["float32"] * len(names), [SHAPE] * len(names))
    homes.start(model.parameters())
    weights = ArrivingWeights(group, "cpu", specs, PiecesFormat(piece_lengths, 0), homes)
    model.load(weights)
    homes.loaded()
    firsts = [sum(piece_lengths[:number]) for number in range(len(piece_lengths))]
    return dict(zip((names[first] for first in firsts), group.places, strict=True))


def test_whole_contiguous_tensors_arrive_in_their_parameters_from_the_second_update_on():
    model, homes = Model(), Homes()
    places = [update(model, homes, version) for version in range(3)]
    assert model.holds(2)
    half = model.gate_up[6:].data_ptr()
    assert [each["gate"] == model.gate_up.data_ptr() for each in places] == [False, True, True]
    assert [each["up"] == half for each in places] == [False, True, True]
    assert all(each["down"] != model.down.data_ptr() and each["wide"] != model.wide.data_ptr() for each in places)


def test_a_loader_is_given_a_tensor_until_it_has_only_copied_it_from_its_home_to_itself():
    model, homes = Model(), Homes()
    given, are_past = [], []
    for version in range(4):
        update(model, homes, version)
        given.append(model.given)
        are_past.append(homes.is_past_loader)
        homes.end_update(model.parameters())
        assert model.holds(version)
    everything = list(values_of(0))
    assert given == [everything, everything, ["down", "wide"], ["down", "wide"]]
    assert are_past == [False, False, True, True]
    assert not homes.is_past_loader


@pytest.mark.parametrize(("piece_lengths", "goes_home"), [((2, 1, 1), True), ((3, 1), False), ((1, 2, 1), False)])
def test_a_piece_of_several_tensors_goes_home_where_these_lie_in_a_row(piece_lengths, goes_home):
    model, homes = Model(), Homes()
    for version in range(3):
        places = update(model, homes, version, piece_lengths)
        assert model.holds(version)
    second = list(places.values())[1]
    received_in_parameter = places["gate"] if piece_lengths[0] > 1 else second
    start = model.gate_up.data_ptr()
    assert (start <= received_in_parameter < start + model.gate_up.nbytes) == goes_home


def test_parameters_that_have_moved_still_get_their_values():
    model, homes = Model(), Homes()
    update(model, homes, 0)
    is_given = []
    for version in range(1, 7):
        moved = version in (1, 4)
        if moved:
            model.gate_up = torch.zeros(12, 6)
        assert (update(model, homes, version)["gate"] == model.gate_up.data_ptr()) != moved
        assert model.holds(version)
        is_given.append("gate" in model.given)
    assert is_given == [True, True, False] * 2


def test_memory_that_is_no_parameter_any_more_is_given_up():
    model, homes = Model(), Homes()
    update(model, homes, 0)
    loaded = model.gate_up
    model.gate_up = loaded.clone()  # As a server does that packs what it has loaded.
    homes.end_update(model.parameters())
    places = update(model, homes, 1)
    assert loaded.data_ptr() not in (places["gate"], places["up"])
    assert model.holds(1)
    homes.end_update(model.parameters())
    assert update(model, homes, 2)["gate"] == model.gate_up.data_ptr()


def test_a_parameter_that_is_another_view_of_its_memory_is_loaded_anew():
    class Turning(Model):
        """Turns what it has loaded around, as a server does for its kernels, and back before the next update."""

        def turn(self):
            self.gate_up = self.gate_up.t()

    model, homes = Turning(), Homes()
    for version in range(4):
        update(model, homes, version)
        assert model.holds(version)
        assert "gate" in model.given
        model.turn()
        homes.end_update(model.parameters())
        model.turn()


class Using(Model):
    """Does something with the tensors besides."""

    def __init__(self, use):
        super().__init__()
        self._use = use
        self.output = torch.zeros(SHAPE)
        self.used = None

    def parameters(self):
        return [*super().parameters(), self.output]

    def load(self, weights):
        weights = dict(weights)
        super().load(weights.items())
        self.used = self._use(weights, self.output)


def copied(weights, output):
    output.copy_(weights["gate"])
    return output


def copied_in_part(weights, output):
    output[:2].copy_(weights["gate"][:2])
    return output[:2]


USES = {
    "copied": copied,
    "copied in part": copied_in_part,
    "fused": lambda weights, _: torch.stack([weights["down"], weights["gate"]]).content[1],
    "computed with": lambda weights, _: (weights["gate"] * 2).content / 2,
    "a number": lambda weights, _: torch.tensor([[weights["gate"][0, 0].item()]]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_loader_that_uses_a_tensor_in_any_other_way_is_always_given_it(use):
    model, homes = Using(use), Homes()
    (spec,) = tensor_specs(["gate"], ["float32"], [SHAPE])
    for version in range(4):
        update(model, homes, version)
        assert model.holds(version)
        rows, columns = model.used.shape
        assert torch.equal(model.used, values_of(version)["gate"][:rows, :columns])
        assert "gate" in model.given
        assert version == 0 or homes.find(spec) is None
    assert "up" not in model.given


def test_an_update_that_breaks_off_decides_nothing():
    model, homes = Model(), Homes()
    update(model, homes, 0)
    homes.start(model.parameters())
    names = list(values_of(1))
    specs = tensor_specs(names, ["float32"] * len(names), [SHAPE] * len(names))
    next(iter(ArrivingWeights(Group(1), "cpu", specs, PiecesFormat((1, 1, 1, 1), 0), homes)))
    update(model, homes, 2)
    assert "gate" in model.given
    update(model, homes, 3)
    assert "gate" not in model.given
    assert model.holds(3)


def test_a_loader_that_clears_before_it_copies_is_found_out_before_it_serves():
    class Clearing(Model):
        def load(self, weights):
            weights = list(weights)
            self.gate_up.zero_()
            super().load(weights)

    model, homes = Clearing(), Homes()
    update(model, homes, 0)
    assert model.holds(0)
    with pytest.raises(RuntimeError, match="changes the parameter of gate before it copies to it"):
        update(model, homes, 1)
    homes.close()
    for version in (1, 2):
        update(model, homes, version)
        assert model.holds(version)


def test_closed_homes_give_the_loader_plain_tensors():
    homes = Homes()
    homes.close()
    specs = tensor_specs(["gate"], ["float32"], [SHAPE])
    ((_, tensor),) = ArrivingWeights(Group(0), "cpu", specs, PiecesFormat((1,), 0), homes)
    assert type(tensor) is torch.Tensor
