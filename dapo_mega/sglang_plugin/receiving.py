"""Receives the weights of an update on an engine's ranks and loads them: what SGLang's two functions for that become.

From top to bottom: the two hooks; the tensors of a bucket, as they arrive; the record of where the model's loader
copies them, which is compared with the model at a session's end; and with delta sync the changed values only.

A model's loader slices, transposes and fuses tensors before it copies them into parameters, and each rank takes only
its shard. `TracedTensor` and `Patch` go through these steps like the tensors that they wrap. A loader that cannot take
traced tensors gets plain ones from then on, and its model is no longer compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from dapo_mega.engines.sglang.weight_protocol import (
    ADAPTER,
    Change,
    EngineGroup,
    PlanFormat,
    PlannedBucket,
    UpdatePlan,
    checksum,
    group_with,
    most_packed_bytes,
    split_specs,
    unpack_changes,
    unpacked,
)
from dapo_mega.types import WeightSpec

T = TypeVar("T")
Differences = tuple[list[str], set[str]]
"""Parameters that got no copy, with their shapes, and names of tensors that were copied nowhere."""
_traces: WeakKeyDictionary[Any, LoadTrace] = WeakKeyDictionary()  # By model.
_plans: dict[str, UpdatePlan] = {}  # The last one, by its digest.


class PlannedWeights(NamedTuple):
    """The buckets of a call in the order in which they come, each with the group in which it comes."""

    buckets: Sequence[tuple[PlannedBucket, EngineGroup]]
    window_bytes: int
    is_adapter: bool


def receive_weights(receive: Callable[..., Any], updater: Any, **request: Any) -> Any:
    """What `load_weights` loads: the buckets of a plan, or what SGLang has received in a form of its own."""
    call = PlanFormat.parse(request["load_format"] or "")
    if call is None:
        trace_of(updater).miss()
        return receive(updater, **request)
    if call.text:
        _plans.clear()
        _plans[call.digest] = UpdatePlan.parse(call.text)
    plan, groups = _plans[call.digest], updater._model_update_group
    buckets = [(bucket, groups[group_with(request["group_name"], bucket.sender)]) for bucket in plan.in_turn(call.turn)]
    return PlannedWeights(buckets, plan.window_bytes, plan.is_adapter)


def load_weights(load: Callable[..., tuple[bool, str]], updater: Any, weights: Any) -> tuple[bool, str]:
    """Receive and load the buckets of a plan one after the other, up to the first that fails."""
    if not isinstance(weights, PlannedWeights):
        return load(updater, weights)
    if weights.is_adapter:
        return _load_adapter(updater, weights)
    success, message = True, ""
    for bucket, group in weights.buckets:
        if bucket.lengths:
            chunks = ArrivingWeights(group, updater.device, bucket, weights.window_bytes, trace_of(updater))
            success, message = load(updater, chunks)
            if not success and not chunks.is_broken:
                # The loader may not accept traced tensors: it gets plain ones when they are sent again.
                trace_of(updater).close()
            chunks.drain()
        else:
            success, message = _load_changes(load, updater, ChangedWeights(group, updater.device, bucket.specs))
        if not success:
            break
    return success, message


def _load_adapter(updater: Any, weights: PlannedWeights) -> tuple[bool, str]:
    """Give the adapter new matrices; requests under way, which know it by its id, go on with these."""
    trace_of(updater).miss()
    device, window = updater.device, weights.window_bytes
    arriving = (ArrivingWeights(group, device, bucket, window) for bucket, group in weights.buckets)
    try:
        tensors = {name: tensor for bucket in arriving for name, tensor in bucket}
    except RuntimeError as error:
        return False, f"the adapter did not come: {error}"
    manager = updater.get_model_runner().lora_manager
    known = next((adapter for adapter in manager.lora_refs.values() if adapter.lora_name == ADAPTER), None)
    if known is None:
        return False, f"it has no adapter {ADAPTER!r} any more"
    config = manager.configs[known.lora_id].hf_config
    manager.unload_lora_adapter(known)
    answer = manager.load_lora_adapter_from_tensors(known, tensors, config)
    return answer.success, answer.error_message


def _load_changes(load: Callable[..., tuple[bool, str]], updater: Any, weights: ChangedWeights) -> tuple[bool, str]:
    """Also compares checksums of the changed tensors."""
    trace_of(updater).miss()
    success, message = load(updater, weights)
    parts = everywhere(weights.written() if success else None)
    if success and None in parts:
        return False, "not all ranks got the changes"
    faults = weights.faults([part for written in parts if written for part in written]) if success else []
    if faults:
        return False, f"after the update the checksums of these weights are not the trainer's: {', '.join(faults)}"
    return success, message


def everywhere(found: T) -> list[T]:
    """What was found on each tensor-parallel rank. Collective over these ranks."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group.cpu_group
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, found, group=group)
    return everywhere


