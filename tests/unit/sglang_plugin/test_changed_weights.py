"""What has changed reaches an engine's parameters, whatever its loader does with it, and nothing else does."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dapo_mega.engines.sglang.weight_protocol import (
    checksum,
    find_changes,
    most_packed_bytes,
    pack_changes,
    unpack_changes,
)
from dapo_mega.sglang_plugin.receiving import ChangedWeights
from dapo_mega.types import WeightBucket, WeightSpec
from dapo_mega.weight_sync.encodings import DeltaEncoding

NAMES = ("q", "kv", "bias", "scalar")
SHAPES = ((12, 8), (4, 8), (7,), (1,))


def old_and_new(seed=0, dtype=torch.bfloat16):
    random = torch.Generator().manual_seed(seed)
    old = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in zip(NAMES, SHAPES, strict=True)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["q"][3, 4] += 1
    new["q"][7, 2:5] *= 2
    new["kv"][3, 7] = 0.0
    new["scalar"] += 1
    return old, new


class Received:
    """A group whose broadcasts bring what was packed."""

    def __init__(self, chunks):
        self._chunks = list(chunks)

    def broadcast(self, tensor, root):
        tensor.copy_(self._chunks.pop(0))
        return self

    def wait(self):
        pass


def bucket_of(tensors):
    specs = tuple(WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    return WeightBucket(0, specs, iter(tensors.values()), is_last=True)


def changed_weights(old, new):
    encoding = DeltaEncoding(torch.bfloat16)
    encoding.encode(bucket_of(old))
    return ChangedWeights(Received(encoding.encode(bucket_of(new))), "cpu", encoding.planned(bucket_of(new)).specs)


def load(weights, parameters):
    """As the simplest loader does."""
    for name, tensor in weights:
        parameters[name].copy_(tensor)
    return weights.written()


def test_changes_make_the_new_weights_and_leave_alone_what_stays():
    old, new = old_and_new()
    weights = changed_weights(old, new)
    disturbed = {name: tensor.clone() for name, tensor in old.items()}
    disturbed["q"][0, 0] = 99.0
    assert "q" in weights.faults(load(weights, disturbed))
    assert disturbed["q"][0, 0] == 99.0  # It was not sent, so it was not written.
    written = load(weights, old)
    assert all(torch.equal(old[name], new[name]) for name in NAMES)
    assert weights.faults(written) == []


LOADERS = {
    "slices": lambda q, patch: q[4:8].copy_(patch.narrow(0, 4, 4)),
    "assigned": lambda q, patch: q.__setitem__(slice(4, 8), patch[4:8]),
    "chunk": lambda q, patch: q[4:8].copy_(patch.chunk(3, dim=0)[1]),
    "columns": lambda q, patch: q[:, 2:5].copy_(patch[:, 2:5].contiguous()),
    "reshaped": lambda q, patch: q.view(6, 16).copy_(patch.reshape(6, 16)),
    "transposed": lambda q, patch: q.t().copy_(patch.t()),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_parts_of_a_change_go_where_a_loader_puts_them(kind):
    old, new = old_and_new()
    (_, patch), *_ = changed_weights(old, new)
    expected = old["q"].clone()
    LOADERS[kind](expected, new["q"])
    LOADERS[kind](old["q"], patch)
    assert torch.equal(old["q"], expected)


def test_fused_parameters_of_another_dtype_take_changes_of_both_tensors():
    old, new = old_and_new()
    weights = changed_weights(old, new)
    (_, q), (_, kv), (_, bias), (_, scalar) = weights
    whole_and_part = torch.cat([old["scalar"], old["bias"]])
    whole_and_part.copy_(torch.cat([scalar, bias]))
    assert torch.equal(whole_and_part, torch.cat([new["scalar"], new["bias"]]))
    fused = torch.cat([old["q"], old["kv"]]).float()
    fused.copy_(torch.cat([q, kv]))
    assert torch.equal(fused, torch.cat([new["q"], new["kv"]]).float())
    fused = torch.cat([old["q"], old["kv"]])
    fused.copy_(torch.cat([q, kv]))
    assert weights.written()[-1] == (("q", "kv"), int(checksum(torch.cat([new["q"], new["kv"]]))), 16 * 8)


def test_loaders_that_copy_in_threads_and_in_inference_mode_take_changes():
    old, new = old_and_new()
    weights = changed_weights(old, new)
    with ThreadPoolExecutor(2) as executor:
        tasks = [executor.submit(old[name].copy_, tensor) for name, tensor in weights]
    assert all(task.result(timeout=10) is not None for task in tasks)
    assert all(torch.equal(old[name], new[name]) for name in NAMES)
    with torch.inference_mode():
        old, _ = old_and_new()
        assert weights.faults(load(weights, old)) == []


def test_an_engines_processes_account_for_parts_and_copies_together():
    old, new = old_and_new()
    weights = changed_weights(old, new)
    parts = []
    for rank in range(2):
        for name, tensor in weights:
            if name == "q":  # Cut in two; everything else is on both.
                old[name][6 * rank : 6 * rank + 6].copy_(tensor[6 * rank : 6 * rank + 6])
            else:
                old[name].copy_(tensor)
        parts += weights.written()
    assert weights.faults(parts) == []
    assert weights.faults([part for part in parts if "kv" not in part.names]) == ["kv"]
    damaged = [part._replace(checksum=part.checksum + 1) if "kv" in part.names else part for part in parts]
    assert weights.faults(damaged) == ["kv"]


def test_only_what_has_changed_in_bf16_is_sent():
    encoding = DeltaEncoding(torch.bfloat16)
    weights = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), "norm": torch.ones(64)}
    header, vector = 2 * 2 * 8, 64 * 4
    full = encoding.encode(bucket_of(weights))
    specs = encoding.planned(bucket_of(weights)).specs
    assert [spec.dtype for spec in specs] == [torch.bfloat16, torch.float32]
    assert full[1].nbytes == header + 64 * 64 * 2 + vector
    assert int(full[0].view(torch.int64)) == full[1].nbytes
    weights["w"] += 1e-9  # Less than bf16 can hold.
    assert encoding.encode(bucket_of(weights))[1].nbytes == header
    weights["w"][0, :8] *= 2
    changes = encoding.encode(bucket_of(weights))
    assert changes[1].nbytes == header + 8 * (4 + 2)
    change, _ = unpack_changes(changes[1], specs)
    assert change.places.tolist() == list(range(8))
    assert torch.equal(change.values, weights["w"][0, :8].bfloat16())
    weights["w"] *= 2
    assert encoding.encode(bucket_of(weights))[1].nbytes == header + 64 * 64 * 2
    encoding.start_over()
    assert encoding.encode(bucket_of(weights))[1].nbytes == header + 64 * 64 * 2 + vector


def test_signs_of_zero_and_single_values_are_not_forgotten():
    zero = torch.zeros(40, 40)
    places, values = find_changes(-zero, zero)
    assert places is None
    assert torch.equal(values, -zero)
    negative = zero.clone()
    negative[0, 3] = -0.0
    places, values = find_changes(negative, zero)
    assert places.tolist() == [3]
    assert values.signbit().all()
    assert find_changes(torch.ones(1), torch.ones(1))[0] is None
    assert find_changes(torch.ones(5, dtype=torch.int64), torch.ones(5, dtype=torch.int64))[0] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_packed_comes_out_at_every_size(dtype):
    random = torch.Generator().manual_seed(1)
    new = [torch.randn(shape, generator=random).to(dtype) for shape in ((3, 5), (17,), (1,), (9, 9))]
    held = [tensor.clone() for tensor in new]
    held[0][1, 1] = 0
    held[3][4:6, 3] = 0
    changes = [find_changes(*pair) for pair in zip(new, held, strict=True)]
    specs = [WeightSpec(name, dtype, tuple(tensor.shape)) for name, tensor in zip("abcd", new, strict=True)]
    for got, (places, values), tensor in zip(
        unpack_changes(pack_changes(changes, [checksum(tensor) for tensor in new]), specs), changes, new, strict=True
    ):
        assert torch.equal(got.values, values)
        assert got.places is None if places is None else torch.equal(got.places, places)
        assert got.checksum == int(checksum(tensor))


@pytest.mark.parametrize("said", [-1, 2**62, 10**9])
def test_more_changes_than_there_can_be_are_not_made_room_for(said):
    old, _ = old_and_new()
    weights = ChangedWeights(Received([torch.tensor([said]).view(torch.uint8)]), "cpu", bucket_of(old).specs)
    with pytest.raises(RuntimeError, match=f"{said} bytes of changes are said to come, and there can be"):
        list(weights)


def test_the_most_that_changes_take_is_enough_for_all_values():
    for dtype in (torch.bfloat16, torch.float32):
        old, new = old_and_new(dtype=dtype)
        specs = bucket_of(old).specs
        for changes in (old, {name: tensor + 1 for name, tensor in new.items()}):
            packed = pack_changes([find_changes(changes[name], None) for name in NAMES], [torch.tensor(0)] * len(NAMES))
            assert packed.nbytes <= most_packed_bytes(specs)
