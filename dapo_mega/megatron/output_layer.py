"""The last stage of the policy: hidden states to log-probs and entropies of the response tokens.

The fused form never holds all logits of a micro-batch; the unfused form does. Both give the same numbers up to
rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dapo_mega.megatron.core.decoder import PackedStage
from dapo_mega.megatron.core.groups import gathered_tokens, shared_input
from dapo_mega.megatron.core.mtp import embed
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
    ahead: TokensAhead | None = None
    """What the layer of multi-token prediction is to learn, if there is one."""


@dataclass(frozen=True)
class TokensAhead:
    """`next_tokens` [T] of all positions, and the tokens after these that are to be guessed: `targets` [M] at `rows`
    [M] with the `weights` [M] of their losses."""

    next_tokens: Tensor
    rows: Tensor
    targets: Tensor
    weights: Tensor


class PolicyStage(PackedStage):
    """Its last chunk returns float32 [2, N], log-probs and entropies in nats, given `ChosenTokens` as its `labels`. k
    more rows are the log-probs of `others`. With `top_k` they are the highest log-probs, and k rows more the ids that
    have them, which are exact below 2^24. With `ahead` it returns a pair, that and what `_guess` does."""

    def __init__(self, *args: Any, temperature: float, true_vocab_size: int, fused: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = temperature
        self._true_vocab_size = true_vocab_size
        self._fused = fused
        self.received_embedding: Tensor | None = None
        """This process's rows of the first stage's embedding, where a stage of multi-token prediction has none."""
        if self.post_process and fused:
            # Called as a module, so that its hooks run: overlapped weight gathering waits in them.
            self.output_layer.forward = self._score_hidden

    def _postprocess(self, hidden_states: Tensor, *, labels: Any, **of_layers: Any) -> Any:
        scores = super()._postprocess(hidden_states, labels=labels)
        if not self.post_process or labels.ahead is None:
            return scores
        return scores, self._guess(hidden_states.detach(), labels.ahead, of_layers)

    def _guess(self, hidden_states: Tensor, ahead: TokensAhead, of_layers: Mapping[str, Any]) -> Tensor:
        """Float32 [4] of the layer of multi-token prediction: its loss, the sum of the tokens' by their weights; and
        without gradients the sum of the guessed tokens' log-probs, how many of them are the likeliest, and all. It
        learns alone: hidden states, embeddings and output layer are taken as they are."""
        names = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params", "sequence_len_offset")
        embedding, output = self._input_embedding(), self.tied_weight
        output = self.output_layer.weight if output is None else output
        sequence = self.config.sequence_parallel
        embedded = embed(ahead.next_tokens, embedding, self.tensor_group, sequence_parallel=sequence)
        hidden = self.mtp(hidden_states, embedded, **{name: of_layers[name] for name in names})
        guessed = ChosenTokens(ahead.rows, ahead.targets, with_entropy=False, top_k=1)
        logprobs, _, _, likeliest = self._scored(hidden, output.detach(), guessed)
        is_right = likeliest.detach() == ahead.targets
        counts = (logprobs.detach().sum(), is_right.sum(), is_right.new_tensor(len(is_right), dtype=torch.float32))
        return torch.stack([-(logprobs * ahead.weights).sum(), *(count.float() for count in counts)])

    def _input_embedding(self) -> Tensor:
        """This process's rows of the embedding."""
        if self.pre_process:
            return self.embedding.word_embeddings.weight.detach()
        weight = self.tied_weight if self.tied_weight is not None else self.received_embedding
        assert weight is not None
        return weight.detach()

    def head(self, hidden_states: Tensor, labels: ChosenTokens) -> Tensor:
        """Float32 [2 or more, N], see above."""
        return self._scored(hidden_states, self.tied_weight, labels)

    def _scored(self, hidden_states: Tensor, weight: Tensor | None, labels: ChosenTokens) -> Tensor:
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