def trace_of(updater: Any) -> LoadTrace:
    return _traces.setdefault(updater.get_model(), LoadTrace())


@dataclass(frozen=True)
class _Chunk:
    """A chunk of a bucket, which is received into `memory`."""

    specs: Sequence[WeightSpec]
    memory: Tensor
    receipt: dist.Work


class ArrivingWeights:
    """The names and tensors of a bucket; each chunk can be loaded while further chunks arrive. Can be iterated once."""

    def __init__(
        self,
        group: EngineGroup,
        device: str,
        bucket: PlannedBucket,
        window_bytes: int,
        trace: LoadTrace | None = None,
    ) -> None:
        """Posts the first receives, of `window_bytes` or one chunk. `is_broken` is set when one of them fails; `trace`
        sees what the loader copies."""
        self._group = group
        self._device = device
        self._trace = trace
        self._expected = deque(split_specs(bucket.specs, bucket.lengths))
        self._arriving: deque[_Chunk] = deque()
        self._free_bytes = window_bytes
        self._is_read = False
        self.is_broken = False
        with suppress(RuntimeError):  # Raised again by the iteration.
            self._receive()

    def _receive(self) -> None:
        """Post further receives while they fit the window; always at least one."""
        while self._expected:
            num_bytes = sum(spec.num_bytes for spec in self._expected[0])
            if self._arriving and num_bytes > self._free_bytes:
                return
            self._free_bytes -= num_bytes
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._arriving.append(_Chunk(self._expected.popleft(), memory, self._group.broadcast(memory, 0)))

    def _next(self) -> _Chunk | None:
        """Wait for the next chunk; None if there are no more."""
        try:
            self._receive()
            if not self._arriving:
                return None
            chunk = self._arriving.popleft()
            chunk.receipt.wait()
        except RuntimeError:
            self.is_broken = True
            raise
        return chunk

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._is_read:
            raise RuntimeError("these weights are freed: chunks are loaded while they arrive, which works only once")
        self._is_read = True
        while chunk := self._next():
            for spec, tensor in zip(chunk.specs, unpacked(chunk.memory, chunk.specs), strict=True):
                yield spec.name, self._trace.traced(spec.name, tensor) if self._trace else tensor
            self._free_bytes += chunk.memory.nbytes

    def drain(self) -> None:
        """Receive and discard the chunks that the loader did not read, so that the group's next receive matches."""
        with suppress(RuntimeError):
            while not self.is_broken and self._next():
                pass


