"""RMSNorm and SwiGLU for Megatron's local layers, with hand-written gradients that save fewer tensors and passes than
autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed.nn.functional import all_reduce


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm. Megatron's WrappedTorchNorm refuses sequence parallelism; this one marks its weight
    so that Megatron sums the weight's gradient over the tensor-parallel group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps
        self.is_zero_centred = config.layernorm_zero_centered_gamma

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] of the input's dtype; the mean square is taken over the last dimension in float32."""
        weight = 1 + self.weight.float() if self.is_zero_centred else self.weight
        normed: Tensor = _RMSNorm.apply(hidden, weight, self.eps)
        return normed


class CutByHeads(torch.nn.Module):
    """A layer of whose parameters each tensor-parallel process has those of its heads."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As Megatron stores what is cut along the first dimension."""
        tensors = self.state_dict(prefix="", keep_vars=True)
        axes = dict.fromkeys(tensors, 0)
        stored: dict[str, Any] = make_sharded_tensors_for_checkpoint(tensors, prefix, axes, sharded_offsets)
        return stored


class HeadsNorm(CutByHeads):
    """Root-mean-square norm over all heads of all tensor-parallel processes together, each with its heads' weights."""

    def __init__(self, config: TransformerConfig, hidden_size: int, num_heads: int, eps: float = 1e-6) -> None:
        """`num_heads` of size `hidden_size` in all processes together."""
        super().__init__()
        self.size, self.eps = num_heads * hidden_size, eps
        width = self.size // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, heads: Tensor) -> Tensor:
        """[..., heads of this process, head_dim], computed in float32."""
        wide = heads.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if len(self.weight) < self.size:
            squares = all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
        normed = wide * (squares / self.size + self.eps).rsqrt()
        return (self.weight * normed.to(heads.dtype)).view(heads.shape)


class NormedAddition(torch.nn.Module):
    """Stands where Megatron adds the output of attention or MLP to the hidden states: adds its norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """A function of (output, bias), hidden states and dropout, as Megatron calls it; there is no dropout."""

        def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            normed: Tensor = self.norm(output if bias is None else output + bias)
            return residual + normed

        return add


class _RMSNorm(torch.autograd.Function):
    """Computed in float32; a weight of the input's dtype is applied after the cast back, as in transformers, and one in
    float32 before it. The backward pass recomputes n = x / rms(x) from the saved input x: dx = (dn - n mean(dn n)) /
    rms(x) with dn = dy w."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(hidden.shape[-1])
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, inverse)
        return (wide * inverse).to(torch.promote_types(hidden.dtype, weight.dtype)).mul_(weight).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, inverse = ctx.saved_tensors
        gradient = gradients[0]
        wide = hidden.float() * inverse
        of_weight = (gradient * wide.to(torch.promote_types(hidden.dtype, weight.dtype))).flatten(0, -2).sum(0)
        of_normed = (gradient * weight).float()
        share = torch.linalg.vecdot(of_normed, wide).unsqueeze(-1).div_(-hidden.shape[-1])
        return of_normed.addcmul_(wide, share).mul_(inverse).to(hidden.dtype), of_weight, None


class SwiGLU(MegatronModule):  # type: ignore[misc]
    """silu(gate) * up of [..., 2 f], the two halves of the last dimension. Megatron's own adds an offset of zero."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """[..., f]."""
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate) * up
