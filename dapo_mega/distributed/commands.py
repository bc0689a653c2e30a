"""One process commands, the others obey: how the processes of a trainer do something together.

Rank 0 calls a method that is marked as a command, as if it were alone. The other ranks are in `obey`: they get the
method's name and arguments, do the same, and say whether it worked. So everything that is not a command is plain code
of one process, and an error of any process is raised on rank 0, which decides what becomes of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from dapo_mega.errors import FleetError, InputError, StarvedError, StopRequested, is_lost_connection

if TYPE_CHECKING:
    from dapo_mega.distributed.links import Links

T = TypeVar("T")
P = ParamSpec("P")
C = TypeVar("C", bound="Commanded")

EXPECTED: Final = (InputError, StarvedError, FleetError, StopRequested, OSError)
"""What a user can correct, or what a run ends with on purpose."""
_LONE_FAILURE_S = 10.0


@dataclass(frozen=True)
class Own(Generic[T]):
    """An argument of a command that is for rank 0 alone; the other processes get `Own(None)`."""

    value: T | None


@dataclass(frozen=True)
class End:
    """The last order: all end, with this error if there is one."""

    error: Exception | None


class Commanded:
    """What the processes of `control` (gloo), all of a run, do together. Every process has one. None: a single process
    without torch.distributed. With `elsewhere` this process commands, and is none of those that obey."""

    def __init__(self, control: dist.ProcessGroup | None, elsewhere: Links | None = None) -> None:
        self._control = control
        self._elsewhere = elsewhere
        self._is_alone = control is None or dist.get_world_size(control) == 1
        self._is_obeying = False
        self._is_broken = False

    def obey(self) -> None:
        """On every rank but 0: do what rank 0 commands until it ends. Raises the error with which it ends."""
        while True:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=0, group=self._control)
            if isinstance(box[0], End):
                if box[0].error:
                    raise box[0].error
                return
            name, arguments, named = box[0]
            with contextlib.suppress(_Reported):
                self._do(getattr(type(self), name).alone, arguments, named)

    @contextlib.contextmanager
    def commanding(self) -> Iterator[None]:
        """On rank 0: in the end the other processes end, too, with the error that ends this block if it is one of
        those that a user can correct. Of other errors they learn when this process exits."""
        try:
            yield
        except EXPECTED as error:
            self._dismiss(error)
            raise
        self._dismiss(None)

    def _dismiss(self, error: Exception | None) -> None:
        if self._elsewhere:
            self._elsewhere.dismiss(error)
        elif not (self._is_alone or self._is_broken or (error and is_lost_connection(error))):
            dist.broadcast_object_list([End(error)], src=0, group=self._control)

    def command(self, method: Callable[..., T], arguments: Sequence[Any], named: Mapping[str, Any]) -> list[T]:
        """On rank 0: what the method returned on rank 0 and, if it is `gathered`, on each of the others. Raises the
        first error of any process, once all are done."""
        if self._elsewhere:
            return self._elsewhere.command(method.__name__, arguments, named)
        if self._is_obeying:
            return [method(self, *arguments, **named)]
        if not self._is_alone:
            others = [Own(None) if isinstance(value, Own) else value for value in arguments]
            of_others = {name: Own(None) if isinstance(value, Own) else value for name, value in named.items()}
            dist.broadcast_object_list([(method.__name__, others, of_others)], src=0, group=self._control)
        return self._do(method, arguments, named)

    def _do(self, method: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        if self._is_alone:
            return [method(self, *arguments, **named)]
        answer = error = None
        self._is_obeying = True
        try:
            answer = method(self, *arguments, **named)
        except EXPECTED as caught:
            if is_lost_connection(caught):
                raise
            error = caught
        finally:
            self._is_obeying = False
        return self._agreed(error, answer, is_gathered=getattr(method, "is_gathered", False))

    def _agreed(self, error: Exception | None, answer: Any, *, is_gathered: bool) -> list[Any]:
        """The answers on rank 0, all of them if they `is_gathered`."""
        has_failed = torch.tensor(int(error is not None))
        work = dist.all_reduce(has_failed, dist.ReduceOp.MAX, group=self._control, async_op=True)
        assert work
        try:
            work.wait(timedelta(seconds=_LONE_FAILURE_S) if error else timedelta(days=1))
        except RuntimeError:
            if error is None:
                raise
            # The others wait in a collective that this process has left. It ends, and with it the run.
            self._is_broken = True
            raise error from None
        if not (has_failed or is_gathered):
            return [answer]
        is_first = dist.get_rank(self._control) == 0
        gathered: list[Any] | None = [None] * dist.get_world_size(self._control) if is_first else None
        dist.gather_object((error, answer if is_gathered else None), gathered, dst=0, group=self._control)
        if has_failed:
            raise next((e for e, _ in gathered or () if e), _Reported())
        return [answer for _, answer in gathered or ()] if is_gathered else [answer]


class _Reported(Exception):
    """A command has failed, and rank 0 knows why."""


def command(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Mark a method of a `Commanded` as a command: called on rank 0, all processes do it, and rank 0 gets what it
    returned there. Within a command it is a plain method.

    What rank 0 raises is an InputError, a FleetError and so on of any process, once all are done with the command.
    A process that fails in this way while the others wait for it in a collective ends alone.
    """

    @functools.wraps(method)
    def commanded(self: C, /, *arguments: P.args, **named: P.kwargs) -> T:
        return self.command(method, arguments, named)[0]

    commanded.alone = method  # type: ignore[attr-defined]
    return commanded


def gathered(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], list[T]]:
    """A `command` of which rank 0 gets what each process returned, by rank."""

    @functools.wraps(method)
    def commanded(self: C, /, *arguments: P.args, **named: P.kwargs) -> list[T]:
        return self.command(method, arguments, named)

    method.is_gathered = True  # type: ignore[attr-defined]
    commanded.alone = method  # type: ignore[attr-defined]
    return commanded
