"""Computes the bytes that autograd keeps of a micro-batch between its forward and backward pass.

There is one set of formulas for each implementation of the layers, and each is compared with what they keep: the local
ones in `tests/distributed/test_planning.py`, those of Transformer Engine (flash attention, bf16, one process) in
`tests/te_cpu/emulated/test_planned_activations.py`.
The local attention is taken as on the CPU, where it computes in float32 whatever the model's type.

All are functions of t, the tokens of a process; s = t / sequence-parallel size; h, the hidden size; b, the bytes of an
element; n and g, the query and key heads of a process; d, their size; p, all heads in the product that they are cut
from; f, the inner size of the MLP on a process.
"""

import functools
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from dapo_mega.config import ComputeConfig, LoraConfig, ModelConfig
from dapo_mega.planning.adapters import adapted_in, kept_by_adapters
from dapo_mega.planning.parameters import DTYPE_BYTES, chunk_layers
from dapo_mega.planning.rank_layout import Chunk, RankLayout

if TYPE_CHECKING:
    from dapo_mega.models.architecture import GatedDelta, LatentAttention

LayerKind = Literal["local", "transformer_engine"]
_INDEX = 8
_FLOAT = 4
_DELTA_CHUNK = 64
# Megatron's names for the layers that are given the output of the norm before attention.
_INTO_ATTENTION = ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "in_proj")


@dataclass(frozen=True)
class MicroBatchShape:
    """One packed micro-batch, before context parallelism cuts it: the tokens of each sequence, how many of them all are
    scored, and, for a mixture of experts, the rows that this process's experts get as a multiple of the average."""

    lengths: tuple[int, ...]
    num_scored: int
    expert_load: float = 1.0

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Rows and length of the local attention's blocks: sequences down to 4/5 of a block's longest are padded to
        it."""
        blocks, rest = [], sorted(self.lengths, reverse=True)
        while rest:
            rows = sum(5 * length >= 4 * rest[0] for length in rest)
            blocks.append((rows, rest[0]))
            rest = rest[rows:]
        return blocks

    @property
    def padded_tokens(self) -> int:
        """Positions of the local attention's blocks."""
        return sum(rows * length for rows, length in self.blocks)

    @property
    def has_one_length(self) -> bool:
        """Whether the local attention takes its tokens as they are, gathering none."""
        return len(set(self.lengths)) == 1


@functools.cache
def megatron_pads_values() -> bool:
    """Whether Megatron-Core pads the values of packed latent attention to the size of its keys, as newer versions do,
    and so it is planned where there is none. Its code says so; importing it would import torch."""
    try:
        files = distribution("megatron-core")
    except PackageNotFoundError:
        return True
    code = Path(str(files.locate_file("megatron/core/transformer/multi_latent_attention.py")))
    return not code.is_file() or "need_v_pad" in code.read_text()


class LayerBytes(NamedTuple):
    """Bytes that one layer keeps, by part, in the order of the forward pass."""

    norm: float
    """The norm before the attention, and its output."""
    attention: float
    """The core attention's own tensors."""
    around_attention: float
    late_norm: float
    mlp: float

    @property
    def total(self) -> float:
        return sum(self)


