"""Shared by all commands: one-line errors, exit statuses, quiet libraries, logging."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from dapo_mega.errors import FleetError, InputError, StarvedError, StopRequested, is_lost_connection

EXIT_FAULT = 1
EXIT_INPUT_ERROR = 2
EXIT_STARVED = 3
EXIT_FLEET = 4
EXIT_CONTINUE = 75
"""The run stopped before its end and the same command continues it; EX_TEMPFAIL of sysexits.h."""
EXIT_INTERRUPTED = 130
"""Ctrl-C: the same command continues it, but a loop should not."""
EXIT_PIPE_CLOSED = 141

PEER_LOST = (
    "another process of the run has ended without saying why: it was killed, for memory perhaps, or its machine is "
    "gone; see its output and the system's log, and start the same command again to continue from the last checkpoint"
)

LAUNCHER = os.getppid()
"""The process that started this one, which is torchrun's where RANK is set by it."""

QUIET_LAUNCHER = "DAPO_MEGA_QUIET_LAUNCHER"
"""Variable that a launcher sets which reports nothing after its processes."""

Reason = tuple[str, int]
"""Why a process exits: the message, and the exit status."""

_before_leaving: list[Callable[[str, int], None]] = []
_agreeing: list[tuple[Callable[[Reason], Reason], float]] = []
_leaving = threading.Lock()


def run_command(main: Callable[[], None]) -> None:
    """Run `main`; a user error becomes one line on standard error and a non-zero exit status.

    Under torchrun one process per machine prints the line, and prints it again after torchrun's report, so that it is
    the last line on the screen. torchrun's own exit status is 1 whatever its processes' is.
    """
    try:
        main()
    except InputError as error:
        leave(str(error), EXIT_INPUT_ERROR)
    except StarvedError as error:
        leave(str(error), EXIT_STARVED)
    except FleetError as error:
        leave(str(error), EXIT_FLEET)
    except StopRequested as error:
        leave(str(error), EXIT_CONTINUE)
    except OSError as error:
        if is_lost_connection(error):
            _fail_by_fault(error)
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            _fail_by_fault(error)
        if isinstance(error, FileExistsError | NotADirectoryError) and not os.path.isdir(error.filename or "/"):
            leave(f"{error.filename}: a file stands where a folder is needed; give another path", EXIT_INPUT_ERROR)
        where = f"{error.filename}: " if error.filename else ""
        reason = error.strerror or str(error)
        leave(f"{where}{reason}; free space or fix the path or its permissions, and start again", EXIT_INPUT_ERROR)
    except KeyboardInterrupt:
        leave("interrupted; start the same command again to continue", EXIT_INTERRUPTED)
    except Exception as error:
        _fail_by_fault(error)


def leave_at_sigterm(message: str) -> None:
    """From now on SIGTERM ends this process with this line and EXIT_CONTINUE."""
    signal.signal(signal.SIGTERM, lambda *_: leave(message, EXIT_CONTINUE))


def before_leaving(action: Callable[[str, int], None]) -> None:
    """Make `leave` call `action(message, status)`, in its own thread. `action` must not raise."""
    _before_leaving.append(action)


def forget_before_leaving(action: Callable[[str, int], None]) -> None:
    """Undo `before_leaving`."""
    _before_leaving.remove(action)


def agree_before_leaving(agree: Callable[[Reason], Reason] | None, linger_s: float = 0.0) -> None:
    """Make `leave` call `agree`, which returns the reason of the process that exits first and must not raise.

    Before it exits the process stays for `linger_s`, so that others can read its reason.
    """
    _agreeing[:] = [(agree, linger_s)] if agree else []


def leave(message: str, status: int, launcher_limit_s: float | None = None) -> None:
    """Exit at once, from any thread, with one line that gives the reason.

    Does not destroy process groups, as other processes may wait in a collective that this one will never join. With
    `launcher_limit_s` a torchrun that may start nothing again is killed where it has not ended by then: it would wait
    for a store whose machine is gone, and hear no signal meanwhile.
    """
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()  # Another thread is exiting already.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # A second Ctrl-C would end this in the middle.
    for agree, _ in _agreeing:
        message, status = agree((message, status))
    kind = "stopped" if status in (EXIT_CONTINUE, EXIT_INTERRUPTED) else "error"
    line = f"{kind}: {printable(' '.join(message.split()))}"
    if _speaks_for_machine():
        for stream, text in ((sys.stdout, ""), (sys.stderr, f"{line}\n")):
            with contextlib.suppress(OSError):  # The reader may be gone.
                stream.write(text)
                stream.flush()
        if not _will_start_again():
            _repeat_after_launcher(line, launcher_limit_s)
    try:
        for action in _before_leaving:
            action(message, status)
        for _, linger_s in _agreeing:
            time.sleep(linger_s)
    finally:
        os._exit(status)


