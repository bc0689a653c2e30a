"""torchrun as a script for `run_script`: what it starts are forks of it, and so of a process that has imported the
package."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from dapo_mega import cli
from dapo_mega.training import process_watch
from tests.distributed.launching import Fork, run_as_main


def _started(handler: SubprocessHandler, command: tuple[str, ...], variables: dict[str, str]) -> Any:
    script, *arguments = command[2:]  # Behind the interpreter and -u.
    process = multiprocessing.get_context("fork").Process(target=_become, args=(variables, script, arguments))
    process.start()
    return Fork(process)


def _become(variables: dict[str, str], script: str, arguments: list[str]) -> None:
    os.setsid()  # torchrun ends a session.
    os.environ.clear()
    os.environ.update(variables)
    modules: tuple[Any, ...] = (cli, process_watch)
    for module in modules:
        module.LAUNCHER = os.getppid()  # As when the package was imported.
    run_as_main(script, arguments)


if __name__ == "__main__":
    SubprocessHandler._popen = _started
    sys.exit(run.main(sys.argv[1:]))
