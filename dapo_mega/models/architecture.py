"""The numbers that define a decoder-only transformer, independent of any framework's spelling of them."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_mega.errors import InputError


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

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Vocabulary size rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    def check_layout(self, tensor: int, pipeline: int) -> None:
        """Refuse sizes that do not divide this model, naming those that do."""
        for name, size in (
            ("num_key_value_heads", self.num_query_groups),
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", self.ffn_hidden_size),
        ):
            if size % tensor:
                raise InputError(
                    f"parallel.tensor={tensor} does not divide the model's {name}={size}; "
                    f"choose one of {_divisors(self.num_query_groups)}"
                )
        if self.num_layers % pipeline:
            raise InputError(
                f"parallel.pipeline={pipeline} does not divide the model's num_hidden_layers={self.num_layers}; "
                f"choose one of {_divisors(self.num_layers)}"
            )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
