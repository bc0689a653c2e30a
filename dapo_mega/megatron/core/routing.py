"""Routers of mixtures of experts: what Megatron-Core lacks, and what is kept of theirs."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class BestExpertGroupRouter(TopKRouter):
    """Group-limited softmax routing where a group's score is its best expert's (DeepSeek-V2, arXiv:2405.04434, section
    2.2.2). Auxiliary losses use the scores within the chosen groups only."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and choice [tokens, experts] from logits [sequence, batch, experts]."""
        groups = logits.unflatten(-1, (self.config.moe_router_num_groups, -1))
        chosen = groups.amax(-1).topk(self.config.moe_router_group_topk).indices
        is_chosen = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, chosen, True)
        limited = groups.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).flatten(-2)
        weights, routing_map = super().routing(limited, padding_mask)
        # Megatron takes the softmax over the chosen groups, the model over all experts.
        share = (limited.logsumexp(-1) - logits.logsumexp(-1)).exp()
        return weights * share.view(-1, 1), routing_map


def keep_router_biases_in_float32(stage: torch.nn.Module) -> None:
    """Cast before loading, because Megatron's routers cast only in their first forward pass, after loading."""
    for module in stage.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
