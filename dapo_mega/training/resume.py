"""Decides whether a folder's run may be continued with the configuration that was given now."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from dapo_mega.algorithms.own_code import code_hash
from dapo_mega.config import RunConfig, SftConfig, TrainingConfig, load_config
from dapo_mega.config.base import differences, may_change_at_resume
from dapo_mega.config.paths import paths_in
from dapo_mega.errors import InputError

CONFIG_FILE = "config.yaml"
CODE_FILE = "code.json"


def refuse_changes(config: TrainingConfig, folder: Path, *, accepted: bool = False) -> None:
    """Raise InputError if the run saved in the folder has other values for keys that may not change at a resume, which
    for the seed cannot be `accepted`."""
    if changes := changes_since(config, folder, lambda name: name != "seed"):
        raise InputError(
            f"{folder} holds checkpoints of a run with another seed ({changes}), and --accept-changes does not cover "
            f"it; undo the change, or give another output_dir, with the export of this run as model.path"
        )
    if accepted:
        return
    if changes := changes_since(config, folder, lambda name: is_free(name, config)):
        raise InputError(
            f"{folder} holds checkpoints of a run with another configuration ({changes}); give another output_dir, "
            f"undo the change (where a default has changed since: write the former value), or add --accept-changes to "
            f"continue with it" + (", which other training prompts do not allow" if "data." in changes else "")
        )
    recorded, now = recorded_code(folder), code_hashes(config)
    if changed := [
        name.removesuffix(".path")
        for name in recorded
        if name.startswith("algorithm.") and now.get(name) != recorded[name]
    ]:
        raise InputError(
            f"{folder} holds checkpoints of a run whose code under {', '.join(changed)} was another: its file has "
            f"changed; put it back, give another output_dir, or add --accept-changes to continue with it"
        )


def code_hashes(config: TrainingConfig) -> dict[str, str]:
    """SHA-256 of every file with code of the user's own, by the key that names it."""
    return {key: code_hash(path) for key, kind, path in paths_in(config) if kind == "function"}


def recorded_code(folder: Path) -> dict[str, str]:
    """`code_hashes` of the run saved in the folder; none where nothing that can be read is recorded."""
    try:
        found = json.loads((folder / CODE_FILE).read_text())
        return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def changes_since(config: TrainingConfig, folder: Path, may_change: Callable[[str], bool]) -> str:
    """The keys for which the run saved in the folder has other values, but for those that may change, as text; empty
    if there are none, no run, or none whose configuration can be read."""
    saved, _ = saved_config(config, folder)
    changed = differences(saved, config) if saved else {}
    old, new = (sorted(_teachers(each)) for each in (saved or config, config))
    if old != new:  # Of one with servers each key may change, and yet not that there is one.
        changed["distillation.teachers"] = (old, new)
    return "; ".join(f"{name}: {old!r} -> {new!r}" for name, (old, new) in changed.items() if not may_change(name))


def saved_config(config: TrainingConfig, folder: Path) -> tuple[TrainingConfig | None, str]:
    """The configuration of the run saved in the folder, of the same kind, if there is one; and why it cannot be read,
    if it cannot."""
    file = folder / CONFIG_FILE
    try:
        return (load_config(type(config), file) if file.is_file() else None), ""
    except (InputError, OSError, ValueError, RecursionError) as error:
        return None, " ".join(str(error).split())


def _teachers(config: TrainingConfig) -> Iterable[str]:
    return config.distillation.teachers if isinstance(config, RunConfig) and config.distillation else ()


def is_free(name: str, config: TrainingConfig) -> bool:
    """Whether the key with this dotted name may change when the run resumes."""
    needs_start = isinstance(config, RunConfig) and config.algorithm.uses_reference
    if name == "model.path" and (needs_start or (isinstance(config, SftConfig) and config.dpo)):
        return False  # The reference is loaded from it.
    if name.endswith(".columns.data_source") and _teachers(config):
        return False  # It chooses among them.
    if name in ("model.path", "critic.path") and config.lora:
        return False  # Checkpoints lack the weights that adapters are beside.
    if name in ("num_steps", "epochs") and config.optimizer.schedule != "constant":
        return False  # The learning rate depends on it.
    if name in ("algorithm.entropy_step", "algorithm.entropy_max") and isinstance(config, RunConfig):
        return config.algorithm.entropy_target is None  # They act on nothing else.
    return may_change_at_resume(type(config), name)
