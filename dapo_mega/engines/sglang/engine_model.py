"""Compares the model configuration that an engine reports with the policy's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from dapo_mega.engines.sglang.weight_protocol import MODEL_FIELD, OTHER_MODEL
from dapo_mega.errors import InputError
from dapo_mega.models import Architecture
from dapo_mega.models.families import families, find_family

# Membership compares the vocabulary and the context length with settings that every server reports.
_NOT_COMPARED = ("model_type", "vocab_size", "max_positions")


def described_model(internal_states: Any) -> Mapping[str, Any] | None:
    """The server's model configuration, in the form of `config.json`; None without the plugin."""
    for state in internal_states:
        if isinstance(state.get(MODEL_FIELD), str):
            described = json.loads(state[MODEL_FIELD])
            return described if isinstance(described, dict) else None
    return None


def model_difference(described: Mapping[str, Any] | None, arch: Architecture) -> str:
    """How the described model differs from the policy's; empty if it does not or if that is unknown (then the check of
    the engine's log-probs decides)."""
    if described and "vision_config" in described:
        return f"{OTHER_MODEL}: it is a vision model; start it with --model FOLDER, an export of its language model"
    kind = described.get("model_type") if described else None
    if described is None or not isinstance(kind, str) or kind not in families():
        return ""
    quantization = described.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4":
        return (
            f"{OTHER_MODEL}: its weights are in MXFP4, which no update reaches; start it with --model FOLDER, an export"
        )
    # FP8 engines quantize the same model.
    sizes = {name: value for name, value in described.items() if name != "quantization_config"}
    try:
        differences = _differences(find_family(kind).read(sizes), arch)
    except InputError as error:
        differences = [str(error)]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
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
            theirs_shown, ours_shown = (f"{v:g}" if isinstance(v, float) else str(v) for v in (first, second))
            found.append(f"{prefix}{name} is {theirs_shown} instead of {ours_shown}")
    return found
