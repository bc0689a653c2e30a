"""Qwen3.5, 3.6, mixtures: Qwen3.5's attention, and in all layers experts with a gated shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import MTP_APART, ModelFamily
from dapo_mega.models.qwen3_5 import ATTENTION
from dapo_mega.models.qwen3_next import DEFAULTS, hybrid_sizes, shared_experts

_DEFAULTS = {**DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8}


def _read(raw: Mapping[str, Any]) -> Architecture:
    raw = {**_DEFAULTS, **raw}
    # No layer has an MLP beside the experts.
    sizes = hybrid_sizes({**raw, "intermediate_size": raw["moe_intermediate_size"]}, _DEFAULTS)
    return Architecture(**sizes, experts=shared_experts(raw, normalised=True, dense_layers=frozenset()))


FAMILY = ModelFamily(
    model_type="qwen3_5_moe_text",
    read=_read,
    per_layer=(*ATTENTION, rules.MLP_NORM, *rules.EXPERTS, *rules.shared_expert("shared_expert")),
    mtp=MTP_APART,
    has_token_classifier=False,
    class_prefix="Qwen3_5Moe",
)
