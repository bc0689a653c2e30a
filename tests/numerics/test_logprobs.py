"""Log-probs and entropy, fused with the output layer and from logits: against float64, against each other, and in how
little memory."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dapo_mega.megatron import fused_logprobs, logprob_kernels, logprobs
from dapo_mega.megatron.fused_logprobs import output_logprobs
from dapo_mega.megatron.logprobs import vocab_parallel_logprobs

VOCAB, PADDED, HIDDEN, TOKENS = 37, 40, 12, 50


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def inputs(tokens=TOKENS, hidden=HIDDEN, padded=PADDED, vocab=VOCAB, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    states = (torch.randn(tokens, hidden, generator=generator) * scale).to(dtype)
    weight = torch.randn(padded, hidden, generator=generator).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    return states.requires_grad_(), weight.requires_grad_(), targets


def reference(hidden, weight, targets, temperature, vocab=VOCAB):
    """Float64 leaves, log-probs and entropies."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logp = torch.log_softmax(leaves[0] @ leaves[1][:vocab].T / temperature, dim=-1)
    return leaves, logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def unfused(hidden, weight, targets, *, temperature, vocab_size, group, with_entropy=True, **more):
    return vocab_parallel_logprobs(
        hidden @ weight.T,
        torch.arange(len(hidden)),
        targets,
        temperature=temperature,
        vocab_size=vocab_size,
        group=group,
        with_entropy=with_entropy,
        **more,
    )


def gradients(leaves, logprobs, entropy):
    """Of a sum with a different weight for each log-prob and entropy."""
    factors = torch.linspace(-1, 2, 2 * len(logprobs), dtype=logprobs.dtype).view(2, -1)
    return torch.autograd.grad((factors[0] * logprobs + factors[1] * entropy).sum(), leaves)


def assert_near(got, expected, relative):
    """Equal up to `relative` of the largest expected value."""
    bound = relative * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=bound)


@pytest.fixture(params=["fused", "unfused"])
def in_chunks(request, monkeypatch):
    """Either implementation, given how many positions it works on at a time."""

    def of(chunk):
        if request.param == "fused":
            return partial(output_logprobs, chunk_positions=chunk)
        monkeypatch.setattr(logprobs, "CHUNK_POSITIONS", chunk or 1024)
        return unfused

    return of


@pytest.mark.parametrize("chunk", [7, 16, None])
@pytest.mark.parametrize("temperature", [0.01, 0.6, 1.0, 100.0])
def test_values_and_gradients_equal_float64(group, in_chunks, temperature, chunk):
    hidden, weight, targets = inputs()
    got = in_chunks(chunk)(hidden, weight, targets, temperature=temperature, vocab_size=VOCAB, group=group)
    leaves, *expected = reference(hidden, weight, targets, temperature)
    # Logits of up to 15 / 0.01 are rounded to 1e-4 in float32.
    bound = 1e-6 if temperature > 0.1 else 2e-5
    for mine, exact in zip(got, expected, strict=True):
        assert mine.dtype is torch.float32
        assert_near(mine, exact, bound)
    mine, exact = gradients([hidden, weight], *got), gradients(leaves, *expected)
    for a, b in zip(mine, exact, strict=True):
        assert_near(a, b, 3 * bound)
    assert mine[1][VOCAB:].abs().sum() == 0


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("chunk", [7, None])
def test_more_tokens_of_each_position_and_their_gradients_equal_float64(group, in_chunks, chunk, with_entropy):
    hidden, weight, targets = inputs()
    others = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(i))[:5] for i in range(TOKENS)])
    others[::3, 1], others[1::3, 4] = -1, VOCAB + 1  # Of none, and of padding.
    settings = {"temperature": 0.6, "vocab_size": VOCAB, "group": group, "with_entropy": with_entropy}
    *got, of_others = in_chunks(chunk)(hidden, weight, targets, **settings, others=others)
    leaves, *expected = reference(hidden, weight, targets, 0.6)
    expected[1] = expected[1] * with_entropy
    logp = torch.log_softmax(leaves[0] @ leaves[1][:VOCAB].T / 0.6, dim=-1)
    is_there = (others >= 0) & (others < VOCAB)
    exact = logp.gather(1, others.where(is_there, 0)) * is_there
    assert_near(of_others * is_there, exact, 1e-6)
    assert (of_others[~is_there] == -1e30).all()
    factors = torch.linspace(-2, 3, others.numel()).view(others.shape)
    with_others = [(of_others.where(is_there, 0) * factors).sum(), (exact * factors).sum()]
    found = torch.autograd.grad(got[0].sum() + got[1].sum() + with_others[0], [hidden, weight], retain_graph=True)
    wanted = torch.autograd.grad(sum(x.sum() for x in expected) + with_others[1], leaves)
    for a, b in zip(found, wanted, strict=True):
        assert_near(a, b, 3e-6)
    # Alone, and of those of no token.
    (alone,) = torch.autograd.grad((of_others * factors).where(~is_there, 0).sum(), [weight])
    assert not alone.any()


