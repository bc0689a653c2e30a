"""What every command line of the project shares: one-line errors, quiet libraries, logging."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable

from dapo_mega.errors import FleetError, InputError, StarvedError

EXIT_INPUT_ERROR = 2
EXIT_STARVED = 3
EXIT_FLEET = 4


def run_command(main: Callable[[], None]) -> None:
    """Run `main`; a mistake of the user's becomes one line on standard error and a non-zero exit status.

    Under torchrun one process of each machine speaks: a file may be missing on one machine only.
    """
    try:
        main()
    except InputError as error:
        _fail(str(error), EXIT_INPUT_ERROR)
    except StarvedError as error:
        _fail(str(error), EXIT_STARVED)
    except FleetError as error:
        _fail(str(error), EXIT_FLEET)
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        where = f"{error.filename}: " if error.filename else ""
        reason = error.strerror or str(error)
        _fail(f"{where}{reason}; free space or fix the path or its permissions, and start again", EXIT_INPUT_ERROR)
    except KeyboardInterrupt:
        _fail("interrupted; start the same command again to continue", 130)


def is_rank_zero() -> bool:
    """Whether this process speaks for the run, as torchrun numbers them."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Print once per run."""
    if is_rank_zero():
        print(text, flush=True)


def _fail(message: str, status: int) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stdout.flush()
        print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    # Other processes may wait in a collective that this one will never join: leave without tearing groups down.
    sys.stderr.flush()
    os._exit(status)


def quiet_libraries() -> None:
    """Silence warnings about optional GPU libraries; keep ours. Call before heavy imports."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)(\.|$)")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("dapo_mega").setLevel(logging.INFO if is_rank_zero() else logging.ERROR)
    for name in ("megatron", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
