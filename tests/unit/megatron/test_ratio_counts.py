"""Counting importance ratios."""

import math

import torch

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.config import AlgorithmConfig
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch, TokenScores
from dapo_mega.megatron.ratio_counts import HIGHEST, NUM_BINS, RatioCounts


def bins_of(counts):
    return {bin_: int(count) for bin_, count in enumerate(counts.counts()) if count}


def test_ratios_fall_into_their_bins_and_the_rest_into_the_last():
    counts = RatioCounts()
    ratios = torch.tensor([0.0, 0.79, 0.801, 1.0, 1.281, HIGHEST, 1e9, math.inf, math.nan])
    counts.add(ratios.log())
    counts.add(torch.zeros(3), torch.tensor([True, False, True]))
    width = HIGHEST / NUM_BINS
    assert bins_of(counts) == {0: 1, int(0.79 / width): 1, 40: 1, 50: 3, 64: 1, NUM_BINS - 1: 4}


def test_counting_changes_no_bit_of_loss_and_gradient():
    generator = torch.Generator().manual_seed(0)
    samples = [single_turn([1, 2], list(range(3, 3 + n)), advantage=(-1.0) ** n) for n in (3, 5, 8)]
    micro = pack(flatten(samples), max_response_tokens=16)
    num_tokens = int(micro.targets.response_mask.sum())
    old = torch.randn(num_tokens, generator=generator)
    settings = AlgorithmConfig().resolved(engine_differs=False)

    def evaluate(counts):
        logprobs = (old + 0.3 * torch.randn(num_tokens, generator=torch.Generator().manual_seed(1))).requires_grad_()
        objective = PolicyGradient(settings, ratios=counts)
        term = objective.evaluate(TokenScores(logprobs, torch.zeros(num_tokens)), TokenBatch(micro, old))
        term.total.backward()
        return term, logprobs.grad

    counts = RatioCounts()
    (plain, plain_gradient), (counted, counted_gradient) = evaluate(None), evaluate(counts)
    assert torch.equal(plain.total, counted.total)
    assert torch.equal(plain_gradient, counted_gradient)
    assert {name: float(v) for name, v in plain.sums.items()} == {n: float(v) for n, v in counted.sums.items()}
    assert counts.counts().sum() == num_tokens