class Wrapper(Tensor):
    """A model's loader can slice, transpose and fuse it like the tensor `content`; every result is wrapped again.
    `write_to` implements the copy to a plain tensor."""

    content: Tensor

    @classmethod
    def wrapping(cls, content: Tensor) -> Self:
        wrapper: Self = Tensor._make_wrapper_subclass(
            cls,
            content.size(),
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=content.device,
        )
        wrapper.content = content
        return wrapper

    def write_to(self, parameter: Tensor) -> None:
        """Called for `parameter.copy_(self)`."""
        raise NotImplementedError

    def derived(self, content: Tensor, others: list[Self]) -> Self:
        """Wrap `content`, the result of an operation on this tensor and on `others`."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass operations on to `__torch_dispatch__`."""
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], Wrapper):
            args[1].write_to(args[0])
            return args[0]
        if isinstance(args[0], cls) and not kwargs and all(isinstance(value, int) for value in args[1:]):
            content = func(args[0].content, *args[1:])  # A shortcut for the most frequent case, ten times as fast.
            if type(content) is Tensor:
                return args[0].derived(content, [])
        first, *others = [value for value in tree_leaves((args, kwargs)) if isinstance(value, cls)]
        args, kwargs = tree_map_only(Wrapper, lambda wrapper: wrapper.content, (args, kwargs or {}))
        return tree_map_only(Tensor, lambda tensor: first.derived(tensor, others), func(*args, **kwargs))


class LoadTrace:
    """Records what one model's loader does with the weights of an update session."""

    def __init__(self) -> None:
        self._gives_plain_tensors = False
        self._sees_all = True
        self._written: set[int] = set()
        self._unplaced: set[str] = set()

    def begin(self) -> None:
        """Begin a session, which brings all weights unless `miss` is called."""
        self._written.clear()
        self._unplaced.clear()
        self._sees_all = True

    def miss(self) -> None:
        """Record that some weights of this session are not traced, so that its end is not checked."""
        self._sees_all = False

    def close(self) -> None:
        """Give the loader plain tensors from now on."""
        self._gives_plain_tensors = True

    def traced(self, name: str, tensor: Tensor) -> Tensor:
        """The traced or plain tensor to give to the loader."""
        if self._gives_plain_tensors:
            return tensor
        if tensor.numel() > 1:
            self._unplaced.add(name)
        return TracedTensor.of(tensor, name, self)

    def used(self, name: str) -> None:
        """Record that the tensor was copied, or combined with others."""
        self._unplaced.discard(name)

    def written(self, name: str, parameter: Tensor) -> None:
        """Record that the tensor, or a part of it, was copied to the parameter."""
        self.used(name)
        self._written.add(_memory(parameter))

    def differences(self, parameters: Iterable[tuple[str, Tensor]]) -> Differences:
        """The differences at the end of the session, without tensors of one value, which loaders read but do not
        copy."""
        if self._gives_plain_tensors or not self._sees_all or not self._written:
            return [], set()
        unwritten = [
            f"{name} {list(parameter.shape)}"
            for name, parameter in parameters
            if parameter.numel() > 1 and _memory(parameter) not in self._written
        ]
        return unwritten, set(self._unplaced)


class TracedTensor(Wrapper):
    """The tensor `tensor_name`, or a part of it, which reports its copies to `load_trace`."""

    tensor_name: str
    load_trace: LoadTrace

    @classmethod
    def of(cls, content: Tensor, name: str, trace: LoadTrace) -> Self:
        traced = cls.wrapping(content)
        traced.tensor_name, traced.load_trace = name, trace
        return traced

    def derived(self, content: Tensor, others: list[Self]) -> Self:
        for other in others:
            self.load_trace.used(other.tensor_name)
        return self.of(content, self.tensor_name, self.load_trace)

    def write_to(self, parameter: Tensor) -> None:
        parameter.copy_(self.content)
        self.load_trace.written(self.tensor_name, parameter)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Written(NamedTuple):
    """One copy to a parameter: `size` values of the tensors `names` (several if fused). `checksum` is the parameter's
    afterwards, None if its dtype is not the tensors'; until it is `counted`, [] int64 that may be on the device."""

    names: tuple[str, ...]
    checksum: Tensor | int | None
    size: int

    def counted(self) -> Written:
        return self._replace(checksum=None if self.checksum is None else int(self.checksum))