@pytest.mark.parametrize("top_k", [3, VOCAB])
def test_the_most_probable_tokens_are_those_of_float64(group, in_chunks, top_k):
    hidden, weight, targets = inputs()
    weight.data[VOCAB:] = 9.0  # Padding is none of them.
    settings = {"temperature": 0.6, "vocab_size": VOCAB, "group": group}
    *_, logprobs, ids = in_chunks(7)(hidden, weight, targets, **settings, top_k=top_k)
    leaves, *_ = reference(hidden, weight, targets, 0.6)
    expected = torch.log_softmax(leaves[0] @ leaves[1][:VOCAB].T / 0.6, dim=-1).topk(top_k)
    assert torch.equal(ids.long(), expected.indices)
    assert_near(logprobs, expected.values.detach(), 1e-6)


def test_more_tokens_that_do_not_fit_are_refused(group):
    settings = {"temperature": 1.0, "vocab_size": VOCAB, "group": group}
    with pytest.raises(ValueError, match=r"others \(50,\) must be \[N, k\] with N = 50"):
        output_logprobs(*inputs(), **settings, others=inputs()[2])
    with pytest.raises(ValueError, match="top_k=38 is more than the 37 tokens of the vocabulary"):
        output_logprobs(*inputs(), **settings, top_k=38)


def test_logits_of_other_rows_get_no_gradient(group):
    logits = inputs()[0].detach().requires_grad_()
    rows = torch.arange(3, len(logits), 2)
    settings = {"temperature": 0.6, "vocab_size": 9, "group": group}
    outputs = vocab_parallel_logprobs(logits, rows, rows % 9, **settings)
    expected = vocab_parallel_logprobs(logits[rows], torch.arange(len(rows)), rows % 9, **settings)
    for mine, alone in zip(outputs, expected, strict=True):
        assert torch.equal(mine, alone)
    (gradient,) = torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), [logits])
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == rows.tolist()
    assert gradient[:, 9:].abs().sum() == 0


def test_gradients_pass_a_finite_difference_check_in_float64(group):
    hidden, weight, targets = inputs(tokens=5, hidden=3, padded=9, vocab=7, dtype=torch.float64)

    def outputs(hidden, weight):
        return output_logprobs(hidden, weight, targets, temperature=0.7, vocab_size=7, group=group, chunk_positions=2)

    assert torch.autograd.gradcheck(outputs, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [16, None])
def test_fused_and_unfused_agree_to_rounding(group, dtype, chunk):
    hidden, weight, targets = inputs(hidden=64, dtype=dtype)
    settings = {"temperature": 0.8, "vocab_size": VOCAB, "group": group}
    got = output_logprobs(hidden, weight, targets, **settings, chunk_positions=chunk)
    expected = unfused(hidden, weight, targets, **settings)
    for a, b in zip(got, expected, strict=True):
        assert_near(a, b, 1e-6)
    # A sum of bf16 gradients is rounded once a chunk.
    bound = 2e-6 if dtype is torch.float32 else 2**-7
    for a, b in zip(gradients([hidden, weight], *got), gradients([hidden, weight], *expected), strict=True):
        assert a.dtype is dtype
        assert_near(a, b, bound)


