"""The model: pipeline stages of a decoder that run packed micro-batches, whatever their head.

All that is known of GPTModel is here: the base of `PackedStage`, the arguments that `build_chunks` makes it of, and how
it is called. Megatron 0.19 announces its end ([what a move changes](../../README.md#from-gptmodel-to-hybridmodel)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from dapo_mega.config import ModelConfig
from dapo_mega.distributed import accelerator
from dapo_mega.megatron.core.groups import ends_of_pipeline
from dapo_mega.megatron.core.layers import block_spec, layer_behind, uses_transformer_engine
from dapo_mega.megatron.core.mtp import MtpLayers
from dapo_mega.megatron.core.packed_attention import PackedSegments
from dapo_mega.megatron.core.repairs.expert_layers import let_go_of_graphs
from dapo_mega.megatron.core.repairs.parameter_marks import correct_marks
from dapo_mega.megatron.core.repairs.until_0_16.latent_attention import count_down_projections_once
from dapo_mega.megatron.core.repairs.until_0_16.recompute import end_groups_with_the_last_layer
from dapo_mega.megatron.core.routing import keep_router_biases_in_float32
from dapo_mega.megatron.core.settings import TransformerConfig
from dapo_mega.models import Architecture


class PackedStage(GPTModel):
    """A stage with the rotary frequencies of the checkpoint, which it shares between its layers. Called with `labels`,
    its last chunk returns what `head` makes of them and of hidden states; the others return hidden states."""

    mtp: MtpLayers
    """On the last chunk, if they are trained; Megatron looks whether there are any."""

    def __init__(
        self,
        *args: Any,
        inverse_frequencies: Tensor,
        rotary_magnitude: float = 1.0,
        windowed_inverse_frequencies: Tensor | None = None,
        embedding_scale: float = 1.0,
        **kwargs: Any,
    ) -> None:
        """`inverse_frequencies` [rotated_dim / 2] are the angles per position of the rotary embedding,
        `rotary_magnitude` is what its cosines and sines are multiplied by; layers with a sliding window may have
        frequencies of their own. `embedding_scale` is what embeddings are multiplied by."""
        super().__init__(*args, **kwargs)
        self._windowed_frequencies = windowed_inverse_frequencies
        self._embedding_scale = embedding_scale
        self._rotary_magnitude = rotary_magnitude
        if not self.config.multi_latent_attention:
            # Not a buffer, so that it stays in float32 when the model is cast.
            self.rotary_pos_emb.inv_freq = inverse_frequencies.to(self.rotary_pos_emb.inv_freq)

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The processes that share the matrices of this stage."""
        return self.pg_collection.tp

    @property
    def tied_weight(self) -> Tensor | None:
        """The embedding's weight, if the head uses it as its own."""
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

    def head(self, hidden_states: Tensor, labels: Any) -> Tensor:
        """What the last chunk makes of hidden states [T / sequence-parallel size, 1, hidden]."""
        raise NotImplementedError

    def _preprocess(self, *args: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
        """Compute cosines and sines once for all layers; our own attention applies them to queries and keys. Megatron's
        layers do so for latent attention."""
        prepared = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if self._embedding_scale != 1.0 and self.pre_process:
            prepared = (prepared[0] * prepared[0].new_tensor(self._embedding_scale), *prepared[1:])
        if self.config.multi_latent_attention:
            return prepared
        if not isinstance(packed_seq_params, PackedSegments) or not packed_seq_params.plans_attention:
            return prepared
        angles = prepared[1][:, 0, 0].chunk(2, dim=-1)[0][kwargs["position_ids"][0]]
        cosines, sines = (part[:, None] * self._rotary_magnitude for part in (angles.cos(), angles.sin()))
        packed_seq_params.rotary = packed_seq_params.windowed_rotary = (cosines, sines)
        if self._windowed_frequencies is not None:
            angles = kwargs["position_ids"][0][:, None] * self._windowed_frequencies.to(angles)
            packed_seq_params.windowed_rotary = (angles.cos()[:, None], angles.sin()[:, None])
        return (prepared[0], None, *prepared[2:])

    def _postprocess(self, hidden_states: Tensor, *, labels: Any, **_: Any) -> Tensor:  # type: ignore[override]
        return self.head(hidden_states, labels) if self.post_process else hidden_states


def build_chunks(
    arch: Architecture, config: TransformerConfig, model: ModelConfig, make_stage: Callable[..., PackedStage]
) -> list[torch.nn.Module]:
    """The uninitialised model chunks of this pipeline stage in the model's dtype: one, or several if interleaved.

    `make_stage` makes one of the arguments of GPTModel and `inverse_frequencies`.
    """
    virtual_size = config.virtual_pipeline_model_parallel_size
    chunks: list[torch.nn.Module] = []
    for chunk in range(virtual_size or 1):
        vp_stage = chunk if virtual_size else None
        stage = make_stage(
            config,
            block_spec(arch, config, uses_transformer_engine(model), vp_stage),
            vocab_size=arch.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=arch.max_positions,
            **ends_of_pipeline(vp_stage),
            parallel_output=True,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
            inverse_frequencies=arch.inverse_frequencies,
            rotary_magnitude=arch.rotary_magnitude,
            windowed_inverse_frequencies=arch.windowed_inverse_frequencies,
            embedding_scale=arch.embedding_scale,
            vp_stage=vp_stage,
        )
        if arch.trains_mtp and stage.post_process:
            of_gpu = uses_transformer_engine(model)
            stage.mtp = MtpLayers(config, layer_behind(arch, config, of_gpu), transformer_engine=of_gpu)
        stage.to(accelerator.device())
        chunks.append(Float16Module(config, stage) if config.bf16 else stage)
        correct_marks(stage)
        keep_router_biases_in_float32(stage)
        count_down_projections_once(stage)
        end_groups_with_the_last_layer(stage)
        let_go_of_graphs(stage)
    if arch.qk_norm_over_heads:
        # Where it is set, Megatron sums the gradients of these norms over tensor-parallel processes, which have the
        # weights of their own heads. It is needed until here: layers are built by it.
        config.qk_layernorm = False
    return chunks


Step = Callable[[Iterator[Any], Any], tuple[Tensor, Callable[..., Any]]]


def run_schedule(step: Step, batches: Sequence[Any], chunks: Sequence[Any], *, learns: bool) -> list[Any]:
    """Run the pipeline's schedule over micro-batches: `step(iterator, chunk)` returns a chunk's output and the function
    of it that makes what this returns, on the last stage. If it `learns`, that is the loss, its denominator and what is
    to be returned, and a backward pass follows."""
    iterators = [iter(batches) for _ in chunks]
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(batches),
        # Stages exchange the real shapes (variable_seq_lengths); the schedule only needs some length.
        seq_length=1,
        micro_batch_size=1,
        forward_only=not learns,
        collect_non_loss_data=not learns,
    )
    return results


def run_chunk(chunk: Any, tokens: Tensor, positions: Tensor, segments: PackedSegments, labels: Any) -> Tensor:
    """What a chunk makes of packed tokens [T] at these positions [T] of their segments."""
    output: Tensor = chunk(tokens[None], positions[None], None, labels=labels, packed_seq_params=segments)
    return output


def unwrapped(stage: Any) -> PackedStage:
    """The stage inside DDP and Float16Module."""
    while not isinstance(stage, PackedStage):
        stage = stage.module
    return stage
