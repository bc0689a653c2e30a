"""The gradient of distillation on sampled tokens, against that of the exact reverse KL in float64."""

from dataclasses import replace

import pytest
import torch

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.config import AlgorithmConfig, DistillationConfig
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch, TokenScores
from dapo_mega.megatron.token_advantages import distilled

VOCAB = 11


@pytest.mark.parametrize(("coefficient", "reward_weight"), [(1.0, 0.0), (0.25, 2.0)])
def test_on_average_over_samples_it_is_that_of_the_reverse_kl(coefficient, reward_weight):
    generator = torch.Generator().manual_seed(0)
    logits, other = (2 * torch.randn(VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    teacher, rewards = other.log_softmax(0), torch.arange(VOCAB) / VOCAB
    own = logits.log_softmax(0)
    exact = coefficient * (own.exp() * (own - teacher)).sum() - reward_weight * (own.exp() * rewards).sum()
    (expected,) = torch.autograd.grad(exact, logits)

    # Every token once, with its probability as weight, in two micro-batches.
    settings = DistillationConfig(
        teachers={"default": {"path": "/t"}}, coefficient=coefficient, reward_weight=reward_weight
    )
    total = torch.zeros((), dtype=torch.float64)
    own = logits.log_softmax(0)
    for tokens in torch.arange(VOCAB).split(6):
        micro = pack(
            flatten([single_turn([1], [token], advantage=float(rewards[token])) for token in tokens.tolist()]),
            max_response_tokens=1,
        )
        weights = torch.zeros(len(micro.tokens), dtype=torch.float64)
        weights[micro.targets.response_mask] = own[tokens].exp().detach()
        (micro,) = distilled([replace(micro, token_weights=weights)], [(own - teacher)[tokens].detach()], settings)
        scores = TokenScores(own[tokens], torch.zeros(len(tokens)))
        objective = PolicyGradient(AlgorithmConfig(importance_cap=None, sequence_mask=None))
        total = total + objective.evaluate(scores, TokenBatch(micro, own[tokens].detach())).total
    (got,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
