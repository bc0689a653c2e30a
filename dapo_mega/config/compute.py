"""How the policy computes: precision, memory against time, and what runs at the same time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE, Section
from dapo_mega.config.model import ModelConfig


class Fp8Config(Section):
    """FP8 matrix products of Transformer Engine (Hopper and newer)."""

    scaling: Literal["none", "delayed", "tensorwise", "blockwise"] = Field(
        default="none", description="How FP8 scaling factors are computed; none: no FP8, compute in model.dtype."
    )
    format: Literal["hybrid", "e4m3"] = Field(default="hybrid", description="hybrid: gradients in E5M2.")
    params: bool = Field(default=False, description="Keep and gather weights in FP8.")
    bf16_layers_at_ends: int = Field(
        default=0, ge=0, description="First and last layers that stay in bf16 (not with delayed scaling)."
    )
    amax_history: int = Field(default=1024, ge=1, description="Length of delayed scaling's history, in updates.")

    @property
    def enabled(self) -> bool:
        return self.scaling != "none"

    @model_validator(mode="after")
    def _check(self) -> Fp8Config:
        if not self.enabled and (self.params or self.bf16_layers_at_ends):
            raise ValueError(
                "compute.fp8.params and compute.fp8.bf16_layers_at_ends need compute.fp8.scaling to be delayed, "
                "tensorwise or blockwise"
            )
        if self.scaling == "delayed" and self.bf16_layers_at_ends:
            raise ValueError(
                "compute.fp8.bf16_layers_at_ends is not possible with compute.fp8.scaling=delayed (Megatron keeps one "
                "scaling state for all layers); use tensorwise or blockwise"
            )
        return self


class MoeConfig(Section):
    """Training of a mixture of experts. The defaults leave routing to the checkpoint: RL's loss is the objective.

    The auxiliary losses are means over a micro-batch, so unlike the objective they depend on how the mini-batch is
    split.
    """

    aux_loss_coefficient: float = Field(default=0.0, ge=0, description="Load balancing over experts.")
    z_loss_coefficient: float = Field(default=0.0, ge=0, description="Keeps router logits small.")
    router_bias_update_rate: float = Field(
        default=0.0, ge=0, description="Change per update of DeepSeek-V3's balancing bias; 0: no bias."
    )


class ComputeConfig(Section):
    """How the policy computes: precision, memory against time, and what runs at the same time."""

    fp8: Fp8Config = Fp8Config()
    moe: MoeConfig = MoeConfig()
    fused_output_layer: bool = Field(
        json_schema_extra=FREE,
        default=True,
        description="Compute log-probs without holding the logits of a whole micro-batch.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        json_schema_extra=FREE,
        default="none",
        description="Activations computed again in the backward pass instead of kept.",
    )
    recompute_modules: tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"], ...] = Field(
        json_schema_extra=FREE,
        default=("core_attn",),
        description="Modules that selective recompute does not keep in memory.",
    )
    recompute_layers: int = Field(
        json_schema_extra=FREE,
        default=1,
        ge=1,
        description="Full recompute: layers between two kept activations.",
    )
    overlap_grad_reduce: bool = Field(
        json_schema_extra=FREE, default=False, description="Reduce gradients during the backward pass."
    )
    overlap_param_gather: bool = Field(
        json_schema_extra=FREE, default=False, description="Gather weights during the next forward pass."
    )
    optimizer_offload: float = Field(
        json_schema_extra=FREE,
        default=0.0,
        ge=0,
        le=1,
        description="Share of the optimizer's state kept and updated in host memory.",
    )
    deterministic: bool = Field(
        json_schema_extra=FREE, default=False, description="Only algorithms that give the same bits every time."
    )

    @model_validator(mode="after")
    def _check(self) -> ComputeConfig:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("compute.overlap_param_gather=true needs compute.overlap_grad_reduce=true")
        if self.recompute == "selective" and not self.recompute_modules:
            raise ValueError("compute.recompute=selective needs at least one of compute.recompute_modules")
        return self


def check_precision(model: ModelConfig, compute: ComputeConfig) -> None:
    """Raises InputError for FP8 with a model that is not in bf16, or with layers without FP8."""
    if not compute.fp8.enabled:
        return
    if model.dtype != "bf16":
        raise ValueError(
            f"compute.fp8.scaling={compute.fp8.scaling} needs model.dtype=bf16 for all other operations, not "
            f"{model.dtype}"
        )
    if model.layer_implementation == "local":
        raise ValueError(
            f"compute.fp8.scaling={compute.fp8.scaling} needs Transformer Engine's layers; set it to none, or "
            f"model.layer_implementation to auto"
        )