@dataclass(frozen=True)
class _Origin:
    """A patch's source tensors: their names and dtypes, and whether NaN marks unchanged values. Every copy to a
    parameter is added to `writes`."""

    names: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    has_gaps: bool
    writes: list[Written]

    def joined(self, other: _Origin) -> _Origin:
        names = tuple(dict.fromkeys(self.names + other.names))
        return _Origin(names, self.dtypes | other.dtypes, self.has_gaps or other.has_gaps, self.writes)


class Patch(Wrapper):
    """New values of tensors, or of parts of them."""

    origin: _Origin

    @classmethod
    def of(cls, content: Tensor, origin: _Origin) -> Patch:
        patch = cls.wrapping(content)
        patch.origin = origin
        return patch

    def derived(self, content: Tensor, others: list[Self]) -> Self:
        patch = self.wrapping(content)
        patch.origin = reduce(_Origin.joined, (other.origin for other in others), self.origin)
        return patch

    def write_to(self, parameter: Tensor) -> None:
        new = torch.where(self.content.isnan(), parameter, self.content) if self.origin.has_gaps else self.content
        parameter.copy_(new)
        held = checksum(parameter) if self.origin.dtypes == {parameter.dtype} else None
        self.origin.writes.append(Written(self.origin.names, held, parameter.numel()))


def make_patch(spec: WeightSpec, change: Change, writes: list[Written]) -> Tensor:
    origin = _Origin((spec.name,), frozenset([spec.dtype]), change.places is not None, writes)
    if change.places is None:
        return Patch.of(change.values, origin)
    content = torch.full((spec.size,), torch.nan, dtype=spec.dtype, device=change.values.device)
    content[change.places.long()] = change.values
    return Patch.of(content.view(spec.shape), origin)


class ChangedWeights:
    """The changed values since the last update, as tensors that write only these values into parameters."""

    def __init__(self, group: EngineGroup, device: str, specs: Sequence[WeightSpec]) -> None:
        """Receive both chunks. Iteration raises RuntimeError if they do not come, or are said to be larger than these
        tensors' changes can be."""
        self._specs = specs
        self._changes: list[Change] = []
        self._writes: list[Written] = []
        self._failure: RuntimeError | None = None
        length = torch.empty(1, dtype=torch.int64, device=device)
        try:
            group.broadcast(length.view(torch.uint8), 0).wait()
            num_bytes, most = int(length), most_packed_bytes(specs)
            if not 0 <= num_bytes <= most:
                raise RuntimeError(f"{num_bytes} bytes of changes are said to come, and there can be {most}")
            packed = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            group.broadcast(packed, 0).wait()
            self._changes = list(unpack_changes(packed, specs))
        except RuntimeError as error:
            self._failure = error

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._failure:
            raise self._failure
        self._writes = []
        for spec, change in zip(self._specs, self._changes, strict=True):
            yield spec.name, make_patch(spec, change, self._writes)

    def written(self) -> list[Written]:
        """This rank's writes since the last iteration began."""
        return [write.counted() for write in self._writes]

    def faults(self, written: Sequence[Written]) -> list[str]:
        """The names of tensors whose checksum is wrong, given the writes of all ranks of an engine.

        A rank may hold a part of a tensor, the whole tensor, or the same part as another rank.
        """
        expected = {spec.name: change.checksum for spec, change in zip(self._specs, self._changes, strict=True)}
        sizes = {spec.name: spec.size for spec in self._specs}
        sums: dict[tuple[str, ...], list[int]] = {}
        for part in written:
            if part.checksum is not None:
                total = sums.setdefault(part.names, [0, 0])
                total[0] += int(part.checksum)
                total[1] += part.size
        missing = expected.keys() - {name for part in written for name in part.names}
        differing = [
            name
            for names, (total, size) in sums.items()
            if total * sum(sizes[name] for name in names) != size * sum(expected[name] for name in names)
            for name in names
        ]
        return sorted(missing) + differing
