"""Locks an `output_dir` for one trainer, also when several machines share the folder.

The lock is a file that names its holder. The holder creates it, touches it every few seconds and removes it. The lock
of a dead holder is taken over: at once if this machine can see that the process is gone, else when the file has not
been touched for a while by this machine's clock. A holder that was suspended for that long notices at its next touch
and ends, so no two trainers work in one folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from dapo_mega.atomic_files import errors_naming, parse_json, set_aside
from dapo_mega.cli import before_leaving, forget_before_leaving, print_once
from dapo_mega.errors import InputError

LOCK_FILE = "run.lock"
_TOUCH_EVERY_S = 5.0
_SILENT_AFTER_S = 30.0
_PATIENCE_S = 5.0
_POLL_S = 0.25
_SETTLE_S = 0.25


@dataclass(frozen=True)
class LockHolder:
    """A process that holds a lock. `machine` identifies the boot and the process namespace: processes see each other if
    both are the same. `start_ticks` tells it from a later process of the same number: clock ticks from the boot to its
    start, which do not move when the clock is set."""

    token: str
    host: str
    machine: str
    pid: int
    start_ticks: int | None
    since: str

    @classmethod
    def this_process(cls) -> LockHolder:
        return cls(
            token=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            start_ticks=_start_ticks(os.getpid()),
            since=datetime.now().isoformat(sep=" ", timespec="seconds"),
        )

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None if this process cannot see it."""
        if self.machine != _machine():
            return None
        return _start_ticks(self.pid) != self.start_ticks

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def _start_ticks(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since the boot; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])


class RunLock:
    """Holds `folder/run.lock` from `__enter__` to `__exit__`; makes the folder if it does not exist."""

    def __init__(self, folder: Path, on_loss: Callable[[str], None]) -> None:
        """`on_loss(message)` is called in a thread when another process has taken the lock."""
        self._folder = folder
        self._file = folder / LOCK_FILE
        self._holder = LockHolder.this_process()
        self._on_loss = on_loss
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run-lock", daemon=True)
        self._made_folder = False

    def __enter__(self) -> Self:
        """Raises InputError when another trainer holds the lock."""
        self._made_folder = not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._file.is_dir():
            set_aside(self._file, "is a folder and no lock")
        started = time.monotonic()
        observed = _Observation()
        while not self._create_and_keep():
            holder = _read(self._file)
            seen_for = observed.silence_s(self._file)
            is_gone = holder.is_gone() if holder else None
            if is_gone or (is_gone is None and seen_for >= _SILENT_AFTER_S):
                self._remove_of(holder)
            elif time.monotonic() - started > _PATIENCE_S and (is_gone is False or observed.was_touched):
                raise InputError(
                    f"{self._folder} is in use by another trainer ({holder or 'not named yet'}); wait until it has "
                    f"ended or end it, or give another output_dir"
                )
            else:
                if is_gone is None and not observed.is_told:
                    observed.is_told = True
                    print_once(
                        f"{self._file} is held by {holder or 'an unnamed trainer'}, which this machine cannot see; "
                        f"waiting up to {_SILENT_AFTER_S:.0f} s for a change of the file"
                    )
                time.sleep(_POLL_S)
        self._thread.start()
        before_leaving(self._remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._thread.join()
        forget_before_leaving(self._remove)
        self._remove()
        if self._made_folder and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _create_and_keep(self) -> bool:
        """Create the file, then check that no process has removed it by mistake in place of a dead holder's lock."""
        if not self._create() and _read(self._file) != self._holder:
            return False
        time.sleep(_SETTLE_S)
        return _read(self._file) == self._holder

    def _create(self) -> bool:
        """Create the file atomically; False if it exists."""
        try:
            file = self._file.open("x")
        except FileExistsError:
            return False
        try:
            with errors_naming(self._file), file:
                json.dump(asdict(self._holder), file)
        except OSError:
            self._file.unlink(missing_ok=True)
            raise
        return True

    def _remove_of(self, holder: LockHolder | None) -> None:
        """Remove the lock of a holder that has died, unless another process has replaced it meanwhile."""
        aside = self._file.with_name(f"{LOCK_FILE}.{self._holder.token}")
        if _read(self._file) != holder:
            return
        try:
            self._file.rename(aside)
        except FileNotFoundError:
            return
        if _read(aside) != holder:
            try:
                os.link(aside, self._file)
            except FileExistsError:
                pass  # The holder of the renamed lock notices the new one and ends.
            except OSError:  # Some file systems have no links.
                aside.rename(self._file)
                return
        aside.unlink()

    def _remove(self, message: str = "", status: int = 0) -> None:
        """Release the lock; also an action for `cli.before_leaving`."""
        with contextlib.suppress(OSError):  # The lock then looks like a killed trainer's.
            if _read(self._file) == self._holder:
                self._file.unlink()

    def _keep(self) -> None:
        while not self._released.wait(_TOUCH_EVERY_S):
            try:
                holder = _read(self._file)
                if holder is None and not self._file.exists():
                    continue  # Somebody deleted the file; the next trainer will not see this one.
                if holder != self._holder:
                    self._on_loss(
                        f"{self._folder} was taken over by another trainer ({holder or 'not named yet'}), because this "
                        f"one did not touch the lock for {_SILENT_AFTER_S:.0f} s; this trainer ends"
                    )
                    return
                os.utime(self._file)
            except OSError:
                continue  # If the file system stays unavailable, the next write fails with an error.


def is_locked(folder: Path) -> bool:
    """Whether a trainer may be working in the folder; a holder that this machine cannot see counts as working."""
    file = folder / LOCK_FILE
    holder = _read(file)
    return file.exists() and (holder is None or not holder.is_gone())


class _Observation:
    """Measures how long a file has not been touched, by this machine's clock only."""

    def __init__(self) -> None:
        self._touched_ns: int | None = None
        self._since = time.monotonic()
        self.was_touched = False
        self.is_told = False

    def silence_s(self, file: Path) -> float:
        try:
            with file.open("rb") as opened:  # Opening a file makes network file systems ask the server.
                touched_ns = os.fstat(opened.fileno()).st_mtime_ns
        except OSError:
            touched_ns = -1
        if touched_ns != self._touched_ns:
            self.was_touched = self._touched_ns is not None
            self._touched_ns, self._since = touched_ns, time.monotonic()
        return time.monotonic() - self._since


def _read(file: Path) -> LockHolder | None:
    """The lock's holder; None if the file is missing or incomplete."""
    try:
        holder = LockHolder(**parse_json(file.read_bytes()))
        return holder if type(holder.pid) is int else None
    except (OSError, ValueError, TypeError):
        return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
    return f"{boot} {namespace}"
