"""The sizes and settings of a decoder-only transformer, independent of any framework's names."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from dapo_mega.config import ParallelConfig, divisors
from dapo_mega.errors import InputError
from dapo_mega.models.rope import LongScaling, RopeScaling, unscaled_frequencies

# Far above any model's; lists as long are made.
_MOST_LAYERS_TIMES_EXPERTS = 1_000_000
# Columns of a block of Transformer Engine's block-wise FP8.
_BLOCK = 128


@dataclass(frozen=True)
class ExpertGroups:
    """Group-limited routing: a token's experts come from `per_token` of `number` equal groups of experts."""

    number: int
    per_token: int
    ranked_by: Literal["best", "sum"]
    """What a group is worth to a token: the score of its best expert (DeepSeek-V2), or the sum of its best
    `Experts.per_token // per_token` scores (DeepSeek-V3, Megatron-Core)."""


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that replaces a layer's MLP: each token goes to `per_token` of `number` experts."""

    number: int
    per_token: int
    ffn_hidden_size: int
    normalised: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become weights."""
    scaling: float = 1.0
    """What the weights of a token's experts are multiplied by."""
    groups: ExpertGroups | None = None
    has_router_bias: bool = False
    """Whether the checkpoint stores biases that are added to the scores where experts are chosen."""
    shared_ffn_hidden_size: int | None = None
    """Inner size of the expert that every token goes to besides, if there is one."""
    gates_shared: bool = False
    """Whether the shared expert's output is weighted by a sigmoid of the token."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that keep their MLP, counted from 0."""
    has_biases: bool = False
    """Whether the router and the projections of experts have biases."""
    swiglu_limit: float | None = None
    """If set, what gate and up are clamped to (the gate from above only), and gate sigmoid(1.702 gate) (up + 1) stands
    in place of silu(gate) up."""

    def check_sizes(self, num_layers: int) -> None:
        """Raise InputError for contradictory sizes, naming the keys of `config.json`."""
        if self.per_token > self.number:
            raise InputError(
                f"num_experts_per_tok={self.per_token} is more than the {self.number} experts; correct one of them"
            )
        if num_layers * self.number > _MOST_LAYERS_TIMES_EXPERTS:
            raise InputError(
                f"num_hidden_layers={num_layers} with {self.number} experts each are more than "
                f"{_MOST_LAYERS_TIMES_EXPERTS:,} experts; correct them"
            )
        if groups := self.groups:
            if self.number % groups.number or not 1 <= groups.per_token <= groups.number:
                raise InputError(
                    f"n_group={groups.number} and topk_group={groups.per_token} do not fit {self.number} experts: the "
                    f"first must divide them, the second be at most the first"
                )
            if self.per_token > groups.per_token * (self.number // groups.number):
                raise InputError(
                    f"num_experts_per_tok={self.per_token} is more than the experts of topk_group={groups.per_token} "
                    f"groups; correct them"
                )


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): queries, keys and values are projected
    up from latent vectors, and only a part of each query and key, shared by all heads of the keys, is rotated."""

    query_rank: int | None
    """Size of the queries' latent vector; None: queries are projected from the hidden states."""
    key_value_rank: int
    unrotated_head_dim: int
    rotated_head_dim: int
    value_head_dim: int
    yarn_weights: tuple[float, float] | None = None
    """How much YaRN magnifies rotated queries and keys, and whole ones (`mscale` and `mscale_all_dim`)."""


