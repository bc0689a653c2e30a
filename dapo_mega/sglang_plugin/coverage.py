"""Checks that the weights of a full update reach every parameter, and that each sent tensor is used.

A model's loader gets tensors that record where they are copied to. A loader that cannot take such tensors gets plain
ones from then on, and its model is no longer compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from torch import Tensor

from dapo_mega.sglang_plugin.wrappers import Wrapper

Differences = tuple[list[str], set[str]]
"""Parameters that got no copy, with their shapes, and names of tensors that were copied nowhere."""


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
