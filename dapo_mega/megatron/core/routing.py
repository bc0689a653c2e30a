"""Routers of mixtures of experts: what Megatron-Core lacks, and what is kept of theirs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
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


class RouteReplay:
    """Where a router sends the tokens of a pass in place of its own choice; their weights stay the router's.

    Routers take it in place of Megatron's `RouterReplay`, which keeps those of all models of a process in one list and
    has to be told which pass comes next.
    """

    def __init__(self) -> None:
        self.routes: Tensor | None = None
        """[tokens, experts per token] of the next pass, -1 where the router chooses itself; None: it always does."""
        self.learns = False
        """Whether a backward pass follows."""
        self._repeated: deque[Tensor] = deque()

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Scores [tokens, topk] of the chosen experts, and the experts; `scores` are [tokens, experts]."""
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routes = self._of_this_pass()
        if routes is None:
            return values, own
        chosen = torch.where(routes < 0, own, routes.long())
        return scores.gather(1, chosen), chosen

    def _of_this_pass(self) -> Tensor | None:
        """Activations that are not kept are computed without gradients first, and again in the backward pass, which
        takes micro-batches in the order of the forward passes."""
        if torch.is_grad_enabled():
            return self._repeated.popleft() if self._repeated else self.routes
        if self.learns and self.routes is not None:
            self._repeated.append(self.routes)
        return self.routes


def replay_routes(stages: Iterable[Any]) -> None:
    """Let the routers of these stages of a model follow the routes that `set_routes` gives them."""
    for stage in stages:
        for _, router in _routers(stage):
            router.router_replay = RouteReplay()


def set_routes(stage: Any, routes: Tensor) -> None:
    """The experts of all tokens of the next pass through a stage [tokens, layers of the model, experts per token], -1
    where its routers choose themselves; [tokens, 0, 0]: they always do. Without effect where routers replay nothing."""
    if stage.config.sequence_parallel:
        size, rank = stage.config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        routes = routes.chunk(size)[rank]
    for layer, router in _routers(stage):
        if isinstance(replay := router.router_replay, RouteReplay):
            replay.routes = routes[:, layer] if routes.shape[1] else None
            replay.learns = stage.training


def _routers(stage: Any) -> Iterator[tuple[int, Any]]:
    """The routers of a stage by their layer in the model, counted from 0."""
    for layer in stage.decoder.layers:
        if isinstance(router := getattr(layer.mlp, "router", None), TopKRouter):
            yield layer.layer_number - 1, router


def keep_router_biases_in_float32(stage: torch.nn.Module) -> None:
    """Cast before loading, because Megatron's routers cast only in their first forward pass, after loading."""
    for module in stage.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
