"""Fused log-probs over a tensor-parallel group equal those of one process with the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.megatron.fused_logprobs import output_logprobs

from .launching import run_distributed

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Case:
    """`padded` columns are cut over the ranks; those from `vocab` on are padding."""

    name: str
    tokens: int = 30
    vocab: int = 37
    padded: int = 40
    temperature: float = 1.0
    scale: float = 1.0
    with_entropy: bool = True
    chunk: int | None = 7
    dtype: torch.dtype = torch.float32


CASES = [
    Case("padding_on_the_last_rank"),
    Case("last_rank_is_padding_only", vocab=15),
    Case("cold_and_large_logits", temperature=0.01, scale=30.0),
    Case("hot", temperature=100.0),
    Case("without_entropy", with_entropy=False, chunk=None),
    Case("no_tokens", tokens=0),
    Case("bf16", dtype=torch.bfloat16, scale=0.3),
]


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [N, 8], padded weight [V, 8] and targets [N]."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(case.tokens, 8, generator=generator) * case.scale
    weight = torch.randn(case.padded, 8, generator=generator)
    targets = torch.randint(0, case.vocab, (case.tokens,), generator=generator)
    # Both ends of each rank's slice.
    ends = torch.tensor([0, case.padded // 2 - 1, case.padded // 2, case.vocab - 1]).clamp(max=case.vocab - 1)
    targets[:4] = ends[: case.tokens]
    return hidden.to(case.dtype), weight.to(case.dtype), targets


def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """A sum with a different weight for each log-prob and entropy."""
    factors = torch.linspace(-1, 2, 2 * len(logprobs), dtype=logprobs.dtype).view(2, -1)
    return (factors[0] * logprobs + factors[1] * entropy).sum()


NUM_OTHERS = 9


def others(case: Case) -> Tensor:
    """Different ids for each token, of both ranks' parts."""
    generator = torch.Generator().manual_seed(2)
    return torch.rand(case.tokens, case.vocab, generator=generator).argsort(-1)[:, :NUM_OTHERS]


def factors(case: Case) -> Tensor:
    return torch.linspace(-2, 3, case.tokens * NUM_OTHERS).view(case.tokens, NUM_OTHERS)


def on_my_part_of_the_vocabulary():
    """Log-probs, entropies and the gradients of the hidden states and of this process's weight, for each case."""
    results = {}
    for case in CASES[:3]:
        hidden, weight, targets = inputs(case)
        part = weight.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
        settings = {"temperature": case.temperature, "vocab_size": case.vocab, "group": dist.group.WORLD}
        *_, of_others = output_logprobs(hidden.requires_grad_(), part, targets, **settings, others=others(case))
        (of_others * factors(case)).sum().backward()
        found = output_logprobs(hidden, part, targets, **settings, chunk_positions=case.chunk, top_k=NUM_OTHERS)[2:]
        results["others", case.name] = [of_others.detach(), *(x.detach() for x in found), hidden.grad, part.grad]
    for case in CASES:
        hidden, weight, targets = inputs(case)
        hidden.requires_grad_()
        part = weight.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
        logprobs, entropy = output_logprobs(
            hidden,
            part,
            targets,
            temperature=case.temperature,
            vocab_size=case.vocab,
            group=dist.group.WORLD,
            with_entropy=case.with_entropy,
            chunk_positions=case.chunk,
        )
        loss(logprobs, entropy).backward()
        results[case.name] = [logprobs.detach(), entropy.detach(), hidden.grad, part.grad]
    return results


@pytest.fixture(scope="module")
def results():
    return run_distributed(on_my_part_of_the_vocabulary, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_equal_float64_on_one(results, case):
    hidden, weight, targets = inputs(case)
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    logp = torch.log_softmax(leaves[0] @ leaves[1][: case.vocab].T / case.temperature, dim=-1)
    logprobs = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1) * case.with_entropy
    loss(logprobs, entropy).backward()
    first, second = (rank[case.name] for rank in results)
    for mine, other, expected in zip(first[:2], second[:2], (logprobs, entropy), strict=True):
        assert torch.equal(mine, other)
        assert_near(mine, expected, case)
    # Each rank has its vocabulary slice's part of the hidden gradient, and its slice of the weight's.
    assert_near(first[2].double() + second[2].double(), leaves[0].grad, case)
    assert_near(torch.cat([first[3], second[3]]), leaves[1].grad, case)
    assert torch.cat([first[3], second[3]])[case.vocab :].abs().sum() == 0


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_more_tokens_and_the_most_probable_ones_are_found_on_either_rank(results, case):
    hidden, weight, _ = inputs(case)
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    logp = torch.log_softmax(leaves[0] @ leaves[1][: case.vocab].T / case.temperature, dim=-1)
    expected, top = logp.gather(1, others(case)), logp.topk(NUM_OTHERS)
    (expected * factors(case)).sum().backward()
    first, second = (rank["others", case.name] for rank in results)
    for mine, other in zip(first[:3], second[:3], strict=True):
        assert torch.equal(mine, other)
    assert_near(first[0], expected, case)
    assert_near(first[1], top.values, case)
    assert torch.equal(first[2].long(), top.indices)
    assert_near(first[3].double() + second[3].double(), leaves[0].grad, case)
    assert_near(torch.cat([first[4], second[4]]), leaves[1].grad, case)


def assert_near(got, expected, case):
    relative = 2**-5 if case.dtype is torch.bfloat16 else 1e-5
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=relative * max(1.0, scale))
