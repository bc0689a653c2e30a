"""A layer of multi-token prediction behind the model's own: Megatron's, which learns to guess the token after the next
and leaves the rest of the model as it is (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_spec
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor
from torch.nn import functional

from dapo_mega.megatron.core.groups import pipeline_group
from dapo_mega.megatron.core.local_layers import RMSNorm
from dapo_mega.megatron.core.settings import TransformerConfig


class MtpLayers(MegatronModule):
    """The layers of multi-token prediction of a stage: one, under Megatron's names."""

    def __init__(self, config: TransformerConfig, layer: ModuleSpec, *, transformer_engine: bool) -> None:
        """`layer` makes the decoder layer in it."""
        super().__init__(_of_one_stage(config))
        spec = get_mtp_layer_spec(layer, use_transformer_engine=transformer_engine)
        if not transformer_engine:
            parts = spec.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = RMSNorm
        groups = ProcessGroupCollection.use_mpu_process_groups()
        built: Any = build_module(spec, config=self.config, layer_number=1, pg_collection=groups)
        self.layers = torch.nn.ModuleList([built])
        for parameter in self.parameters():
            # Megatron leaves these out of the gradient's norm, by which it clips: the rest of the model learns as it
            # does without them.
            setattr(parameter, "shared", True)  # noqa: B010

    def forward(self, hidden_states: Tensor, next_embeddings: Tensor, **of_layers: Any) -> Tensor:
        """Hidden states for the output layer, from the model's and the embeddings of the next tokens, all [T /
        sequence-parallel size, 1, hidden]; `of_layers` are other arguments of decoder layers."""
        layer: Any = self.layers[0]
        output: Tensor = layer._proj_and_transformer_layer(
            hidden_states, next_embeddings, attention_mask=None, **of_layers
        )
        return output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's, of which what is in lists would be the same on all processes."""
        layer: Any = self.layers[0]
        state: dict[str, Any] = layer.sharded_state_dict(f"{prefix}layers.0.", sharded_offsets, metadata)
        return state


def _of_one_stage(config: TransformerConfig) -> TransformerConfig:
    """The settings of a layer that stands alone, behind all others; routers have no losses of their own in it."""
    own = copy.copy(config)
    own.mtp_num_layers = 1
    own.pipeline_model_parallel_size, own.pipeline_model_parallel_layout = 1, None
    own.virtual_pipeline_model_parallel_size = None
    own.moe_router_load_balancing_type, own.moe_aux_loss_coeff, own.moe_z_loss_coeff = "none", 0.0, None
    return own


def embed(tokens: Tensor, weight: Tensor, group: dist.ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """Embeddings [T / sequence-parallel size, 1, hidden] of tokens [T], without gradients, from this process's rows of
    a `weight` cut over the vocabulary."""
    with torch.no_grad():
        rows = tokens - group.rank() * len(weight)
        is_here = (rows >= 0) & (rows < len(weight))
        found = functional.embedding(rows.where(is_here, 0), weight) * is_here[:, None]
        if group.size() > 1:
            dist.all_reduce(found, group=group)
        if sequence_parallel:
            found = found.chunk(group.size())[group.rank()].clone()  # A part would hold on to the whole.
        return found[:, None]


def embedding_on_last_stage(
    own: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Sends the first stage's embedding `own`, of this shape and dtype, to the last, which returns it. Collective over
    both."""
    group = pipeline_group()
    ranks = dist.get_process_group_ranks(group)
    if group.rank() == 0:
        assert own is not None
        dist.send(own.detach(), ranks[-1], group=group)
    elif group.rank() == group.size() - 1:
        received = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(received, ranks[0], group=group)
        return received
    return None
