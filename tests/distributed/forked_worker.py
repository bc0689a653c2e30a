"""In place of the Python that pytest-xdist starts for a worker: a fork of the process that all workers share, which has
imported what each would. It is called as `python -u -c CODE`, ends with the fork and has its exit status."""

import os
import sys
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.distributed.launching import fork_server


class _Descriptor:
    """A number here, and in a process that gets it the number of the same file there."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _Descriptor._there, (DupFd(self.number),)

    @staticmethod
    def _there(sent: Any) -> int:
        number: int = sent.detach()
        return number


def _work(descriptors: list[int], variables: dict[str, str], code: str) -> None:
    for number, there in enumerate(descriptors):
        os.dup2(there, number)
    os.environ.clear()
    os.environ.update(variables)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = ["-c"]
    exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    given = ([_Descriptor(number) for number in range(3)], dict(os.environ), sys.argv[-1])
    process = fork_server().Process(target=_work, args=given)
    process.start()
    process.join()
    sys.exit(process.exitcode)
