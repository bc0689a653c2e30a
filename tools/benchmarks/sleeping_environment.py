"""An environment that sleeps for as long as its row says, and writes what its row says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class Sleeping:
    """Every call of `step` sleeps."""

    def reset(self, task: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """See `OwnEnvironment`."""
        self._fields = task["fields"]
        return {}

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """See `OwnEnvironment`."""
        time.sleep(self._fields["call_s"])
        return {"text": self._fields["text"], "reward": 0.0}
