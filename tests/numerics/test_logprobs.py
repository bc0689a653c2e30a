"""Chunked log-probs and entropy against float64, gradients included."""

import pytest
import torch
import torch.distributed as dist

from dapo_mega.megatron import logprobs as module
from dapo_mega.megatron.logprobs import vocab_parallel_logprobs

VOCAB, PADDED, POSITIONS = 37, 40, 50


@pytest.fixture(scope="module")
def group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def reference(logits, rows, targets, temperature):
    logp = torch.log_softmax(logits[rows, :VOCAB].double() / temperature, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_values_and_gradients_equal_float64(group, monkeypatch, temperature, chunk):
    monkeypatch.setattr(module, "CHUNK_POSITIONS", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(POSITIONS, PADDED, generator=generator) * 4
    rows = torch.arange(3, POSITIONS, 2)
    targets = torch.randint(0, VOCAB, (len(rows),), generator=generator)
    weights = torch.randn(2, len(rows), generator=generator)
    mine = logits.clone().requires_grad_()
    exact = logits.double().requires_grad_()
    got = vocab_parallel_logprobs(mine, rows, targets, temperature=temperature, vocab_size=VOCAB, group=group)
    expected = reference(exact, rows, targets, temperature)
    for a, b, w in zip(got, expected, weights, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
        (a * w).sum().backward(retain_graph=True)
        (b * w).sum().backward(retain_graph=True)
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert mine.grad[:, VOCAB:].abs().sum() == 0
    assert mine.grad[:3].abs().sum() == 0


def test_extreme_logits_stay_finite(group):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 1e30, 0.0]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(
        logits, torch.tensor([0, 1]), torch.tensor([0, 1]), temperature=1.0, vocab_size=3, group=group
    )
    (logprobs.sum() + entropy.sum()).backward()
    torch.testing.assert_close(logprobs, torch.zeros(2))
    torch.testing.assert_close(entropy, torch.zeros(2))
    assert torch.isfinite(logits.grad).all()


def test_float32_copies_exist_for_one_chunk_only(group):
    """Forward and backward of bf16 logits never allocate a float32 tensor of all positions x vocabulary."""
    positions, vocab = 8 * module.CHUNK_POSITIONS, 512
    logits = torch.randn(positions, vocab).bfloat16().requires_grad_()
    rows, targets = torch.arange(positions), torch.randint(0, vocab, (positions,))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32:
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        logprobs, entropy = vocab_parallel_logprobs(
            logits, rows, targets, temperature=1.0, vocab_size=vocab, group=group
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert 0 < largest <= module.CHUNK_POSITIONS * vocab
