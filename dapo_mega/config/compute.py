"""How the policy computes: precision, memory against time, and what runs at the same time."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE, Section
from dapo_mega.config.model import ModelConfig


class Fp8Config(Section):
    """FP8 matrix products of Transformer Engine (Hopper and newer)."""

    scaling: Literal["none", "delayed", "tensorwise", "blockwise"] = "none"
    """How FP8 scaling factors are computed: from earlier updates (delayed), per tensor or per block. none: no FP8,
    matrix products are in model.dtype. FP8 needs Hopper GPUs or newer and Transformer Engine."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """Number format. hybrid: gradients in E5M2, which has the larger range, all else in E4M3; e4m3: all in E4M3."""
    params: bool = False
    """Keep and gather the weights in FP8, which saves memory and traffic. The optimizer keeps fp32 copies."""
    bf16_layers_at_ends: int = Field(default=0, ge=0)
    """Layers at each end of the model that stay in bf16 (not with delayed scaling). Raise it if FP8 is unstable."""
    amax_history: int = Field(default=1024, ge=1)
    """Delayed scaling: updates whose largest values set the scaling factors."""

    @property
    def enabled(self) -> bool:
        return self.scaling != "none"

    @model_validator(mode="after")
    def _check(self) -> Self:
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

    aux_loss_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the loss that balances the load over experts. Raise it if few experts get most tokens."""
    z_loss_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the loss that keeps the router's logits small."""
    router_bias_update_rate: float = Field(default=0.0, ge=0)
    """Change per update of the router's balancing bias, which only DeepSeek-V3 has. 0: it stays as it is."""


class ComputeConfig(Section):
    """How the policy computes: precision, memory against time, and what runs at the same time."""

    fp8: Fp8Config = Fp8Config()
    moe: MoeConfig = MoeConfig()
    fused_output_layer: bool = Field(default=True, json_schema_extra=FREE)
    """Compute log-probs and entropy a chunk of tokens at a time, so that the logits of a whole micro-batch never exist.
    Costs one more product of the output layer; switch it off only to compare."""
    recompute: Literal["none", "selective", "full"] = Field(default="none", json_schema_extra=FREE)
    """Activations that the backward pass computes again instead of keeping them. none: nothing; selective: those of
    recompute_modules; full: whole layers. More saves memory and costs time."""
    recompute_modules: tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"], ...] = Field(
        default=("core_attn",), json_schema_extra=FREE
    )
    """Modules whose activations selective recompute does not keep. mlp saves most in a dense model, moe in a mixture of
    experts."""
    recompute_layers: int = Field(default=1, ge=1, json_schema_extra=FREE)
    """Full recompute: layers between two kept activations. More saves memory."""
    overlap_grad_reduce: bool = Field(default=False, json_schema_extra=FREE)
    """Reduce gradients over data-parallel ranks during the backward pass. Switch it on with several GPUs."""
    overlap_param_gather: bool = Field(default=False, json_schema_extra=FREE)
    """Gather weights from the distributed optimizer during the next forward pass. Needs overlap_grad_reduce."""
    optimizer_offload: float = Field(default=0.0, ge=0, le=1, json_schema_extra=FREE)
    """Share of the optimizer's moments kept and updated in host memory; main weights stay on the GPU. Raise it when
    GPU memory is short."""
    deterministic: bool = Field(default=False, json_schema_extra=FREE)
    """Use only algorithms that give the same bits every time. Slower; for comparing runs."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("compute.overlap_param_gather=true needs compute.overlap_grad_reduce=true")
        if self.recompute == "selective" and not self.recompute_modules:
            raise ValueError("compute.recompute=selective needs at least one of compute.recompute_modules")
        refused = {"layernorm", "moe_act"} & set(self.recompute_modules)
        if self.fp8.scaling == "delayed" and self.recompute == "selective" and refused:
            raise ValueError(
                f"compute.recompute_modules with {', '.join(sorted(refused))} is not possible with "
                "compute.fp8.scaling=delayed, whose scales Megatron would record twice; leave them out, or use "
                "tensorwise or blockwise"
            )
        return self

    def of_frozen_model(self) -> Self:
        """For a model that never learns. Delayed scaling takes its scales from updates, so such a model has none: it
        scales per tensor instead."""
        if self.fp8.scaling != "delayed":
            return self
        return self.model_copy(update={"fp8": self.fp8.model_copy(update={"scaling": "tensorwise"})})


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
