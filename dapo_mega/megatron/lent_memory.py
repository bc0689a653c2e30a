"""The memory of models and optimizers, lent to engines on the same GPUs while these generate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from dapo_mega.distributed import accelerator
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.core.optimization import gradient_buffers, optimizer_state
from dapo_mega.megatron.megatron_model import MegatronModel
from dapo_mega.megatron.trained_model import TrainedModel

Held = Literal["all", "weights", "nothing"]
"""What is on the device: everything; the policy's weights, which is what is sent to engines; nothing."""


class LentMemory:
    """A policy's memory on the device, and that of the models trained or scored beside it.

    Tensors stay the same objects. Their storages are emptied, and filled again with the same bits from pinned host
    memory; of gradients, which every update begins at zero, nothing is kept. What each layer keeps of its own beside
    its parameters, as Transformer Engine's FP8 copies of weights, stays where it is.
    """

    def __init__(self, policy: TrainedModel, others: Sequence[MegatronModel], device: torch.device) -> None:
        self.held: Held = "all"
        self._trained = [model for model in (policy, *others) if isinstance(model, TrainedModel)]
        self._others = others
        self._device = device
        self._weights = _Copied(_storages(_weights(policy), device), device)
        self._rest = self._found_rest()
        buffers = (buffer for model in self._trained for buffer in gradient_buffers(model.chunks))
        self._gradients = [(buffer, buffer.untyped_storage().nbytes()) for buffer in buffers]

    def _found_rest(self) -> _Copied:
        state = (tensor for model in self._trained for tensor in optimizer_state(model.optimizer))
        rest = _storages([*state, *(tensor for model in self._others for tensor in _weights(model))], self._device)
        # In float32 the optimizer trains the model's own weights.
        return _Copied({key: rest[key] for key in rest.keys() - self._weights.storages.keys()}, self._device)

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the device now."""
        gradients = sum(buffer.untyped_storage().nbytes() for buffer, _ in self._gradients)
        return self._weights.num_bytes + self._rest.num_bytes + gradients

    def hold(self, held: Held) -> None:
        """Leave `held` on the device, and have it there.

        Copies to the host run beside what the device does: those of weights that are held, for when they leave. Copies
        to the device are ordered before what it is told to do next.
        """
        if held == self.held:
            return
        self.held = held
        if held == "nothing":
            self._weights.leave()
        else:
            self._weights.come_back()
        if held != "all":
            # Optimizers make their state in their first update.
            if self._rest.is_here and (found := self._found_rest()).storages.keys() != self._rest.storages.keys():
                self._rest = found
            self._rest.leave()
            for buffer, _ in self._gradients:
                buffer.untyped_storage().resize_(0)
            if held == "weights":
                self._weights.begin_to_leave()
            else:
                accelerator.free_cached_memory()
            return
        self._rest.come_back()
        for buffer, num_bytes in self._gradients:
            if not buffer.untyped_storage().nbytes():
                buffer.untyped_storage().resize_(num_bytes)
                buffer.zero_()


class _Copied:
    """Storages that leave the device and come back as they were."""

    def __init__(self, storages: Mapping[int, torch.UntypedStorage], device: torch.device) -> None:
        self.storages = storages
        self._storages = list(storages.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._copies: list[Tensor] = []
        self._stream = accelerator.stream() if device.type == "cuda" else None
        self._is_copied = False

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def is_here(self) -> bool:
        return self.num_bytes == sum(self._sizes)

    def begin_to_leave(self) -> None:
        """Copy to the host, unless that was begun. Nothing may change the storages until they have left."""
        if self._is_copied or not self.num_bytes:
            return
        if not self._copies:
            pinned = self._stream is not None
            self._copies = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in self._sizes]
        self._copy(to_host=True)
        self._is_copied = True

    def leave(self) -> None:
        """Free the device's memory, once all is copied."""
        self.begin_to_leave()
        if self._stream:
            self._stream.synchronize()
        for storage in self._storages:
            storage.resize_(0)

    def come_back(self) -> None:
        if self._is_copied and not self.num_bytes:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                storage.resize_(size)
            self._copy(to_host=False)
            accelerator.wait_for(self._stream)
        self._is_copied = False

    def _copy(self, *, to_host: bool) -> None:
        with accelerator.beside(self._stream):
            for storage, copy in zip(self._storages, self._copies, strict=True):
                on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                target, source = (copy, on_device) if to_host else (on_device, copy)
                target.copy_(source, non_blocking=True)


def _weights(model: MegatronModel) -> Iterator[Tensor]:
    for chunk in map(unwrapped, model.chunks):
        yield from chunk.parameters()
        yield from chunk.buffers()


def _storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """The storages of these tensors on the device, each once, by a number of their own."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type)
    return {storage._cdata: storage for storage in found if storage.nbytes()}
