"""Which trackers' packages are there, without importing them."""

import importlib.util
from collections.abc import Sequence


def missing_packages(backends: Sequence[str]) -> str | None:
    """One sentence that names the missing packages of these backends and the command that installs them; None if all
    are there."""
    # A folder of that name, which trackers themselves make in the working folder, is found too, but has no origin.
    specs = {name: importlib.util.find_spec(name) for name in backends}
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]
    if not missing:
        return None
    packages = "package is" if len(missing) == 1 else "packages are"
    return (
        f"tracking.backends names {', '.join(missing)}, whose {packages} not installed; run: "
        f"pip install 'dapo_mega[{','.join(missing)}]' (in the project folder: pip install -e '.[{','.join(missing)}]')"
    )