class ActivationModel:
    """Bytes kept by the parts of the model on one process, for one shape of micro-batch."""

    def __init__(
        self,
        placement: RankLayout,
        model: ModelConfig,
        compute: ComputeConfig,
        shape: MicroBatchShape,
        kind: LayerKind,
        lora: LoraConfig | None = None,
    ) -> None:
        self.placement = placement
        self.lora = lora
        self.compute = compute
        self.shape = shape
        self.is_local = kind == "local"
        self.element = DTYPE_BYTES[model.dtype]
        self.tokens = shape.num_tokens / placement.parallel.context
        self.shared_tokens = self.tokens / placement.sequence_size
        self.hidden = self.shared_tokens * placement.arch.hidden_size * self.element
        """Bytes of one tensor of hidden states between layers."""
        # What linear layers keep of their inputs. Those of frozen weights keep nothing, adapters what they are given.
        self.operand = 1 if compute.fp8.enabled and not lora else self.element

    def handed_on(self, chunk: Chunk) -> float:
        """Bytes of a chunk's output, which the pipeline schedule holds in addition to autograd. The chunk's input is
        kept by its first norm."""
        return self.hidden * (not chunk.is_last)

    def chunk(self, chunk: Chunk) -> float:
        """Bytes kept of one micro-batch by one chunk."""
        has_layers = bool(chunk_layers(self.placement, chunk))
        total = self.after_layers(chunk) + self._mtp(chunk) + (self._attention_plan() if has_layers else 0.0)
        if chunk.is_first:  # The embedding's indices, and which of them are another process's.
            total += self.tokens * (_INDEX + (self.placement.parallel.tensor > 1))
        if self.compute.recompute == "full":
            return total + self.hidden * -(-len(chunk.layers) // self.compute.recompute_layers)
        return total + sum(self.kept_layer(layer).total for layer in chunk.layers)

    def _mtp(self, chunk: Chunk) -> float:
        """Bytes kept by a layer of multi-token prediction, which full recomputing leaves alone: embeddings and their
        product with the hidden states, both with reciprocal roots of norms, its decoder layer and final norm; the rows
        that are scored, and what is kept of their scores, of the likeliest too."""
        if not (chunk.is_last and self.placement.arch.trains_mtp):
            return 0.0
        layer = self.kept_layer(self.placement.arch.num_layers).total
        layer += (self.placement.sequence_size - 1) * self.hidden  # Its input is a part of what all processes have.
        around = 3 * self.hidden + self._norm(not self.compute.fused_output_layer, fused=False) + 8 * self.shared_tokens
        width, guessed = self.placement.arch.hidden_size, self.shape.num_scored / self.placement.parallel.context
        vectors = guessed * (3 * _INDEX + 5 * _FLOAT + 8)
        if self.compute.fused_output_layer:
            return layer + around + self.hidden + vectors + guessed * width * self.element
        return layer + around + vectors + self.tokens * self.placement.vocabulary * self.element

    def recomputed_peak(self, chunk: Chunk) -> float:
        """Extra bytes that recomputing needs in the backward pass of `chunk`, above those held before it."""
        if not chunk.layers:
            return 0.0
        head = self.after_layers(chunk) + self._mtp(chunk)
        if self.compute.recompute == "full":
            size = self.compute.recompute_layers
            groups = [chunk.layers[start : start + size] for start in range(0, len(chunk.layers), size)]
            group = max(sum(self.whole_layer(layer).total for layer in layers) for layers in groups)
            # The first norm keeps the hidden states that the group was given.
            return max(0.0, group - self.hidden - head)
        peak, freed = 0.0, head
        if behind := self._mtp(chunk):  # Its turn comes first.
            layer = self.placement.arch.num_layers
            before = 3 * self.hidden + 8 * self.shared_tokens + self.kept_layer(layer).total
            peak = max(0.0, self._repeated_bytes(layer) - (behind - before))
        for layer in reversed(chunk.layers):
            peak = max(peak, self._repeated_bytes(layer) - freed)
            freed += self.kept_layer(layer).total
        return peak

    def _repeated_bytes(self, layer: int) -> float:
        """Extra bytes that selective recomputing of one layer needs, above those that its forward pass kept."""
        whole, kept = self.whole_layer(layer), self.kept_layer(layer)
        repeated = whole.mlp - kept.mlp
        if self.placement.arch.has_experts(layer) and not self._recomputes("moe"):
            # A shared expert's turn comes when the others have done their backward pass.
            repeated = max(0.0, repeated - self._experts(layer))
        late = (whole.late_norm - kept.late_norm) + repeated
        # The attention is recomputed after the later parts of its layer were freed.
        attention = 0.0 if self.placement.arch.has_delta(layer) else self._recomputed_attention(layer)
        early = whole.norm - kept.norm + attention - kept.late_norm - kept.mlp
        early = early if self._recomputes("core_attn", "layernorm") else 0.0
        return max(late, early)

    def kept_layer(self, number: int) -> LayerBytes:
        """Bytes that one layer keeps under selective recomputing."""
        layer = self.whole_layer(number)
        has_experts = self.placement.arch.has_experts(number)
        if self._recomputes("core_attn") and not self.placement.arch.has_delta(number):
            layer = layer._replace(attention=self._attention_inputs() + self._te_attention_output(number))
        if self._recomputes("layernorm") and self.is_local:
            if self.placement.arch.norms != "behind":
                kept = self.hidden + self._norm_behind
                layer = layer._replace(norm=kept, late_norm=kept)
        elif self._recomputes("layernorm"):
            # What is not a part of the linear layer behind it.
            layer = layer._replace(
                norm=self.hidden if self.placement.arch.latent_attention else layer.norm,
                late_norm=self.hidden if has_experts else layer.late_norm,
            )
        if self._recomputes("moe" if has_experts else "mlp"):
            layer = layer._replace(mlp=0.0)
            if not self.is_local and not has_experts:  # Its norm is recomputed with it.
                layer = layer._replace(late_norm=self.hidden + self._norm_behind)
        elif self._recomputes("shared_experts") and has_experts:
            layer = layer._replace(mlp=layer.mlp - self._shared_expert(number))
        return layer

    def whole_layer(self, number: int) -> LayerBytes:
        """One layer without recompute."""
        has_experts = self.placement.arch.has_experts(number)
        delta = self.placement.arch.gated_delta if self.placement.arch.has_delta(number) else None
        attention = self._local_attention(number) if self.is_local else self._te_attention()
        around = self._around_delta(delta) if delta else self._around_attention(number)
        mlp = "mlp.experts." if has_experts else "mlp.linear"
        return LayerBytes(
            self._norm(self.keeps_input(number, *_INTO_ATTENTION), fused=self._fuses_norm(number)) + self._norm_behind,
            self._delta_rule(delta) if delta else attention,
            around + self._adapters(number, "self_attention."),
            self._late_norm(number) + self._norm_behind,
            self._adapters(number, mlp)
            + (self._experts(number) + self._shared_expert(number) if has_experts else self._dense_mlp(number)),
        )

    def _adapters(self, number: int, module: str) -> float:
        """Bytes that the adapters of a module of a layer keep, the layers' inputs left out unless some are dropped."""
        if self.lora is None:
            return 0.0
        sizes = self.element, self.shared_tokens, self.expert_rows
        return sum(
            kept_by_adapters(found, self.placement, self.lora, *sizes)
            for found in adapted_in(self.placement.arch, number, self.lora)
            if f".{module}" in found.name
        )

    def keeps_input(self, number: int, *names: str) -> bool:
        """Whether one of these linear layers learns, or has adapters that do, which keep it as it is."""
        return self.lora is None or (not self.lora.dropout and self._adapts(number, *names))

    def _adapts(self, number: int, *names: str) -> bool:
        """Whether one of these linear layers has adapters."""
        adapted = adapted_in(self.placement.arch, number, self.lora) if self.lora else []
        return any(f".{name}." in found.name for found in adapted for name in names)

    def _fuses_norm(self, layer: int) -> bool:
        """Whether the norm before a layer's attention is a part of the one linear layer behind it."""
        arch = self.placement.arch
        return not (self.is_local or arch.has_delta(layer) or arch.latent_attention)

    def _late_norm(self, layer: int) -> float:
        """The norm before the MLP. A router always keeps its input."""
        if self.placement.arch.has_experts(layer):
            return self._norm(True, fused=False)
        return self._norm(self.keeps_input(layer, "linear_fc1"), fused=not self.is_local)

    @property
    def _value_width(self) -> int:
        """Numbers of the attention's output for a token on a process; of latent attention, of its values too."""
        arch = self.placement.arch
        size = arch.latent_attention.value_head_dim if arch.latent_attention else arch.head_dim
        return self.placement.query_heads * size

    @property
    def _keeps_projection(self) -> bool:
        """Whether the norm of the keys keeps the whole product that they, the queries and the values are a view of."""
        return self.is_local and self.placement.arch.qk_norm and not self.placement.arch.qk_norm_over_heads

    @property
    def _copied_queries(self) -> int:
        """Query heads that are copied out of the product: where several share one of several keys."""
        queries, keys = self.placement.query_heads, self.placement.key_heads
        return queries if queries > keys > 1 else 0

    def _recomputes(self, *modules: str) -> bool:
        chosen: tuple[str, ...] = self.compute.recompute_modules
        return self.compute.recompute == "selective" and any(module in chosen for module in modules)

    def _norm(self, keeps_output: bool, *, fused: bool) -> float:
        """Input, reciprocal root, output. Adapters make a norm that is a part of the layer once more."""
        tokens, width = self.shared_tokens, self.placement.arch.hidden_size
        output = width * (self.operand if fused else self.element) + 4 * (fused and self.lora is not None)
        return tokens * (width * self.element + 4 + keeps_output * output)

    @property
    def _norm_behind(self) -> float:
        """Input and reciprocal root of a norm behind attention or MLP that is not in place of the one before."""
        return self.hidden + 4 * self.shared_tokens if self.placement.arch.norms == "around" else 0.0

    @property
    def _quantizes_attention(self) -> bool:
        """Whether the output projection keeps its input in FP8, beside the attention's output. Where scales are the
        tensor's own, Megatron lets it keep that output."""
        return self.compute.fp8.scaling == "delayed" and not self.lora

    def _around_attention(self, layer: int) -> float:
        """Norms of queries and keys, rotary angles, the output projection's input."""
        arch, heads = self.placement.arch, self.placement.query_heads
        if arch.latent_attention:
            return self._around_latent_attention(arch.latent_attention, layer)
        size, keys = arch.head_dim, self.placement.key_heads
        total = 0.0
        if arch.qk_norm_over_heads:
            # Inputs in float32 (one of several keys is copied), and normed queries and keys; their roots and means.
            is_view = self.element == _FLOAT and keys == 1
            inputs = self.placement.projected_heads if is_view else heads + keys
            total += 40 + size * (inputs * _FLOAT + (heads + keys) * self.element)
        elif arch.qk_norm:
            kept = self.placement.projected_heads + self._copied_queries if self.is_local else heads + keys
            total += (heads + keys) * 4 + kept * size * self.element
        if arch.output_gate:  # The sigmoid, and what it weights.
            total += heads * size * (_FLOAT + self.element)
        return self.tokens * (total + self._output_operand(layer))

    def _around_latent_attention(self, latent: "LatentAttention", layer: int) -> float:
        """Inputs, roots and outputs of the norms of both latent vectors (that of the keys is a view of its product with
        their rotated part, which Transformer Engine copies, and adapters need), cosines and sines of queries and of
        keys, the output projection's input."""
        shared = latent.rotated_head_dim * self.element
        for name, rank in (("linear_kv_up_proj", latent.key_value_rank), ("linear_q_up_proj", latent.query_rank)):
            shared += rank * (self.element + self.keeps_input(layer, name) * self.operand) + _FLOAT if rank else 0
        if not self.is_local and self._adapts(layer, "linear_kv_up_proj"):
            shared += latent.key_value_rank * self.element
        rotary = 4 * latent.rotated_head_dim * self.element
        return self.shared_tokens * shared + self.tokens * (rotary + self._output_operand(layer))

    def _output_operand(self, layer: int) -> float:
        """Bytes of a token that the output projection keeps of its input, beside the attention's output."""
        is_kept = self.is_local or self._quantizes_attention or self._te_pads_values
        is_kept = is_kept and self.keeps_input(layer, "linear_proj")
        quantizes = self._quantizes_attention and not self.is_local
        return is_kept * self._value_width * (self.operand if quantizes else self.element)

    def _delta_rule(self, delta: "GatedDelta") -> float:
        """The rule of all value heads, whose tokens context parallelism exchanges for heads: with Triton kernels its
        inputs and a matrix of each chunk; otherwise what autograd keeps of Megatron's torch function, in float32 and by
        measurement, most of it of the inverse of each chunk's matrix."""
        heads, keys, values = self._delta_heads(delta), delta.key_head_dim, delta.value_head_dim
        if not self.is_local:
            with_kernels = (2 * keys + values) * self.element + _FLOAT + self.element + _DELTA_CHUNK * self.element
            return self.tokens * heads * with_kernels
        chunks = sum(-(-length // _DELTA_CHUNK) for length in self.shape.lengths) / self.placement.parallel.context
        row_floats = 6.2 * keys + 3 * values + 1760 + 2.1 * keys * values / _DELTA_CHUNK
        return chunks * _DELTA_CHUNK * heads * row_floats * _FLOAT

    def _around_delta(self, delta: "GatedDelta") -> float:
        """The convolution's input (for Triton kernels a view of the whole projection) and output, keys and queries
        before their norm, decays, the norm behind the rule, its gate in float32, the output projection's input."""
        heads = self._delta_heads(delta)
        values = heads * delta.value_head_dim
        channels = sum(delta.sections[:3]) / self.placement.parallel.tensor
        projected = sum(delta.sections) / self.placement.parallel.tensor
        convolution = (3 * channels if self.is_local else projected + channels - values) * self.element
        gate = values * (3 * self.element + 2 * _FLOAT)
        return self.tokens * (convolution + gate + heads * (4 * _FLOAT + self.element))

    def _delta_heads(self, delta: "GatedDelta") -> int:
        return delta.num_value_heads // self.placement.parallel.tensor

    def _attention_inputs(self) -> float:
        """Queries, keys and values that a recomputed attention keeps."""
        queries, keys = self.placement.query_heads, self.placement.key_heads
        if self.placement.arch.latent_attention:
            return self.tokens * (2 * queries * self.placement.arch.head_dim + self._value_width) * self.element
        projection = self.placement.projected_heads
        if not self.is_local or self.placement.arch.qk_norm:
            # Queries and keys after their rotation or norm, and the product that the values are a view of.
            heads = queries + keys + (0 if self._keeps_projection else projection)
        else:
            heads = projection + self._copied_queries
        return self.tokens * heads * self.placement.arch.head_dim * self.element

    def _recomputed_attention(self, layer: int) -> float:
        """Extra bytes of an attention that is recomputed, above those that its forward pass kept."""
        if not self.is_local:
            values = self._te_pads_values * self.tokens * self._value_width * self.element
            return self._te_attention() - self._attention_inputs() + values
        # The inputs are still there; the output projection's is not.
        in_place = self._attends_in_place and not self._pads_values
        released = 0.0 if in_place else self.tokens * self._value_width * self.element
        return self._local_attention(layer, with_inputs=False) - released

    @property
    def _attends_in_place(self) -> bool:
        """Whether the local attention copies neither its values, unless it repeats them, nor its output. It copies all
        where it puts a sink in front of each sequence."""
        is_plain = self.element == _FLOAT and not self.placement.arch.attention_sinks
        return is_plain and self.shape.has_one_length and self.placement.parallel.context == 1

    @property
    def _pads_values(self) -> bool:
        """Whether values are shorter than queries and keys, to whose size the local attention pads them."""
        return self._value_width < self.placement.query_heads * self.placement.arch.head_dim

    @property
    def _te_pads_values(self) -> bool:
        """Whether Megatron does so before Transformer Engine's attention, whose output it cuts to a copy."""
        return not self.is_local and self._pads_values and megatron_pads_values()

    def _local_attention(self, layer: int, *, with_inputs: bool = True) -> float:
        """Queries, keys and values (repeated for each query head), output, and log-sum of each row, in float32.
        With `with_inputs`, tensors that are views of the attention's inputs count too."""
        heads, keys = self.placement.query_heads, self.placement.key_heads
        arch = self.placement.arch
        # A key, and a query, in front of each sequence, and a dimension for its score.
        sinks = int(arch.attention_sinks)
        row = heads * (arch.head_dim + sinks) * _FLOAT
        if self.placement.parallel.context > 1:
            return self._local_attention_of_pieces(row, sinks)
        window = None if layer in arch.full_attention_layers else arch.sliding_window
        # One mask for each block that is longer than the sliding window.
        masks = sum(_FLOAT * (length + sinks) ** 2 for _, length in self.shape.blocks if window and length > window)
        slots = sum(rows * (length + sinks) for rows, length in self.shape.blocks)
        total: float = slots * (4 * row + _FLOAT * heads) + masks
        if self._attends_in_place:
            # The output is the output projection's input, unless values, and it, were padded.
            total -= self.tokens * row * (not self._pads_values)
            if arch.latent_attention:
                # Queries, keys and values are inputs as they are.
                total -= 0.0 if with_inputs else self.tokens * row * (3 - self._pads_values)
            elif heads == keys:
                # Values are a view of the product that queries and keys were cut from, too.
                total -= self.tokens * row
                product = self.placement.projected_heads * self.placement.arch.head_dim * _FLOAT
                total += self.tokens * product if with_inputs and not self._keeps_projection else 0.0
        return total

    def _local_attention_of_pieces(self, row: float, sinks: int) -> float:
        context = self.placement.parallel.context
        queries = self.tokens + 2 * sinks * len(self.shape.lengths)
        total = queries * (2 * row + _FLOAT * self.placement.query_heads)
        for length in self.shape.lengths:
            # Two pieces of a sequence see (2 C + 1) pieces' keys together; each has a mask of its own.
            piece = length / (2 * context)
            seen = (2 * context + 1) * piece + 2 * sinks
            total += seen * 2 * row + (piece + sinks) * seen * _FLOAT
        return total

    def _te_attention_output(self, layer: int) -> float:
        """The output projection's input, which Transformer Engine's attention otherwise keeps as its own output."""
        is_kept = not (self.is_local or self._quantizes_attention or self._te_pads_values)
        is_kept = is_kept and self.keeps_input(layer, "linear_proj")
        return is_kept * self.tokens * self._value_width * self.element

    def _te_attention(self) -> float:
        heads, size = self.placement.query_heads, self.placement.arch.head_dim
        if self.placement.arch.latent_attention:
            values = heads * size if self._te_pads_values else self._value_width
            return self.tokens * (2 * (heads * size + values) * self.element + 4 * heads)
        return self.tokens * (2 * (heads + self.placement.key_heads) * size * self.element + 4 * heads)

    def _dense_mlp(self, layer: int) -> float:
        return self._mlp(self.placement.arch.ffn_hidden_size, self.keeps_input(layer, "mlp.linear_fc2"))

    def _mlp(self, ffn_hidden_size: int, keeps_product: bool) -> float:
        inner = ffn_hidden_size / self.placement.parallel.tensor
        if self.is_local:
            # Gate and up together, the activation of the gate, its product with up; Megatron's own adds 0 to up.
            kept = 3 + keeps_product + (self.placement.arch.activation != "silu")
            return self.tokens * kept * inner * self.element
        return self.tokens * inner * (2 * self.element + keeps_product * self.operand)

    def _shared_expert(self, layer: int) -> float:
        experts = self.placement.arch.experts
        if experts is None or experts.shared_ffn_hidden_size is None:
            return 0.0
        # Its output and its gate are kept for each other's gradient.
        gated = self.hidden + self.shared_tokens * self.element if experts.gates_shared else 0.0
        # Its input in FP8 is its own; otherwise it is the router's too.
        own = self.shared_tokens * self.placement.arch.hidden_size * (self.operand < self.element)
        keeps_product = self.keeps_input(layer, "shared_experts.linear_fc2")
        mlp = self._mlp(experts.shared_ffn_hidden_size, keeps_product) + self._adapters(layer, "mlp.shared_experts.")
        return mlp + gated + own

    @property
    def expert_rows(self) -> float:
        """Rows that a process's experts compute."""
        experts = self.placement.arch.experts
        per_token = experts.per_token if experts else 0
        return self.shared_tokens * per_token * self.placement.parallel.expert_tensor * self.shape.expert_load

    def _experts(self, layer: int) -> float:
        arch, parallel = self.placement.arch, self.placement.parallel
        experts = arch.experts
        assert experts
        # Chosen experts, their scores, the map and the scores of all, the order of the rows.
        routing = self.shared_tokens * (experts.per_token * (2 * _INDEX + 4) + experts.number * 5)
        rows, inner = self.expert_rows, experts.ffn_hidden_size / parallel.expert_tensor
        keeps_rows, keeps_product = (self.keeps_input(layer, f"linear_{name}") for name in ("fc1", "fc2"))
        if self.is_local:
            # Of a clamped SwiGLU also the clamped gate, its sigmoid, and up + 1.
            kept = (8 if experts.swiglu_limit else 5) - (not keeps_product)
            return routing + rows * (keeps_rows * arch.hidden_size * self.element + kept * inner * self.element + 4)
        # Gate and up, of a clamped SwiGLU also clamped, and their product.
        is_whole = not self._recomputes("moe_act")
        clamped = is_whole and bool(experts.swiglu_limit)
        products = inner * ((2 + 2 * clamped) * self.element + (keeps_product and is_whole) * self.operand)
        return routing + rows * (keeps_rows * arch.hidden_size * self.operand + products + 4)

    def _attention_plan(self) -> float:
        """Bytes that all attention layers share: rotary angles, unless latent attention computes its own in each layer,
        and indices that pack and unpack tokens."""
        size = 0 if self.placement.arch.latent_attention else self.placement.arch.rotated_dim
        if not self.is_local:
            # The angles are an argument of every recomputed group.
            return _FLOAT * size * max(self.shape.lengths) if self.compute.recompute == "full" else 0.0
        rotary = _FLOAT * size * self.tokens
        if self.placement.parallel.context > 1:
            return rotary + _INDEX * self.shape.num_tokens
        if self.shape.has_one_length:
            return rotary
        # Packing is not undone by its own index, which is kept to be done again.
        is_repeated = self.compute.recompute == "full" or self._recomputes("core_attn")
        return rotary + _INDEX * (self.tokens + (self.shape.padded_tokens if is_repeated else 0))

    def after_layers(self, chunk: Chunk) -> float:
        """Bytes kept by the final norm and by the scores of the response tokens: hidden states or logits; of a value
        model the hidden states in float32."""
        if not chunk.is_last:
            return 0.0
        width = self.placement.arch.hidden_size
        responses = self.shape.num_scored / self.placement.parallel.context
        # The fused output layer keeps the rows that it scores, a frozen one none.
        is_kept = not (self.compute.fused_output_layer or self.placement.arch.has_value_head or self.lora)
        norm = self._norm(is_kept, fused=False)
        if self.placement.arch.has_value_head:
            return norm + self.shared_tokens * width * _FLOAT + responses * (_INDEX + _FLOAT)
        # Rows, targets, normalisers, entropies, and the scores themselves.
        vectors = responses * (2 * _INDEX + 4 + 4 + 8)
        if self.compute.fused_output_layer:
            return norm + vectors + responses * width * self.element
        return norm + vectors + self.tokens * self.placement.vocabulary * self.element


def peak_activations(
    model: ActivationModel, stage: int, num_micro_batches: int, *, recomputes: bool = True
) -> tuple[float, float]:
    """Peak bytes that autograd keeps on a stage, what it `recomputes` included, and those that the schedule holds at
    the same time."""
    chunks = model.placement.chunks(stage)
    kept = [model.chunk(chunk) for chunk in chunks]
    handed = [model.handed_on(chunk) for chunk in chunks]
    extra = [model.recomputed_peak(chunk) * recomputes for chunk in chunks]
    peak = (0.0, 0.0)
    for held in model.placement.held_forwards(stage, num_micro_batches):
        # The chunk of the next backward pass is one whose forward pass waits; the largest is the bound.
        recompute = max(e for e, count in zip(extra, held, strict=True) if count)
        total = sum(count * size for count, size in zip(held, kept, strict=True)) + recompute
        beside = sum(count * size for count, size in zip(held, handed, strict=True))
        peak = max(peak, (total, beside + _exchanged(model, stage)), key=sum)
    return peak


def _exchanged(model: ActivationModel, stage: int) -> float:
    """Bytes that a backward pass finds beside what it needs: the gradient from the next stage, and that which went to
    the one before. Interleaved stages also have the next forward pass's input, and chunks their last ones: about two
    hidden states a chunk, by measurement (3 to 7 of two and of three chunks)."""
    parallel = model.placement.parallel
    if parallel.virtual_pipeline > 1:
        return 2 * parallel.virtual_pipeline * model.hidden
    return ((stage > 0) + (stage < parallel.pipeline - 1)) * model.hidden
