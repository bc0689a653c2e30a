"""Decides whether a folder's run may be continued with the configuration that was given now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_mega.config import RunConfig, TrainingConfig, load_config
from dapo_mega.config.base import may_change_at_resume
from dapo_mega.errors import InputError


def refuse_changes(config: TrainingConfig, folder: Path) -> None:
    """Raise InputError if the run saved in the folder has other values for keys that may not change at a resume."""
    saved_file = folder / "config.yaml"
    if not saved_file.is_file():
        return
    saved = _flat(load_config(type(config), saved_file).model_dump())
    given = _flat(config.model_dump())
    changes = [
        f"{name}: {saved.get(name)!r} -> {given.get(name)!r}"
        for name in sorted(saved.keys() | given.keys())
        if saved.get(name) != given.get(name) and not _is_free(name, config)
    ]
    if changes:
        raise InputError(
            f"{folder} holds checkpoints of a run with another configuration ({'; '.join(changes)}); give another "
            f"output_dir, undo the change, or add --accept-changes to continue with it"
        )


def _is_free(name: str, config: TrainingConfig) -> bool:
    if name == "model.path" and isinstance(config, RunConfig) and config.algorithm.kl.coefficient > 0:
        return False  # The KL penalty's reference model is loaded from model.path.
    if name == "num_steps" and config.optimizer.schedule != "constant":
        return False  # The learning rate depends on it.
    return may_change_at_resume(type(config), name)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
