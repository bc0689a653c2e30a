"""A pipeline stage of a decoder that runs packed micro-batches, whatever its head."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from dapo_mega.megatron.packed_attention import PackedSegments


class PackedStage(GPTModel):
    """A GPTModel with the rotary frequencies of the checkpoint, which it shares between its layers."""

    def __init__(self, *args: Any, inverse_frequencies: Tensor, rotary_magnitude: float = 1.0, **kwargs: Any) -> None:
        """`inverse_frequencies` [rotated_dim / 2] are the angles per position of the rotary embedding,
        `rotary_magnitude` is what its cosines and sines are multiplied by."""
        super().__init__(*args, **kwargs)
        self._rotary_magnitude = rotary_magnitude
        if not self.config.multi_latent_attention:
            # Not a buffer, so that it stays in float32 when the model is cast.
            self.rotary_pos_emb.inv_freq = inverse_frequencies.to(self.rotary_pos_emb.inv_freq)

    def _preprocess(self, *args: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
        """Compute cosines and sines once for all layers; our own attention applies them to queries and keys. Megatron's
        layers do so for latent attention."""
        prepared = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if self.config.multi_latent_attention:
            return prepared
        if not isinstance(packed_seq_params, PackedSegments) or not packed_seq_params.plans_attention:
            return prepared
        angles = prepared[1][:, 0, 0].chunk(2, dim=-1)[0][kwargs["position_ids"][0]]
        cosines, sines = (part[:, None] * self._rotary_magnitude for part in (angles.cos(), angles.sin()))
        packed_seq_params.rotary = (cosines, sines)
        return (prepared[0], None, *prepared[2:])
