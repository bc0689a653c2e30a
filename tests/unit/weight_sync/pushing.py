"""Weight updates as each process of a test has them."""

import sys

from tests.distributed.launching import REPOSITORY

sys.path.append(str(REPOSITORY / "tools" / "benchmarks"))

from pushing import Pushing

__all__ = ["Pushing"]