def is_rank_zero() -> bool:
    """Whether this process has rank 0, according to torchrun."""
    return os.environ.get("RANK", "0") == "0"


def is_started_by_torchrun() -> bool:
    """Whether torchrun started this process and watches over it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def print_once(text: str) -> None:
    """Print once per run, what the terminal cannot show as escapes; exit silently if the reader is gone, as after
    `| head`."""
    if is_rank_zero():
        encoding = sys.stdout.encoding or "utf-8"
        try:
            print(printable(text).encode(encoding, "backslashreplace").decode(encoding), flush=True)
        except BrokenPipeError:
            os._exit(EXIT_PIPE_CLOSED)


def printable(text: str) -> str:
    """The text with terminal control characters escaped, because names may come from files."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _fail_by_fault(error: Exception) -> None:
    """Print the traceback of an unexpected exception and, in a run of several processes, end them all."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    reason = f"{type(error).__name__}: {first_line}; see the traceback above, or in this process's log"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        for action in _before_leaving:
            action(reason, EXIT_FAULT)
        raise error
    if not is_lost_connection(error):
        traceback.print_exception(error)
        leave(reason, EXIT_FAULT)
    time.sleep(_PEER_PATIENCE_S)  # The watch hears from the process that broke it, if that says why, and leaves.
    leave(PEER_LOST, EXIT_CONTINUE)


_PEER_PATIENCE_S = 3.0


def _will_start_again() -> bool:
    """Whether torchrun may start its processes once more when they fail (`--max-restarts`)."""
    limit = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < limit


def _speaks_for_machine() -> bool:
    """Whether this process prints for its machine: the first one that exits does, as torchrun then ends the others."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        # .../attempt_0/LOCAL_RANK/error.json: the folder of the attempt is shared by the machine's processes.
        os.close(os.open(Path(error_file).parents[1] / "dapo_mega_spoke", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    return True


# Runs apart, as torchrun ends its processes with their children. torchrun closes its store, if it is the one that keeps
# it, when it has reported and before it ends; a process that has ended may stay as a zombie.
_REPEAT = """
import contextlib, os, select, signal, socket, sys, time
pid, line, limit_s, *store = sys.argv[1:]
try:
    connection = socket.create_connection((store[0], int(store[1])), timeout=1) if store else None
except (OSError, ValueError):
    connection = None
deadline = time.monotonic() + (float(limit_s) if limit_s else 90)
while time.monotonic() < deadline:
    if connection and select.select([connection], [], [], 0)[0]:
        time.sleep(0.05)
        break
    try:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] in "ZX":
                break
    except OSError:
        break
    time.sleep(0.01)
else:
    if not limit_s:
        sys.exit()
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGKILL)
print(line, file=sys.stderr, flush=True)
"""


def _repeat_after_launcher(line: str, limit_s: float | None) -> None:
    """Print the line once more when torchrun, which reports over some 30 lines after its processes, has done so, or
    has been killed after the limit."""
    environment = os.environ
    if not is_started_by_torchrun() or os.getppid() != LAUNCHER or (limit_s is None and QUIET_LAUNCHER in environment):
        return
    keeps_store = environment.get("GROUP_RANK") == "0" and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = [environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")] if keeps_store else []
    subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _REPEAT,
            str(LAUNCHER),
            line,
            "" if limit_s is None else str(limit_s),
            *store,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


class CurrentStandardError(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar replaces to stay below all lines. What repeats the line
    before is left out; messages of ours have no name, and no level if that is INFO."""

    _last = ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if record.name.startswith("dapo_mega"):
                line = line if record.levelno == logging.INFO else f"{record.levelname}: {line}"
            else:
                line = f"{record.levelname} {record.name}: {line}"
            if line != self._last:
                print(line, file=sys.stderr, flush=True)
            self._last = line
        except (OSError, ValueError):  # It is full, or closed.
            self.handleError(record)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import without looking for garbage, of which imports make little: a fifth of what they take."""
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        look_past_what_is_there()
        if searches:
            gc.enable()


def look_past_what_is_there() -> None:
    """Let no search for garbage look at what is there now, but the last one: Triton reports what is left after it."""
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)


def quiet_libraries() -> None:
    """Silence warnings about optional GPU libraries; keep ours. Call before heavy imports."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)(\.|$)")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[CurrentStandardError()])
    logging.getLogger("dapo_mega").setLevel(logging.INFO if is_rank_zero() else logging.ERROR)
    for name in ("megatron", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
