"""What trainer and `dapo_mega.sglang_plugin` agree on: the plan of an update, the groups in which it comes, and the
encoding of its buckets; and how answers say log-probs.

chunks     several chunks; each holds the bytes of some of the bucket's tensors, one after the other
changes    two chunks: the number of bytes in the second one, and the second one: first the number of values sent
           of each tensor, then the checksum of each whole tensor, then for each tensor either all values, or the
           positions and the values of the changed ones

Numbers are int64, positions int32; each part starts at a multiple of 8 bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.types import WeightBucket, WeightSpec

PROTOCOL = 9
"""Increase it with every change after which one side no longer understands the other."""
PROTOCOL_FIELD = "dapo_mega_protocol"
"""The field of a server's internal state that holds the plugin's protocol."""
MODEL_FIELD = "dapo_mega_model"
"""The field that holds the server's model configuration: the text of a `config.json`."""
OTHER_MODEL = "its model is not the policy's"
"""The start of an engine's error when the weights sent are another model's."""
ADAPTER = "policy"
"""What engines call the adapter that updates bring, and requests name."""
PACKED_LOGPROBS = "dapo_mega_packed_logprobs"
"""The custom parameter of a request whose log-probs are to come as base64, of its tokens in int32 and then of their
log-probs in float32. In place of SGLang's triples that is 11 bytes a token of 40 to read."""
NUM_TOKENS = "DAPO_MEGA_NUM_TOKENS"
"""The environment variable from which engines know how many ids their tokenizer has; larger ones are not drawn."""
PATIENCE = 4
"""So many time limits of a part of an update a broadcast waits for its other end: an engine that waits for a sender
that waits for an engine that hangs must not fail with that one."""
_PLAN_FORMAT = "dapo_mega_plan:"
_LIMIT = re.compile(r"-within-(\d+)ms(-|$)")
_ALL = -1
_ALIGNMENT = 8
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def limited_group(name: str, limit_s: float) -> str:
    """A process group's name that contains the time limit for joining it, as SGLang has no field for a limit."""
    return f"{name}-within-{max(1, round(1000 * limit_s))}ms"


def limit_of_group(name: str) -> float | None:
    """The limit in seconds that `limited_group` wrote into the name; None if there is none."""
    found = _LIMIT.search(name)
    return int(found[1]) / 1000 if found else None


class EngineGroup(Protocol):
    """A group of one trainer rank with all ranks of one engine: the part of torch's groups that is used here, which
    torch's type stubs lack.

    It exists beside Megatron's and is unknown to `torch.distributed`. Each engine has its own, because a dead or hung
    engine blocks all members of its group: gloo does not notice that a member died during a broadcast, and NCCL cannot
    be interrupted from outside.
    """

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work: ...

    def abort(self) -> None: ...


