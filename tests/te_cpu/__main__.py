"""`python -m tests.te_cpu SCRIPT ARGUMENTS` or `-m MODULE ARGUMENTS`: a program on the emulated device."""

import os
import runpy
import sys

from tests import te_cpu


def main() -> None:
    os.environ[te_cpu.VARIABLE] = "1"
    te_cpu.install()
    program = sys.argv[1:]
    if program[0] != "-m":
        sys.argv = program
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")
    elif program[1] == "pytest":
        import pytest

        sys.exit(pytest.main(["-p", "tests.te_cpu.plugin", *program[2:]]))
    else:
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
