"""Draws follow the filtered distribution; supports are derived by hand; log-probs are the unfiltered ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_mega.engines.embedded.sampling import request_uniforms, sample_tokens

PROBS = (0.4, 0.05, 0.25, 0.1, 0.2)
LOGITS = torch.tensor(PROBS).log()


def draw(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float = 1.0, **filters: float) -> torch.Tensor:
    rows = logits.expand(len(uniforms), -1)
    return sample_tokens(rows, uniforms, temperature, **filters)[0]  # type: ignore[arg-type]


def grid(n: int = 4000) -> torch.Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_drawn_tokens_follow_the_softmax(temperature: float) -> None:
    logits = torch.linspace(-1.5, 1.5, 11).roll(4)
    uniforms = torch.from_numpy(request_uniforms(seed=3, count=20_000))
    counts = np.bincount(draw(logits, uniforms, temperature).numpy(), minlength=11)
    probs = torch.softmax(logits.double() / temperature, 0).numpy()
    assert chi_square(counts, probs) < 29.59  # 0.999 quantile of chi-square with 10 degrees of freedom


def test_the_inverse_cdf_is_taken_in_token_order() -> None:
    uniforms = torch.tensor([0.0, 0.39, 0.41, 0.44, 0.46, 0.69, 0.71, 0.79, 0.81, 0.99])
    assert draw(LOGITS, uniforms).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("top_k", "top_p", "support"),
    [
        (1, 1.0, {0}),
        (3, 1.0, {0, 2, 4}),
        (0, 0.39, {0}),
        (0, 0.64, {0, 2}),
        (0, 0.66, {0, 2, 4}),
        (0, 0.94, {0, 2, 3, 4}),
        (0, 1e-6, {0}),
        (2, 0.64, {0, 2}),  # 0.4 / 0.65 = 0.615 falls short of 0.64
        (2, 0.61, {0}),  # 0.615 of the top-2's mass does not
        (9, 1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_filters_leave_the_derived_support_in_proportion(top_k: int, top_p: float, support: set[int]) -> None:
    tokens = draw(LOGITS, grid(), top_k=top_k, top_p=top_p)
    mass = sum(PROBS[token] for token in support)
    shares = torch.bincount(tokens, minlength=5) / len(tokens)
    expected = [PROBS[token] / mass if token in support else 0.0 for token in range(5)]
    assert shares.tolist() == pytest.approx(expected, abs=1e-3)
    assert set(tokens.tolist()) == support


@pytest.mark.parametrize(("filters", "first", "last"), [({}, 1, 4), ({"top_k": 2}, 3, 4), ({"top_p": 0.6}, 3, 4)])
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53, 1.0])
def test_extreme_uniforms_draw_the_outermost_token_with_probability(
    filters: dict[str, float], first: int, last: int, uniform: float
) -> None:
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 2.0, 1.5, -200.0, -math.inf])
    token = draw(logits, torch.tensor([uniform], dtype=torch.float64), **filters).item()
    assert token == (last if uniform > 0.5 else first)


@pytest.mark.parametrize("num_tokens", [300, 4096, 5003])
def test_a_large_vocabulary_is_drawn_in_token_order_as_well(num_tokens: int) -> None:
    logits = torch.randn(num_tokens, generator=torch.Generator().manual_seed(1)) * 4
    cdf = torch.softmax(logits.double(), 0).cumsum(0)
    uniforms = grid(2000)
    tokens = draw(logits, uniforms)
    before = torch.nn.functional.pad(cdf, (1, 0))[tokens]
    assert ((before - 1e-6 < uniforms) & (uniforms < cdf[tokens] + 1e-6)).all()


def test_nuclei_of_a_large_vocabulary_are_those_of_a_sort_whatever_other_rows_hold() -> None:
    generator = torch.Generator().manual_seed(2)
    # With a spread of 4 some dozens of tokens are the nucleus, with 0.1 thousands; bf16 makes many of them equal.
    spreads = torch.tensor([4.0, 0.1, 4.0]).unsqueeze(1)
    logits = (torch.randn(3, 6000, generator=generator) * spreads).bfloat16()
    for uniform in grid(20):
        uniforms = uniform.expand(3)
        tokens, _ = sample_tokens(logits, uniforms, 1.0, top_p=0.9)
        alone = [sample_tokens(logits[[row]], uniforms[:1], 1.0, top_p=0.9)[0].item() for row in range(3)]
        assert tokens.tolist() == alone
        for row, token in enumerate(alone):
            probs = torch.softmax(logits[row].double(), 0)
            ranked = probs.sort(descending=True).values
            mass = ranked.cumsum(0) - ranked
            # Equal probabilities may come in any order, so the token's own is looked up.
            at = (mass + ranked > 0.9 * uniform - 1e-3) & (mass < 0.9 * uniform + 1e-3)
            assert probs[int(token)] >= ranked[mass < 0.9].min()
            assert any(torch.isclose(ranked[at], probs[int(token)], rtol=1e-2))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 300),
    top_k=st.integers(0, 20),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    uniform=st.sampled_from([0.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0))), 1.0]),
)
def test_a_filtered_token_is_never_drawn(seed: int, size: int, top_k: int, top_p: float, uniform: float) -> None:
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * 5
    token = draw(logits, torch.tensor([uniform]), top_k=top_k, top_p=top_p).item()
    probs = torch.softmax(logits[0].double(), 0)
    rank = int((probs > probs[int(token)]).sum())
    kept = probs.sort(descending=True).values[: top_k or size]
    assert rank < (top_k or size)
    assert kept[:rank].sum() < top_p * kept.sum() + 1e-6


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_unfiltered_distribution(filters: dict[str, float], temperature: float) -> None:
    logits = LOGITS.expand(50, -1)
    tokens, logprobs = sample_tokens(logits, grid(50), temperature, **filters)  # type: ignore[arg-type]
    expected = torch.log_softmax(LOGITS.double() / temperature, 0)[tokens]
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.double(), expected, atol=1e-6)


@pytest.mark.parametrize("filters", [{}, {"top_k": 9}, {"top_p": 0.9}, {"top_k": 1000}, {"temperature": 0.0}])
def test_rows_that_pad_a_vocabulary_are_never_drawn_and_count_in_logprobs(filters: dict[str, float]) -> None:
    vocabulary, num_tokens = 151_936, 151_669  # Qwen3's.
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    logits[num_tokens:] += 12  # Nearly all of the mass.
    how = {"temperature": 1.0, **filters, "num_tokens": num_tokens}
    tokens, logprobs = sample_tokens(logits.expand(64, -1), grid(64), **how)  # type: ignore[arg-type]
    assert int(tokens.max()) < num_tokens
    assert torch.allclose(logprobs, logits.log_softmax(-1)[tokens], atol=1e-4)
    there_are = {**how, "num_tokens": None}
    expected = sample_tokens(logits[:num_tokens].expand(64, -1), grid(64), **there_are)[0]  # type: ignore[arg-type]
    assert float((tokens == expected).float().mean()) > 0.9  # Shares of the mass are rounded otherwise.


def test_temperature_zero_is_greedy_with_the_logprob_at_temperature_one() -> None:
    tokens, logprobs = sample_tokens(LOGITS.expand(3, -1), torch.tensor([0.0, 0.5, 1.0]), temperature=0)
    assert tokens.tolist() == [0, 0, 0]
    assert logprobs.tolist() == pytest.approx([math.log(0.4)] * 3, abs=1e-6)


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits = torch.linspace(-3, 3, 200).bfloat16()
    tokens, logprobs = sample_tokens(logits.expand(64, -1), grid(64), 1.0)
    assert torch.allclose(logprobs, torch.log_softmax(logits.float(), 0)[tokens], atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 2}])
def test_logits_without_a_distribution_are_refused(bad: float, filters: dict[str, float]) -> None:
    logits = torch.zeros(4, 6)
    logits[2, 3] = bad
    with pytest.raises(FloatingPointError, match=r"rows \[2\]"):
        sample_tokens(logits, grid(4), 1.0, **filters)  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**128 - 1), start=st.integers(0, 300), count=st.integers(1, 50), more=st.integers(0, 50))
def test_any_part_of_a_stream_equals_that_part_of_the_whole(seed: int, start: int, count: int, more: int) -> None:
    whole = request_uniforms(seed, start + count + more)
    assert np.array_equal(request_uniforms(seed, count, start), whole[start : start + count])


@pytest.mark.parametrize("other", [1, 1 << 64])
def test_streams_are_uniform_and_differ_between_seeds(other: int) -> None:
    first, second = request_uniforms(0, 10_000), request_uniforms(other, 10_000)
    for stream in (first, second):
        assert chi_square(np.histogram(stream, bins=20, range=(0, 1))[0], np.full(20, 0.05)) < 43.8  # 0.999 of 19
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.04


@pytest.mark.parametrize("seed", [-1, 2**128])
def test_seeds_that_do_not_fit_the_key_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="key"):
        request_uniforms(seed, 1)
