"""The last stage of the policy: hidden states to log-probs and entropies of the response tokens.

The fused form never holds all logits of a micro-batch; the unfused form does. Both give the same numbers up to
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dapo_mega.megatron.core.decoder import PackedStage
from dapo_mega.megatron.core.groups import gathered_tokens, shared_input
from dapo_mega.megatron.fused_logprobs import output_logprobs
from dapo_mega.megatron.logprobs import vocab_parallel_logprobs


@dataclass(frozen=True)
class ChosenTokens:
    """The tokens to score: `targets` [N], predicted at positions `rows` [N] of the micro-batch; with `others` [N, k]
    also more tokens at each, or with `top_k` the most probable ones."""

    rows: Tensor
    targets: Tensor
    with_entropy: bool
    others: Tensor | None = None
    top_k: int = 0


class PolicyStage(PackedStage):
    """Its last chunk returns float32 [2, N], log-probs and entropies in nats, given `ChosenTokens` as its `labels`. k
    more rows are the log-probs of `others`. With `top_k` they are the highest log-probs, and k rows more the ids that
    have them, which are exact below 2^24."""

    def __init__(self, *args: Any, temperature: float, true_vocab_size: int, fused: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = temperature
        self._true_vocab_size = true_vocab_size
        self._fused = fused
        if self.post_process and fused:
            # Called as a module, so that its hooks run: overlapped weight gathering waits in them.
            self.output_layer.forward = self._score_hidden

    def head(self, hidden_states: Tensor, labels: ChosenTokens) -> Tensor:
        """Float32 [2 or more, N], see above."""
        weight = self.tied_weight
        if self._fused:
            scores: Tensor = self.output_layer(hidden_states, weight, labels)
            return scores
        logits, _bias = self.output_layer(hidden_states, weight=weight)
        return _as_rows(
            vocab_parallel_logprobs(
                logits[:, 0],
                labels.rows,
                labels.targets,
                temperature=self.temperature,
                vocab_size=self._true_vocab_size,
                group=self.tensor_group,
                with_entropy=labels.with_entropy,
                others=labels.others,
                top_k=labels.top_k,
            )
        )

    def _score_hidden(self, hidden_states: Tensor, weight: Tensor | None, chosen: ChosenTokens) -> Tensor:
        """What `head` returns, from hidden states [T / sequence-parallel size, 1, hidden]."""
        group = self.tensor_group
        if self.config.sequence_parallel:
            hidden = gathered_tokens(hidden_states, group)[:, 0]
            hidden = hidden.index_select(0, chosen.rows)
        else:
            hidden = hidden_states[:, 0].index_select(0, chosen.rows)
            hidden = shared_input(hidden, group)
        return _as_rows(
            output_logprobs(
                hidden,
                self.output_layer.weight if weight is None else weight,
                chosen.targets,
                temperature=self.temperature,
                vocab_size=self._true_vocab_size,
                group=group,
                with_entropy=chosen.with_entropy,
                # Add directly to Megatron's float32 buffer, except for a tied weight: autograd must add the embedding's
                # gradient to that.
                accumulate_into_main_grad=weight is None and "main_grad" in vars(self.output_layer.weight),
                others=chosen.others,
                top_k=chosen.top_k,
            )
        )


def _as_rows(scores: tuple[Tensor, ...]) -> Tensor:
    logprobs, entropy, *more = scores
    return torch.cat([torch.stack([logprobs, entropy]), *(of_tokens.t() for of_tokens in more)])
