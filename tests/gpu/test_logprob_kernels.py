"""The Triton kernels on a CUDA device against plain torch, and fused log-probs against unfused ones."""

import pytest
import torch
import torch.distributed as dist

from dapo_mega.megatron import logprob_kernels, logprobs
from dapo_mega.megatron.fused_logprobs import output_logprobs
from dapo_mega.megatron.logprobs import empty_statistics, gradient_coefficients, vocab_parallel_logprobs

# Triton compiles for a real device only.
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def group():
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0], backend="gloo")
    if started:
        dist.destroy_process_group()


def test_triton_is_installed_with_cuda_torch():
    assert logprob_kernels.IS_AVAILABLE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize(
    ("rows", "width", "padded"), [(1, 1, 1), (5, 37, 40), (64, 151936, 151936), (33, 50257, 50304)]
)
def test_kernels_agree_with_torch(rows, width, padded, dtype, with_entropy):
    """The oracle runs on the CPU, where logprobs.py uses no kernels."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, padded, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, width, (rows,), generator=generator)
    targets[1::2] = -1
    expected = empty_statistics(rows, logits)
    logprobs.chunk_statistics_(logits[:, :width].clone(), targets, 0.7, expected, with_entropy)
    on_gpu = logits.cuda()
    got = empty_statistics(rows, on_gpu)
    logprob_kernels.chunk_statistics(on_gpu[:, :width], targets.cuda(), 0.7, got, with_entropy)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(on_gpu.cpu(), logits)

    peak, total, weighted, _ = expected
    factors = torch.randn(2, rows, generator=generator)
    entropy = total.log() - weighted / total
    coefficients = gradient_coefficients(targets, 0.7, peak + total.log(), entropy, *factors)
    gradient = logits.clone()
    logprobs.chunk_gradient_(gradient[:, :width], targets, 0.7, coefficients, with_entropy)
    logprob_kernels.chunk_gradient_(on_gpu[:, :width], targets.cuda(), 0.7, coefficients.cuda(), with_entropy)
    bound = 1e-4 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(on_gpu.cpu(), gradient, rtol=bound, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [64, None])
def test_fused_and_unfused_agree_to_rounding(group, dtype, chunk):
    tokens, hidden_size, vocab, padded = 300, 256, 50257, 50304
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to("cuda", dtype).requires_grad_()
    weight = (torch.randn(padded, hidden_size, generator=generator) / 8).to("cuda", dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator).cuda()
    settings = {"temperature": 0.8, "vocab_size": vocab, "group": group}
    fused = output_logprobs(hidden, weight, targets, **settings, chunk_positions=chunk)
    rows = torch.arange(tokens, device="cuda")
    unfused = vocab_parallel_logprobs(hidden @ weight.T, rows, targets, **settings)
    bound = 1e-4 if dtype is torch.float32 else 2**-6
    for a, b in zip(fused, unfused, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)
    gradients = [torch.autograd.grad((x * 0.7 - y * 0.3).sum(), [hidden, weight]) for x, y in (fused, unfused)]
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() <= bound * b.norm()


def test_peak_memory_on_the_device_does_not_hold_the_logits(group):
    hidden = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(65536, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 65536, (8192,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs_, entropy = output_logprobs(
        hidden, weight, targets, temperature=1.0, vocab_size=65536, group=group, chunk_positions=256
    )
    (logprobs_.sum() + entropy.sum()).backward()
    assert torch.cuda.max_memory_allocated() - before < 8192 * 65536 * 2 / 4
