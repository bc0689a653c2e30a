"""Weights are received where the engine keeps them as soon as that is known, and end up right in any case."""

import pytest
import torch

from dapo_mega.engines.sglang.weight_protocol import PiecesFormat, tensor_specs
from dapo_mega.sglang_plugin.homes import Homes
from dapo_mega.sglang_plugin.receiving import ArrivingWeights

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

    def parameters(self):
        return [self.gate_up, self.down, self.wide]

    def load(self, weights):
        for name, tensor in weights:
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
    homes.keep(model.parameters())
    weights = ArrivingWeights(group, "cpu", specs, PiecesFormat(piece_lengths, 0), homes)
    model.load(weights)
    assert homes.loaded() == []
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
    for version in range(1, 5):
        has_moved = version in (1, 3)
        if has_moved:
            model.gate_up = torch.zeros(12, 6)
        assert (update(model, homes, version)["gate"] == model.gate_up.data_ptr()) != has_moved
        assert model.holds(version)


def test_memory_that_is_no_parameter_any_more_is_given_up():
    model, homes = Model(), Homes()
    update(model, homes, 0)
    loaded = model.gate_up
    model.gate_up = loaded.clone()  # As a server does that packs what it has loaded.
    homes.keep(model.parameters())
    places = update(model, homes, 1)
    assert loaded.data_ptr() not in (places["gate"], places["up"])
    assert model.holds(1)
    homes.keep(model.parameters())
    assert update(model, homes, 2)["gate"] == model.gate_up.data_ptr()


def test_a_parameter_that_is_another_view_of_its_memory_is_loaded_anew():
    class Turning(Model):
        """Turns what it has loaded around, as a server does for its kernels, and back before the next update."""

        def turn(self):
            self.gate_up = self.gate_up.t()

    model, homes = Turning(), Homes()
    for version in range(4):
        assert update(model, homes, version)["gate"] != model.gate_up.data_ptr()
        assert model.holds(version)
        model.turn()
        homes.keep(model.parameters())
        model.turn()


class Using(Model):
    """Does something with gate besides."""

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
        self.used = self._use(weights["gate"], self.output)


def copied(gate, output):
    output.copy_(gate)
    return output


def copied_in_part(gate, output):
    output[:2].copy_(gate[:2])
    return output[:2]


@pytest.mark.parametrize("use", [copied, copied_in_part])
def test_a_tensor_that_is_copied_twice_has_no_home(use):
    model, homes = Using(use), Homes()
    homes_of_gate = model.gate_up.data_ptr(), model.output.data_ptr()
    for version in range(3):
        places = update(model, homes, version)
        assert model.holds(version)
        assert torch.equal(model.used, values_of(version)["gate"][: len(model.used)])
        assert places["gate"] not in homes_of_gate
    assert places["up"] == model.gate_up[6:].data_ptr()


@pytest.mark.parametrize("use", [lambda gate, _: gate[0, 0].item(), lambda gate, _: (gate * 2).content[0, 0] / 2])
def test_a_loader_is_given_what_is_at_home_too(use):
    model, homes = Using(use), Homes()
    for version in range(3):
        places = update(model, homes, version)
        assert model.used == values_of(version)["gate"][0, 0]
    assert places["gate"] == model.gate_up.data_ptr()


class Moving(Model):
    """Keeps gate and up where it likes in its parameter, as a server does that balances experts."""

    def __init__(self):
        super().__init__()
        self.slots = {"gate": [0], "up": [6]}

    def load(self, weights):
        for name, tensor in weights:
            for slot in self.slots.get(name, []):
                self.gate_up[slot : slot + 6].copy_(tensor)