def test_bf16_stays_within_its_rounding_of_float64(group):
    hidden, weight, targets = inputs(hidden=64, dtype=torch.bfloat16, scale=0.2)
    got = output_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=VOCAB, group=group, chunk_positions=16)
    leaves, *expected = reference(hidden, weight, targets, 1.0)
    # Logits below 8 are rounded by up to 2^-6.
    for a, b in zip(got, expected, strict=True):
        assert_near(a, b, 2**-5)
    for a, b in zip(gradients([hidden, weight], *got), gradients(leaves, *expected), strict=True):
        assert_near(a, b, 2**-5)


def test_bf16_log_probs_over_a_whole_vocabulary(group):
    """Qwen3's. Both ways round logits to bf16 on a CPU, which is all of the error: half a step of the largest."""
    vocab = 151_936
    hidden, weight, targets = inputs(tokens=16, hidden=64, padded=vocab, vocab=vocab, dtype=torch.bfloat16, scale=0.25)
    expected = reference(hidden, weight, targets, 1.0, vocab)[1].detach()
    settings = {"temperature": 1.0, "vocab_size": vocab, "group": group}
    errors = {}
    for forward in (output_logprobs, unfused):
        errors[forward] = (forward(hidden, weight, targets, **settings)[0].detach() - expected).abs().max().item()
    print("largest error in nats:", {forward.__name__: f"{error:.1e}" for forward, error in errors.items()})
    largest = (hidden.detach().double() @ weight.detach().double().T).abs().max().item()
    assert errors[output_logprobs] < 2**-8 * largest
    assert errors[unfused] < 2**-8 * largest


def test_many_small_bf16_gradients_of_a_weight_are_summed_in_float32(group):
    """512 equal addends; a bf16 sum would stand still at 256 of them."""
    hidden, weight, _ = inputs(tokens=1, dtype=torch.bfloat16)
    targets = torch.zeros(1, dtype=torch.long)
    settings = {"temperature": 1.0, "vocab_size": VOCAB, "group": group, "chunk_positions": 1}
    single, many = (
        torch.autograd.grad(
            output_logprobs(hidden.expand(n, -1), weight, targets.expand(n), **settings)[0].sum(), weight
        )[0]
        for n in (1, 512)
    )
    torch.testing.assert_close(many, 512 * single, rtol=0, atol=0)