@dataclass(frozen=True)
class GatedDelta:
    """Layers with a gated delta rule (arXiv:2412.06464) in place of attention: a causal convolution over queries, keys
    and values, and a state per value head that decays and is corrected by every token."""

    layers: frozenset[int]
    """Counted from 0."""
    conv_kernel: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int

    @property
    def key_width(self) -> int:
        """Rows of all keys, as many as those of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def sections(self) -> list[int]:
        """Rows of queries, keys and values, which the convolution has too, and of output gates, betas and decays."""
        keys, values, heads = self.key_width, self.value_width, self.num_value_heads
        return [keys, keys, values, values, heads, heads]


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
    """The longest sequence that the frequencies are meant for: with LongRoPE the original context."""
    norm_epsilon: float
    rope_theta: float
    tied_embeddings: bool
    qkv_bias: bool
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    """The share of a head's dimensions, from the first on, that is rotated."""
    unrotated_layers: frozenset[int] = frozenset()
    """Layers without rotary embedding, counted from 0."""
    sliding_window: int | None = None
    """How many keys a query sees at most, its own position included; None: all before it."""
    full_attention_layers: frozenset[int] = frozenset()
    """Layers without the sliding window, counted from 0."""
    attention_sinks: bool = False
    """Whether the softmax of each head has one more score, a learnt number, without a value."""
    output_bias: bool = False
    """Whether the projection behind the attention has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    """Whether the norms on queries and keys are over all heads together."""
    norms: Literal["before", "behind", "around"] = "before"
    """Where attention and MLP have their norms: before them, behind them on what is added to the hidden states, or
    both."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Of the gate of MLPs."""
    embedding_scale: float = 1.0
    """What embeddings are multiplied by, in the dtype of their weights."""
    attention_scale: float | None = None
    """What the products of queries and keys are multiplied by, rotary scaling left out; None: head_dim ** -0.5."""
    windowed_rope_theta: float | None = None
    """The base of the unscaled rotary frequencies of layers with a sliding window, where theirs are others."""
    experts: Experts | None = None
    gated_delta: GatedDelta | None = None
    output_gate: bool = False
    """Whether what attention returns is weighted by a sigmoid of the token, which the queries' projection has too."""
    zero_centred_norms: bool = False
    """Whether norms scale by 1 + weight; that within gated delta layers scales by its weight."""
    latent_attention: LatentAttention | None = None
    """If set, `head_dim` is that of queries and keys, rotated and unrotated parts together."""
    has_value_head: bool = False
    """Whether the model ends in a linear layer to one number, the value, in place of the vocabulary's output layer."""
    value_bias: bool = False
    trains_mtp: bool = False
    """Whether a layer of multi-token prediction is part of the model and learns."""

    def with_value_head(self, *, has_bias: bool = False) -> Architecture:
        """The same layers under a value head; no embedding is tied to that, and no multi-token prediction behind."""
        return replace(self, tied_embeddings=False, has_value_head=True, value_bias=has_bias, trains_mtp=False)

    @property
    def rotated_dim(self) -> int:
        """The dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def inverse_frequencies(self) -> Tensor:
        """Angles per position [rotated_dim / 2] in float32 of the pairs of a head's rotated dimensions."""
        if self.rope_scaling is None:
            return unscaled_frequencies(self.rope_theta, self.rotated_dim)
        return self.rope_scaling.inverse_frequencies(self.rope_theta, self.rotated_dim)

    @property
    def rotary_magnitude(self) -> float:
        """What cosines and sines are multiplied by, where `softmax_scale` cannot say it."""
        return self.rope_scaling.attention_factor if self.rope_scaling and not self._rotates_all else 1.0

    @property
    def softmax_scale(self) -> float | None:
        """What the products of queries and keys are multiplied by, rotary scaling included; None: head_dim ** -0.5.

        YaRN's factor on rotated queries and keys goes into the scores as its square where all heads are rotated whole.
        """
        if self.rope_scaling is None or self.rope_scaling.attention_factor == 1.0 or not self._rotates_all:
            return self.attention_scale
        return float((self.attention_scale or self.head_dim**-0.5) * self.rope_scaling.attention_factor**2)

    @property
    def _rotates_all(self) -> bool:
        return self.partial_rotary_factor == 1.0 and not self.unrotated_layers and self.windowed_rope_theta is None

    @property
    def windowed_inverse_frequencies(self) -> Tensor | None:
        """`inverse_frequencies` of layers with a sliding window, where theirs are others."""
        theta = self.windowed_rope_theta
        return None if theta is None else unscaled_frequencies(theta, self.rotated_dim)

    @property
    def has_all_biases(self) -> bool:
        """Whether every linear layer has a bias, routers and experts too."""
        return self.experts is not None and self.experts.has_biases

    @property
    def needs_local_layers(self) -> bool:
        """Whether only our own layers compute the model, Transformer Engine's not."""
        return self.norms != "before" or self.windowed_rope_theta is not None

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of `layer`, counted from 0, is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def has_delta(self, layer: int) -> bool:
        """Whether `layer`, counted from 0, has a gated delta rule in place of attention."""
        return self.gated_delta is not None and layer in self.gated_delta.layers

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Vocabulary size rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    @property
    def _tensor_sizes(self) -> list[int]:
        """The tensor-parallel sizes that this model can be cut into."""
        shared = (self.experts.shared_ffn_hidden_size if self.experts else None) or 0
        sizes = divisors(math.gcd(self.num_attention_heads, self.ffn_hidden_size, shared))
        return [size for size in sizes if self._key_head_misfit(size) is None]

    def _key_head_misfit(self, tensor: int) -> str | None:
        """Why the key and value heads cannot be spread over so many tensor-parallel processes, if they cannot.

        Megatron-Core lets several processes share a head: they hold equal runs of the rows of the head's queries, key
        and value, and gather the products.
        """
        heads = self.num_query_groups
        if heads % tensor and tensor % heads:
            return f"neither divides the model's num_key_value_heads={heads} nor is a multiple of it"
        rows = (self.num_attention_heads // heads * (1 + self.output_gate) + 2) * self.head_dim
        if tensor > heads and rows % (tensor // heads):
            return (
                f"makes {tensor // heads} processes share each of the model's num_key_value_heads={heads}, whose "
                f"{rows} rows (its queries, key and value of head_dim={self.head_dim}) cannot be cut into as many "
                "equal parts"
            )
        return None

    def check_sizes(self) -> None:
        """Raise InputError for contradictory sizes, naming the keys of `config.json`."""
        if self.num_attention_heads % self.num_query_groups:
            raise InputError(
                f"num_key_value_heads={self.num_query_groups} does not divide "
                f"num_attention_heads={self.num_attention_heads}; correct them"
            )
        if self.windowed_rope_theta is not None and not self.sliding_window:
            raise InputError("layers of kind sliding_attention need a sliding_window; set it")
        if self.sliding_window == 0:
            raise InputError("sliding_window=0 leaves a query no key to see; set it to null or to 1 and more")
        rotated = self.latent_attention.rotated_head_dim if self.latent_attention else self.rotated_dim
        if rotated % 2 or not rotated:
            raise InputError(
                f"the rotated part of a head has {rotated} dimensions, not an even number from 2; correct head_dim or "
                "partial_rotary_factor"
            )
        if isinstance(self.rope_scaling, LongScaling) and len(self.rope_scaling.factors) * 2 != rotated:
            raise InputError(
                f"short_factor has {len(self.rope_scaling.factors)} numbers for {rotated} rotated dimensions, half as "
                "many are needed; correct it"
            )
        if self.experts:
            self.experts.check_sizes(self.num_layers)
        delta = self.gated_delta
        if delta and delta.num_value_heads % delta.num_key_heads:
            raise InputError(
                f"linear_num_key_heads={delta.num_key_heads} does not divide "
                f"linear_num_value_heads={delta.num_value_heads}; correct them"
            )

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raise InputError for parallel sizes that do not divide this model, naming those that do."""
        for name, size in (
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", self.ffn_hidden_size),
        ):
            if size % parallel.tensor:
                raise InputError(
                    f"parallel.tensor={parallel.tensor} does not divide the model's {name}={size}; "
                    f"choose one of {self._tensor_sizes}"
                )
        if reason := self._key_head_misfit(parallel.tensor):
            raise InputError(f"parallel.tensor={parallel.tensor} {reason}; choose one of {self._tensor_sizes}")
        if self.qk_norm_over_heads and parallel.tensor > self.num_query_groups:
            raise InputError(
                f"parallel.tensor={parallel.tensor} is more than num_key_value_heads={self.num_query_groups}: "
                f"{self.model_type} has norms over all keys, which processes cannot share; set it to at most that"
            )
        if self.num_layers < parallel.num_chunks and parallel.pipeline_layout is None:
            raise InputError(
                f"parallel.pipeline={parallel.pipeline} x parallel.virtual_pipeline={parallel.virtual_pipeline} = "
                f"{parallel.num_chunks} chunks are more than the model's num_hidden_layers={self.num_layers}; choose "
                f"fewer, or give parallel.pipeline_layout with 0 layers beside the embedding or the output layer"
            )
        if (given := sum(map(len, parallel.chunk_layers(self.num_layers)))) != self.num_layers:
            even = parallel.model_copy(update={"pipeline_layout": None}).chunk_layers(self.num_layers)
            raise InputError(
                f"parallel.pipeline_layout={list(parallel.pipeline_layout or ())} has {given} layers, the model has "
                f"num_hidden_layers={self.num_layers}; give for example {list(map(len, even))}"
            )
        self._check_experts(parallel)
        self._check_delta(parallel)

    def layout_beside(self, parallel: ParallelConfig) -> ParallelConfig:
        """The layout that a teacher or a critic has beside a policy in this one: without experts these are not spread,
        and with another number of layers those are spread evenly. Raises InputError for a mixture of experts where the
        policy has none and tensor parallelism: neither of Megatron's ways with such experts is open."""
        if self.experts and parallel.expert == 1 and parallel.expert_tensor != parallel.tensor:
            raise InputError(
                f"a model with experts ({self.model_type}) cannot stand beside a policy without under "
                f"parallel.tensor={parallel.tensor}; set parallel.tensor=1, or serve it if it is a teacher "
                "(distillation.teachers.NAME.urls)"
            )
        changes: dict[str, Any] = {} if self.experts else {"expert": 1, "expert_tensor": 1}
        if sum(parallel.pipeline_layout or ()) != self.num_layers:
            changes["pipeline_layout"] = None
        return parallel.model_copy(update=changes)

    def _check_delta(self, parallel: ParallelConfig) -> None:
        if self.gated_delta is None:
            return
        if self.gated_delta.num_key_heads % (parallel.tensor * parallel.context):
            raise InputError(
                f"parallel.tensor={parallel.tensor} x parallel.context={parallel.context} does not divide the model's "
                f"linear_num_key_heads={self.gated_delta.num_key_heads}; choose sizes whose product does"
            )
        if parallel.tensor > 1 and not parallel.sequence:
            # Megatron sums the gradients of the norm within these layers only then.
            raise InputError("gated delta layers under parallel.tensor >= 2 need parallel.sequence=true")

    def check_fp8(self, parallel: ParallelConfig, scaling: str) -> None:
        """Raise InputError for sizes that FP8 products with this `compute.fp8.scaling` cannot take in this layout."""
        if scaling != "blockwise" or not parallel.sequence:
            return
        # Transformer Engine gathers the inputs of products over the tensor-parallel processes in whole blocks.
        widths: dict[str, int | None] = {"hidden_size": self.hidden_size}
        if self.latent_attention:
            widths |= {
                "q_lora_rank": self.latent_attention.query_rank,
                "kv_lora_rank": self.latent_attention.key_value_rank,
            }
        for name, width in widths.items():
            if width and width % _BLOCK:
                raise InputError(
                    f"compute.fp8.scaling=blockwise with parallel.sequence=true needs multiples of {_BLOCK}, but the "
                    f"model has {name}={width}; set compute.fp8.scaling=tensorwise"
                )

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
        if self.experts.has_biases and parallel.expert_tensor > 1:
            raise InputError(
                f"parallel.expert_tensor={parallel.expert_tensor} is not supported for {self.model_type}: "
                "Megatron-Core would add the biases of experts once per process; set it to 1, and with "
                "parallel.tensor >= 2 spread the experts with parallel.expert"
            )
        shared = self.experts.shared_ffn_hidden_size or 0
        if shared % parallel.tensor:
            raise InputError(
                f"parallel.tensor={parallel.tensor} does not divide the shared expert's inner size {shared}; "
                f"choose one of {self._tensor_sizes}"
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