@pytest.mark.parametrize(
    ("slots", "number"),
    [({"gate": [6], "up": [0]}, 1), ({"gate": [0, 6]}, 1), ({"gate": [6]}, 1), ({"gate": [6], "up": [0]}, 2)],
)
def test_a_loader_that_keeps_a_tensor_elsewhere_by_now_fails_and_gets_plain_tensors(slots, number):
    model, homes = Moving(), Homes()
    for version in range(number):
        update(model, homes, version)
    model.slots = slots
    with pytest.raises(RuntimeError, match="no longer copies gate to the same place only"):
        update(model, homes, number)
    homes.close()
    update(model, homes, number)
    for name, places in slots.items():
        for slot in places:
            assert torch.equal(model.gate_up[slot : slot + 6], values_of(number)[name])


def test_a_loader_that_turns_a_tensor_around_by_now_fails():
    class Turning(Model):
        is_turned = False

        def load(self, weights):
            for name, tensor in weights:
                if name == "gate":
                    self.gate_up[:6].copy_(tensor.t() if self.is_turned else tensor)

    model, homes = Turning(), Homes()
    update(model, homes, 0)
    model.is_turned = True
    with pytest.raises(RuntimeError, match="no longer copies gate"):
        update(model, homes, 1)


def test_a_tensor_that_is_kept_as_columns_is_no_home():
    class Columns(Model):
        def __init__(self):
            super().__init__()
            self.gate_up = torch.zeros(6, 12)

        def load(self, weights):
            for name, tensor in weights:
                if name in ("gate", "up"):
                    self.gate_up[:, :6].copy_(tensor) if name == "gate" else self.gate_up[:, 6:].copy_(tensor)

    model, homes = Columns(), Homes()
    for version in range(3):
        update(model, homes, version)
        new = values_of(version)
        assert torch.equal(model.gate_up, torch.cat([new["gate"], new["up"]], dim=1))


def test_a_tensor_at_home_that_is_not_copied_is_told():
    model, homes = Moving(), Homes()
    update(model, homes, 0)
    model.slots = {"up": [6]}
    homes.keep(model.parameters())
    specs = tensor_specs(["gate", "up"], ["float32"] * 2, [SHAPE] * 2)
    model.load(ArrivingWeights(Group(1), "cpu", specs, PiecesFormat((1, 1), 0), homes))
    assert homes.loaded() == ["gate"]


def test_an_update_that_breaks_off_decides_nothing():
    model, homes = Model(), Homes()
    update(model, homes, 0)
    homes.keep(model.parameters())
    specs = tensor_specs(["gate"], ["float32"], [SHAPE])
    next(iter(ArrivingWeights(Group(1), "cpu", specs, PiecesFormat((1,), 0), homes)))
    for version in (2, 3):
        assert update(model, homes, version)["gate"] == model.gate_up.data_ptr()
        assert model.holds(version)


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


class ModelWithMore(Model):
    """Has a head that nobody sends, and no place for `wide`; gate and up come together."""

    def __init__(self):
        super().__init__()
        self.head, self.scale = torch.zeros(3, 2), torch.zeros(1)

    def named_parameters(self):
        return vars(self).items()

    def load(self, weights):
        tensors = dict(weights)
        self.gate_up.copy_(torch.cat([tensors["gate"], tensors["up"]]))
        self.down.copy_(tensors["down"].t())


def test_what_is_not_sent_and_what_has_no_place_is_named():
    model, homes = ModelWithMore(), Homes()
    for version in range(2):
        homes.begin()
        update(model, homes, version, (4,))
        assert homes.differences(model.named_parameters()) == (["wide [6, 6]", "head [3, 2]"], {"wide"})
    homes.begin()
    assert homes.differences(model.named_parameters()) == ([], set())
    update(model, homes, 2, (4,))
    homes.miss()
    assert homes.differences(model.named_parameters()) == ([], set())


def test_nothing_is_missed_of_a_model_that_fits():
    model, homes = Model(), Homes()
    for version in range(3):  # The first time from memory of their own, then at home.
        homes.begin()
        update(model, homes, version)
        assert homes.differences(vars(model).items()) == ([], set())
