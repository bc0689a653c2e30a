"""The memory of models and optimizers, lent to engines on the same GPUs while these generate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
        self._policy, self._others = policy, others
        self._trained = [model for model in (policy, *others) if isinstance(model, TrainedModel)]
        buffers = (buffer for model in self._trained for buffer in gradient_buffers(model.chunks))
        self._gradients = [(buffer, buffer.untyped_storage().nbytes()) for buffer in buffers]
        self._weights, self._rest = _Copied(device), _Copied(device)
        self._look()

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the device now."""
        if self.held == "all":
            self._look()
        gradients = sum(buffer.untyped_storage().nbytes() for buffer, _ in self._gradients)
        return self._weights.num_bytes + self._rest.num_bytes + gradients

    def hold(self, held: Held) -> None:
        """Leave `held` on the device, and have it there.

        Copies to the host run beside what the device does: those of weights that are held, for when they leave. Copies
        to the device are ordered before what it is told to do next.
        """
        if held == self.held:
            return
        if self.held == "all":
            self._look()
        if held == "nothing":
            self._weights.leave()
        elif self.held == "nothing":
            self._weights.come_back()
        if held != "all":
            self._rest.leave()
            for buffer, _ in self._gradients:
                buffer.untyped_storage().resize_(0)
            accelerator.free_cached_memory()
            if held == "weights":
                self._weights.begin_to_leave()
        else:
            self._weights.forget_copies()
            self._rest.come_back()
            for buffer, num_bytes in self._gradients:
                buffer.untyped_storage().resize_(num_bytes)
                buffer.zero_()
        self.held = held

    def _look(self) -> None:
        """Find what is on the device: an optimizer makes its state at its first update."""
        weights = _storages(_weights(self._policy), self._weights.device)
        of_optimizers = [tensor for model in self._trained for tensor in optimizer_state(model.optimizer)]
        of_others = [tensor for model in self._others for tensor in _weights(model)]
        rest = _storages([*of_optimizers, *of_others], self._rest.device)
        self._weights.storages = list(weights.values())
        # In float32 the optimizer trains the model's own weights.
        self._rest.storages = [storage for key, storage in rest.items() if key not in weights]


class _Copied:
    """Storages that leave the device and come back as they were."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: list[torch.UntypedStorage] = []
        self._copies: list[Tensor] = []
        self._stream = accelerator.stream()
        self._is_copied = False

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages)

    def begin_to_leave(self) -> None:
        """Copy to the host, unless that was begun. Nothing may change the storages until they have left."""
        if self._is_copied:
            return
        sizes = [storage.nbytes() for storage in self.storages]
        if [copy.nbytes for copy in self._copies] != sizes:
            pinned = self._stream is not None
            self._copies = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        self._copy(to_host=True)
        self._is_copied = True

    def leave(self) -> None:
        """Free the device's memory, once all is copied."""
        self.begin_to_leave()
        if self._stream:
            self._stream.synchronize()
        for storage in self.storages:
            storage.resize_(0)

    def come_back(self) -> None:
        for storage, copy in zip(self.storages, self._copies, strict=True):
            storage.resize_(copy.nbytes)
        self._copy(to_host=False)
        accelerator.wait_for(self._stream)
        self._is_copied = False

    def forget_copies(self) -> None:
        """The storages, which are on the device, may change again."""
        self._is_copied = False

    def _copy(self, *, to_host: bool) -> None:
        with accelerator.beside(self._stream):
            for storage, copy in zip(self.storages, self._copies, strict=True):
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
