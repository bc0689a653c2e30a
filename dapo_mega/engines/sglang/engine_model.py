"""Whether an engine that says what its model is serves the policy's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from dapo_mega.engines.sglang.weight_protocol import MODEL_FIELD, OTHER_MODEL
from dapo_mega.errors import InputError
from dapo_mega.models import Architecture
from dapo_mega.models.families import families, find_family

# The vocabulary is compared with what every server says; lengths are limited by an engine's own setting.
_NOT_COMPARED = ("model_type", "vocab_size", "max_positions")


def described_model(internal_states: Any) -> Mapping[str, Any] | None:
    """The configuration of a server's model as `config.json` has it, where the server has the plugin that says so."""
    for state in internal_states:
        if isinstance(state.get(MODEL_FIELD), str):
            described = json.loads(state[MODEL_FIELD])
            return described if isinstance(described, dict) else None
    return None


def model_misfit(described: Mapping[str, Any] | None, arch: Architecture) -> str:
    """How the described model differs from the policy's; empty where it does not, or where that cannot be told: then
    the engine's log-probs will show it."""
    if described is None or described.get("model_type") not in families():
        return ""
    # FP8 engines quantize the same model.
    sizes = {name: value for name, value in described.items() if name != "quantization_config"}
    try:
        differences = _differences(find_family(sizes["model_type"]).read(sizes), arch)
    except InputError as error:
        differences = [str(error)]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return ""
    if not differences:
        return ""
    return (
        f"{OTHER_MODEL}: {', '.join(differences)}; start it with --model FOLDER, a checkpoint of the same model as "
        "model.path"
    )


def _differences(theirs: Any, ours: Any, prefix: str = "") -> list[str]:
    found: list[str] = []
    for field in fields(ours):
        name, first, second = field.name, getattr(theirs, field.name), getattr(ours, field.name)
        if name in _NOT_COMPARED or first == second:
            continue
        if is_dataclass(first) and type(first) is type(second):
            found += _differences(first, second, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name} is {_shown(first)} instead of {_shown(second)}")
    return found


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
