"""`python -m dapo_mega.commands._processes ...`: torchrun, which leaves it to its processes to say why they end."""

import logging
import os
import signal
import sys


def main() -> int:
    """Run torchrun with this process's arguments; returns its exit status, 128 + the number of a signal that came."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from dapo_mega.cli import QUIET_LAUNCHER

    logging.disable(logging.CRITICAL)  # Thirty lines that name every process, after one that says why.
    os.environ[QUIET_LAUNCHER] = "1"
    try:
        run.run(run.parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()  # torchrun ends the others.
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"error: the process of rank {rank} (pid {failure.pid}) was ended by {name}", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
