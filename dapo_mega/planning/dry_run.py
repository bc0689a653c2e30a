"""`--dry-run`: everything that can be checked without starting the run."""

from __future__ import annotations

import os

from dapo_mega.cli import print_once
from dapo_mega.config import RunConfig, dump_config
from dapo_mega.planning.plan import describe_run


def print_dry_run(config: RunConfig) -> None:
    """Print the resolved configuration, the parallel layout and the batch arithmetic."""
    lines = describe_run(config, int(os.environ.get("WORLD_SIZE", "1")))
    print_once(dump_config(config))
    print_once("\n".join(lines))
    print_once("dry run: the configuration is valid; nothing was started")