def join_group(
    store: dist.Store, name: str, size: int, device: torch.device, address: str, timeout_s: float, rank: int = 0
) -> EngineGroup:
    """Join the group `name`. gloo waits for the other members and raises RuntimeError if they do not come in time.

    The store's keys have the prefixes of torch.distributed (2.11 to 2.14), which SGLang uses to join.
    """
    keys = dist.PrefixStore(f"{device.type}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        # torch ends the process at this timeout, so a waiting rank must abort the group earlier.
        nccl._timeout = timedelta(seconds=PATIENCE * timeout_s)
        return cast(EngineGroup, dist.ProcessGroupNCCL(keys, rank, size, nccl))
    make: Any = dist.ProcessGroupGloo
    gloo = make._Options()
    gloo._devices = [make.create_device(hostname=address)]
    gloo._timeout = timedelta(seconds=timeout_s)
    gloo._threads = 1  # Two broadcasts at the same time would share the rate, and the first one be there later.
    group = make(keys, rank, size, gloo)
    group._set_default_timeout(timedelta(seconds=PATIENCE * timeout_s))
    return cast(EngineGroup, group)


class PlannedBucket(NamedTuple):
    """A bucket as engines are told of it: the number of the process of a replica that sends it, and how many of its
    tensors each chunk holds; with `lengths` empty it comes as changes."""

    sender: int
    specs: tuple[WeightSpec, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class UpdatePlan:
    """All buckets of an update, the same for every engine: in each round at most one of each of `num_senders`. Beside
    the chunk that it loads, an engine receives further ones while they fit into `window_bytes`, and at least one.
    `is_adapter`: they are those of the adapter, not of the model."""

    num_senders: int
    window_bytes: int
    rounds: tuple[tuple[PlannedBucket, ...], ...]
    is_adapter: bool = False

    def in_turn(self, turn: int) -> list[PlannedBucket]:
        """The buckets in the order in which the engine number `turn` of a replica receives them. Engines begin a round
        with different senders and go round, so that they do not meet at one."""
        in_turn = partial(steps_to, turn, self.num_senders)
        return [bucket for each in self.rounds for bucket in sorted(each, key=lambda b: in_turn(b.sender))]

    @cached_property
    def text(self) -> str:
        """All of it as JSON."""
        return json.dumps(
            [self.num_senders, self.window_bytes, self.rounds, self.is_adapter],
            default=lambda spec: (spec.name, dtype_name(spec.dtype), spec.shape),
        )

    @classmethod
    def parse(cls, text: str) -> UpdatePlan:
        """The inverse of `text`."""
        num_senders, window_bytes, rounds, is_adapter = json.loads(text)
        buckets = (tuple(PlannedBucket(s, _specs(d), tuple(lengths)) for s, d, lengths in each) for each in rounds)
        return cls(num_senders, window_bytes, tuple(buckets), is_adapter)

    @cached_property
    def digest(self) -> str:
        """Tells the plan from others."""
        return hashlib.blake2b(self.text.encode(), digest_size=16).hexdigest()


def steps_to(turn: int, num_senders: int, sender: int) -> int:
    """After how many other senders the engine number `turn` of a replica comes to this one in a round."""
    return (sender - turn) % num_senders


class PlanFormat(NamedTuple):
    """The load format of a call that brings all buckets of a plan to the engine number `turn` of a replica. The plan's
    `text` may be empty if the engine has had it before."""

    digest: str
    turn: int
    text: str

    def __str__(self) -> str:
        return f"{_PLAN_FORMAT}{self.digest}:{self.turn}:{self.text}"

    @classmethod
    def parse(cls, load_format: str) -> PlanFormat | None:
        """The inverse of `str`; None for any other format."""
        if not load_format.startswith(_PLAN_FORMAT):
            return None
        digest, turn, text = load_format.removeprefix(_PLAN_FORMAT).split(":", 2)
        return cls(digest, int(turn), text)


def group_with(group: str, sender: int) -> str:
    """The name of an engine's process group with one sender; `group` is the engine's."""
    return f"{group}-{sender}"


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of the dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _specs(described: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[WeightSpec, ...]:
    return tuple(WeightSpec(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in described)


def split_specs(specs: Sequence[WeightSpec], chunk_lengths: Sequence[int]) -> list[list[WeightSpec]]:
    """The tensors of each chunk."""
    rest = iter(specs)
    return [[next(rest) for _ in range(length)] for length in chunk_lengths]


def flatten(specs: Iterable[WeightSpec], tensors: Iterable[Tensor]) -> Tensor:
    """[bytes] uint8 in new memory: the tensors one after the other, each copied as soon as `tensors` yields it."""
    flat = torch.empty(0)
    num_bytes = sum(spec.num_bytes for spec in specs)
    start = 0
    for tensor in tensors:
        if start == 0:
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device)
        end = start + tensor.nbytes
        flat[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start = end
    return flat


class ChunkedEncoding:
    """A broadcast for each chunk: an engine loads one while it receives the next ones. A large tensor is its own chunk,
    small neighbours are in one together."""

    def __init__(self, chunk_bytes: float) -> None:
        """A chunk of several tensors is full at `chunk_bytes`; infinity makes one of each bucket, as SGLang expects."""
        self._chunk_bytes = chunk_bytes

    def planned(self, bucket: WeightBucket) -> PlannedBucket:
        """What engines are told of the bucket, whose tensors are not needed."""
        lengths: list[int] = []
        num_bytes = self._chunk_bytes
        for spec in bucket.specs:
            if max(num_bytes, spec.num_bytes) >= self._chunk_bytes:
                lengths.append(0)
                num_bytes = 0
            lengths[-1] += 1
            num_bytes += spec.num_bytes
        return PlannedBucket(bucket.sender, bucket.specs, tuple(lengths))

    def encode(self, bucket: WeightBucket) -> Iterator[Tensor]:
        """The bucket's chunks, each [bytes] uint8 and made when it is read; a tensor alone in one is sent from its own
        memory."""
        remaining = iter(bucket.tensors or ())
        for specs in split_specs(bucket.specs, self.planned(bucket).lengths):
            if len(specs) == 1:
                yield next(remaining).contiguous().flatten().view(torch.uint8)
            else:
                yield flatten(specs, islice(remaining, len(specs)))


def unpacked(chunk: Tensor, specs: Sequence[WeightSpec]) -> Iterator[Tensor]:
    """The tensors of a chunk [bytes] uint8, as views of it."""
    start = 0
    for spec in specs:
        end = start + spec.num_bytes
        yield chunk[start:end].view(spec.dtype).view(spec.shape)
        start = end


def checksum(tensor: Tensor) -> Tensor:
    """The sum of all values' bits, [] int64; it does not change when a tensor is cut, transposed or fused with
    others."""
    return tensor.view(_BITS[tensor.dtype.itemsize]).sum(dtype=torch.int64)


def differing(new: Tensor, held: Tensor) -> Tensor:
    """Where the bits of two tensors of one dtype and shape differ, bool in that shape."""
    bits = _BITS[new.dtype.itemsize]
    return new.view(bits) != held.view(bits)


def find_changes(new: Tensor, held: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """(places [n] int32, values [n]) where the bits of `new` and `held` differ; (None, all values) if that is smaller
    or `held` is None."""
    # A tensor of one value may be read as a number instead of being copied.
    can_have_places = new.is_floating_point() and 1 < new.numel() <= torch.iinfo(torch.int32).max
    if held is None or not can_have_places:
        return None, new
    places = differing(new, held).flatten().nonzero().flatten().int()
    if places.nbytes + len(places) * new.dtype.itemsize >= new.nbytes:
        return None, new
    return places, new.flatten()[places]


def pack_changes(changes: Sequence[tuple[Tensor | None, Tensor]], checksums: Sequence[Tensor]) -> Tensor:
    """[bytes] uint8: the result of `find_changes` for each tensor of a bucket, with the checksums of the whole
    tensors."""
    counts = [_ALL if places is None else len(places) for places, _ in changes]
    device = changes[0][1].device
    parts = [torch.tensor(counts, dtype=torch.int64, device=device), torch.stack(list(checksums))]
    for places, values in changes:
        parts += [values] if places is None else [places, values]
    packed = torch.empty(sum(_aligned(part.nbytes) for part in parts), dtype=torch.uint8, device=device)
    start = 0
    for part in parts:
        packed[start : start + part.nbytes] = part.flatten().view(torch.uint8)
        start += _aligned(part.nbytes)
    return packed


def most_packed_bytes(specs: Sequence[WeightSpec]) -> int:
    """The most that `pack_changes` makes of these tensors: a tensor's changes are never larger than all its values."""
    return sum(spec.num_bytes + 4 * _ALIGNMENT for spec in specs) + 2 * _ALIGNMENT


@dataclass(frozen=True)
class Change:
    """Values of one tensor: all values [shape], or the values [n] at `places` [n] int32. `checksum` is the whole new
    tensor's."""

    values: Tensor
    places: Tensor | None
    checksum: int


def unpack_changes(packed: Tensor, specs: Sequence[WeightSpec]) -> Iterator[Change]:
    """The inverse of `pack_changes`; values are views of `packed`."""
    start = 0

    def take(dtype: torch.dtype, count: int) -> Tensor:
        nonlocal start
        taken = packed[start : start + count * dtype.itemsize].view(dtype)
        start += _aligned(taken.nbytes)
        return taken

    counts = take(torch.int64, len(specs)).tolist()
    checksums = take(torch.int64, len(specs)).tolist()
    for spec, count, expected in zip(specs, counts, checksums, strict=True):
        if count == _ALL:
            yield Change(take(spec.dtype, spec.size).view(spec.shape), None, expected)
        else:
            places = take(torch.int32, count)
            yield Change(take(spec.dtype, count), places, expected)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
