"""Fused log-probs over a tensor-parallel group equal those of one process with the whole vocabulary."""

from pathlib import Path

import pytest
import torch

from .fused_cases import CASES, inputs, loss
from .launching import run_workers

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).parent / "workers" / "fused_logprobs.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    run_workers(WORKER, 2, [str(folder)], folder / "logs")
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(2)]


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


def assert_near(got, expected, case):
    relative = 2**-5 if case.dtype is torch.bfloat16 else 1e-5
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=relative * max(1.0, scale))
