"""OLMo-3: OLMo-2's layers, three of four with a sliding window; only the others have scaled rotary frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import olmo2
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily
from dapo_mega.models.hf_sizes import full_attention_layers
from dapo_mega.models.rope import of_full_attention

_THETA = 500000.0


def _read(raw: Mapping[str, Any]) -> Architecture:
    raw = {"rope_theta": _THETA, **raw}
    of_full, theta = of_full_attention(raw, raw["rope_theta"])
    return olmo2.read(
        {**of_full, "layer_types": None},
        sliding_window=raw.get("sliding_window", 4096),
        full_attention_layers=full_attention_layers(raw, 4),
        windowed_rope_theta=theta,
    )


FAMILY = ModelFamily(model_type="olmo3", read=_read, per_layer=olmo2.PER_LAYER, has_token_classifier=False)