def test_on_a_gpu_kernels_and_products_in_float32_give_the_same(group, monkeypatch):
    """As far as a CPU can show it: what is chosen there, with stand-ins for the kernels and for the product."""
    hidden, weight, targets = inputs(hidden=64, dtype=torch.bfloat16)
    settings = {"temperature": 0.6, "vocab_size": VOCAB, "group": group, "chunk_positions": 16}

    def learnt():
        weight.main_grad = torch.ones(weight.shape)
        weight.grad_added_to_main_grad = False
        logprobs, entropy = output_logprobs(hidden, weight, targets, **settings, accumulate_into_main_grad=True)
        gradient = gradients([hidden], logprobs, entropy)[0]
        return logprobs, entropy, gradient, weight.main_grad - 1

    expected = learnt()
    calls = Counter()

    def by_kernel(name, function, *arguments):
        calls[name] += 1
        with monkeypatch.context() as on_a_cpu:
            on_a_cpu.setattr(logprobs, "_kernels_for", lambda logits: None)
            function(*arguments)

    def product_and_sum(total, left, right, *, out, out_dtype):
        calls[out_dtype] += 1
        assert total is out
        return multiply(total, left.to(out_dtype), right.to(out_dtype), out=out)

    multiply = torch.addmm
    monkeypatch.setattr(torch, "addmm", product_and_sum)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    kernels = {"chunk_statistics": logprobs.chunk_statistics_, "chunk_gradient_": logprobs.chunk_gradient_}
    for name, function in kernels.items():
        monkeypatch.setattr(logprob_kernels, name, partial(by_kernel, name, function))
    monkeypatch.setattr(logprob_kernels, "IS_AVAILABLE", True)
    for got, wanted in zip(learnt(), expected, strict=True):
        assert_near(got, wanted, 2**-7)
    num_chunks = -(-TOKENS // 16)
    assert calls == {**dict.fromkeys(kernels, num_chunks), torch.float32: num_chunks}


@pytest.mark.parametrize("temperature", [1.0, 0.01, 100.0])
@pytest.mark.parametrize("size", [1e4, 1e30])
def test_extreme_logits_stay_finite(group, in_chunks, size, temperature):
    hidden = torch.tensor([[size, -size, 0.0], [-size, size, 0.0]], requires_grad=True)
    weight = torch.eye(3).requires_grad_()
    targets = torch.tensor([0, 0])
    got = in_chunks(None)(hidden, weight, targets, temperature=temperature, vocab_size=3, group=group)
    torch.testing.assert_close(got[0], torch.tensor([0.0, -2 * size / temperature]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1], torch.zeros(2))
    for gradient in torch.autograd.grad(got[0].sum() + got[1].sum(), [hidden, weight]):
        assert torch.isfinite(gradient).all()


def test_without_entropy_the_entropies_are_zero_and_carry_no_gradient(group):
    hidden, weight, targets = inputs()
    settings = {"temperature": 0.6, "vocab_size": VOCAB, "group": group}
    logprobs, entropy = output_logprobs(hidden, weight, targets, **settings, with_entropy=False)
    full, _ = output_logprobs(hidden, weight, targets, **settings)
    assert torch.equal(logprobs, full)
    assert entropy.abs().sum() == 0
    mine = torch.autograd.grad(logprobs.sum() + 5 * entropy.sum(), [hidden, weight])
    for a, b in zip(mine, torch.autograd.grad(full.sum(), [hidden, weight]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_asked_for_are_computed(group, needed):
    leaves = [x.requires_grad_(need) for x, need in zip(inputs()[:2], needed, strict=True)]
    logprobs, _ = output_logprobs(*leaves, inputs()[2], temperature=1.0, vocab_size=VOCAB, group=group)
    assert logprobs.requires_grad == any(needed)
    if any(needed):
        logprobs.sum().backward()
    assert tuple(x.grad is not None for x in leaves) == needed


def test_an_empty_micro_batch_gives_zero_gradients(group):
    hidden, weight, targets = inputs(tokens=0)
    logprobs, entropy = output_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=VOCAB, group=group)
    assert logprobs.shape == entropy.shape == (0,)
    for gradient, leaf in zip(gradients([hidden, weight], logprobs, entropy), (hidden, weight), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [True, False])
def test_main_grad_receives_the_gradient_and_autograd_megatrons_stand_in(group, dtype, is_tied):
    hidden, weight, targets = inputs(hidden=64, dtype=dtype)
    settings = {"temperature": 0.6, "vocab_size": VOCAB, "group": group, "chunk_positions": 16}
    leaves, *exact = reference(hidden, weight, targets, 0.6)
    expected = torch.autograd.grad(exact[0].sum(), leaves[1])[0]
    weight.main_grad = torch.ones(weight.shape)
    weight.grad_added_to_main_grad = False
    if is_tied:
        weight.zero_out_wgrad = True
    logprobs, _ = output_logprobs(hidden, weight, targets, **settings, accumulate_into_main_grad=True)
    logprobs.sum().backward()
    assert weight.grad_added_to_main_grad
    assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
    assert_near(weight.main_grad - 1, expected, 3e-6 if dtype is torch.float32 else 2**-5)
    if is_tied:
        assert weight.grad.abs().sum() == 0


def test_main_grad_of_another_dtype_is_refused(group):
    hidden, weight, targets = inputs()
    settings = {"temperature": 1.0, "vocab_size": VOCAB, "group": group, "accumulate_into_main_grad": True}
    with pytest.raises(ValueError, match=r"main_grad torch\.float32 \(40, 12\), found none"):
        output_logprobs(hidden, weight, targets, **settings)
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"found torch\.bfloat16"):
        output_logprobs(hidden, weight, targets, **settings)
    with torch.no_grad():
        output_logprobs(hidden, weight, targets, **settings)


@pytest.mark.parametrize(
    ("hidden", "weight", "targets", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(5, 4), torch.zeros(2, dtype=torch.long), r"must be \[N, h\]"),
        (torch.zeros(2, 3), torch.zeros(5, 3).bfloat16(), torch.zeros(2, dtype=torch.long), "convert one"),
        (torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(3, dtype=torch.long), r"must be \[N\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(group, hidden, weight, targets, message):
    with pytest.raises(ValueError, match=message):
        output_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=5, group=group)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor, of any dtype or of one, that any operation returned."""

    def __init__(self, dtype=None):
        super().__init__()
        self.elements = 0
        self._dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and self._dtype in (None, tensor.dtype):
                self.elements = max(self.elements, tensor.numel())
        return out


def peak_bytes(function):
    """Most bytes that the allocator had given out at once during the call."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        function()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def one_pass(forward, tokens, group, hidden=16, vocab=2048, **settings):
    states, weight, targets = inputs(tokens=tokens, hidden=hidden, padded=vocab, vocab=vocab)

    def run():
        outputs = forward(states, weight, targets, temperature=1.0, vocab_size=vocab, group=group, **settings)
        if torch.is_grad_enabled():
            torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), [states, weight])
        return outputs

    return run


