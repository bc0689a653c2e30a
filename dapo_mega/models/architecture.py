"""The numbers that define a decoder-only transformer, independent of any framework's spelling of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dapo_mega.config import ParallelConfig, divisors
from dapo_mega.errors import InputError


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that replaces every layer's MLP: each token goes to `per_token` of `number` experts."""

    number: int
    per_token: int
    ffn_hidden_size: int
    normalised: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become weights."""


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of one model, as read from its Hugging Face `config.json`."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool = False
    experts: Experts | None = None

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Vocabulary size rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Refuse sizes that do not divide this model, naming those that do."""
        for name, size in (
            ("num_key_value_heads", self.num_query_groups),
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", self.ffn_hidden_size),
        ):
            if size % parallel.tensor:
                raise InputError(
                    f"parallel.tensor={parallel.tensor} does not divide the model's {name}={size}; "
                    f"choose one of {divisors(self.num_query_groups)}"
                )
        chunks = parallel.pipeline * parallel.virtual_pipeline
        if self.num_layers % chunks:
            factors = f"parallel.pipeline={parallel.pipeline}"
            if parallel.virtual_pipeline > 1:
                factors += f" x parallel.virtual_pipeline={parallel.virtual_pipeline} = {chunks}"
            raise InputError(
                f"{factors} does not divide the model's num_hidden_layers={self.num_layers}; "
                f"choose one of {divisors(self.num_layers)}"
            )
        self._check_experts(parallel)

    def _check_experts(self, parallel: ParallelConfig) -> None:
        if self.experts is None:
            if parallel.expert > 1 or parallel.expert_tensor > 1:
                raise InputError(
                    f"parallel.expert={parallel.expert} and parallel.expert_tensor={parallel.expert_tensor} need a "
                    f"mixture-of-experts model, {self.model_type} has no experts; set both to 1"
                )
            return
        if self.experts.number % parallel.expert:
            raise InputError(
                f"parallel.expert={parallel.expert} does not divide the model's number of experts "
                f"{self.experts.number}; choose one of {divisors(self.experts.number)}"
            )
        if self.experts.ffn_hidden_size % parallel.expert_tensor:
            raise InputError(
                f"parallel.expert_tensor={parallel.expert_tensor} does not divide the experts' "
                f"moe_intermediate_size={self.experts.ffn_hidden_size}; set it to 1"
            )
        if parallel.expert == 1 and parallel.expert_tensor != parallel.tensor:
            # Megatron 0.16 keeps the gradients of such experts in the buffers of the dense parameters and never sums
            # them over the tensor-parallel processes, which hold copies: the copies would drift apart.
            raise InputError(
                f"parallel.expert_tensor={parallel.expert_tensor} under parallel.tensor={parallel.tensor} needs "
                f"parallel.expert >= 2; set parallel.expert_tensor={parallel.tensor}, or spread the experts"
            )
        if parallel.tensor > 1 and not parallel.sequence:
            raise InputError(
                "a mixture-of-experts model under parallel.tensor >= 2 needs parallel.sequence=true, so that the "
                "tensor-parallel processes route different tokens"
            )
