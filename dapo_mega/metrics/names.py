"""The rule for all metric names."""

import re

_NAME = re.compile(r"[a-z][a-z0-9_]*/[A-Za-z0-9][A-Za-z0-9_.@-]*")


def validate_metric_name(name: str) -> None:
    """Check that `name` has the form `stage/name`; raises ValueError otherwise."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"metric name {name!r} does not have the form 'stage/name', such as 'policy/entropy': "
            "a lower-case stage, one slash, then letters, digits and any of '_.@-'"
        )