def test_no_tensor_of_tokens_times_vocabulary_is_ever_made(group):
    tokens, vocab = 1024, 2048
    largest = {}
    for forward, settings in ((output_logprobs, {"chunk_positions": 32}), (unfused, {})):
        run = one_pass(forward, tokens, group, **settings)
        with LargestTensor() as watch:
            run()
        largest[forward] = watch.elements
    assert largest[output_logprobs] <= 32 * vocab
    assert largest[unfused] >= tokens * vocab


def test_float32_copies_of_logits_exist_for_one_chunk_only(group):
    positions, vocab = 8 * logprobs.CHUNK_POSITIONS, 512
    logits = torch.randn(positions, vocab).bfloat16().requires_grad_()
    rows, targets = torch.arange(positions), torch.randint(0, vocab, (positions,))
    with LargestTensor(torch.float32) as watch:
        outputs = vocab_parallel_logprobs(logits, rows, targets, temperature=1.0, vocab_size=vocab, group=group)
        (outputs[0].sum() + outputs[1].sum()).backward()
    assert 0 < watch.elements <= logprobs.CHUNK_POSITIONS * vocab


def test_peak_memory_grows_with_the_hidden_states_only(group):
    """Three times more tokens cost their gradients and a few vectors, however large the vocabulary."""
    tokens, hidden, vocab = 512, 16, 2048
    growth = {}
    for forward, settings in ((output_logprobs, {"chunk_positions": 32}), (unfused, {})):
        peaks = [peak_bytes(one_pass(forward, n, group, **settings)) for n in (tokens, 4 * tokens)]
        growth[forward] = (peaks[1] - peaks[0]) / (3 * tokens)
    assert 0 < growth[output_logprobs] <= 4 * hidden + 30 * 8
    assert growth[unfused] >= 4 * vocab


def test_the_default_chunk_bounds_the_logits_of_any_vocabulary():
    cpu = torch.device("cpu")
    for vocab in (100, 32768, 151936):
        positions = fused_logprobs._default_chunk_positions(vocab, cpu)
        assert positions >= fused_logprobs.MIN_CHUNK_POSITIONS
        assert 4 * positions * vocab <= fused_logprobs.CHUNK_BYTES["cpu"]
    assert fused_logprobs._default_chunk_positions(10**9, cpu) == fused_logprobs.MIN_CHUNK_POSITIONS
    assert fused_logprobs._default_chunk_positions(0, cpu) > 0


def test_scoring_keeps_nothing_but_its_results(group):
    tokens = 512
    run = one_pass(output_logprobs, tokens, group, chunk_positions=32)
    with torch.no_grad(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        outputs = run()
    kept = sum(event.nbytes() for event in profile.kineto_results.events() if event.name() == "[memory]")
    assert all(not x.requires_grad for x in outputs)
    assert kept <= 2 * 4 * tokens + 1024
