"""The gradients of distillation, against those of the exact reverse KL in float64."""

from dataclasses import replace

import pytest
import torch

from dapo_mega.algorithms.ratios import kl_with_rest
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


@pytest.mark.parametrize("top_k", [1, 4, VOCAB])
def test_of_the_most_probable_tokens_it_is_that_of_the_kl_with_the_rest_as_one(top_k):
    generator = torch.Generator().manual_seed(0)
    logits, other = (2 * torch.randn(6, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    own, teacher = logits.log_softmax(-1), other.log_softmax(-1)
    top = teacher.topk(top_k)
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    p, q = own.exp(), teacher.exp()
    full = (p * (own - teacher)).sum(-1)
    is_rest = torch.ones(6, VOCAB, dtype=torch.float64).scatter_(1, top.indices, 0)
    exact = (p * (own - teacher) * (1 - is_rest)).sum(-1)
    if top_k < VOCAB:
        p_rest, q_rest = (p * is_rest).sum(-1), (q * is_rest).sum(-1)
        exact = exact + p_rest * (p_rest.log() - q_rest.log())
        assert (exact < full).all()
    taught = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    (expected,) = torch.autograd.grad(0.3 * (exact * weights * taught).sum(), logits)

    micro = pack(
        flatten([replace(single_turn([1], [2]), **empty_top(2, top_k)) for _ in range(6)]), max_response_tokens=1
    )
    assert torch.equal(micro.teacher_top[0], torch.full((6, top_k), -1, dtype=torch.int32))
    of_tokens = torch.zeros(len(micro.tokens), dtype=torch.float64)
    of_tokens[micro.targets.response_mask] = weights
    teachers = torch.full_like(micro.targets.teachers, -1)
    teachers[micro.targets.response_mask] = torch.tensor([1, 1, 1, 1, 1, -1], dtype=torch.int8)  # None of the last.
    micro = replace(micro, token_weights=of_tokens, targets=replace(micro.targets, teachers=teachers))
    micro = micro.with_teacher_top({0: (top.indices * 0, top.values * 0), 1: (top.indices, top.values)})
    ids = micro.teacher_top[0].long()
    assert ids[:5].tolist() == top.indices[:5].tolist()
    own = logits.log_softmax(-1)
    others = own.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -1e30)
    objective = PolicyGradient(AlgorithmConfig(importance_cap=None, sequence_mask=None), teacher_weight=0.3)
    scores = TokenScores(own[:, 2], torch.zeros(6), others)
    term = objective.evaluate(scores, TokenBatch(micro, own[:, 2].detach()))
    (got,) = torch.autograd.grad(term.total, logits)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    found = objective.metrics({name: float(term.sums[name]) for name in objective.sum_names})
    wanted = (exact if top_k < VOCAB else full)[:5].mean()
    assert found["policy/kl_to_teacher"] == pytest.approx(float(wanted), rel=1e-5)


def empty_top(num_rows, top_k):
    """Columns of samples that no server's teacher has."""
    ids = torch.full((num_rows, top_k), -1, dtype=torch.int32)
    return {"teacher_top_ids": ids, "teacher_top_logprobs": torch.full((num_rows, top_k), -1e30)}


def test_a_rest_without_probability_leaves_loss_and_gradient_finite():
    certain = torch.tensor([[40.0, 0.0, -20.0]], dtype=torch.float32).log_softmax(-1)
    for own, teacher in ((certain, certain.roll(1, -1)), (certain.roll(1, -1), certain)):
        leaf = own[:, :2].clone().requires_grad_()
        kl = kl_with_rest(leaf, teacher[:, :2])
        (gradient,) = torch.autograd.grad(kl.sum(), leaf)
        assert kl.isfinite().all()
        assert gradient.isfinite().all()
