"""The clipped value loss and the explained variance against numbers worked out by hand."""

import pytest
import torch

from dapo_mega.algorithms.value_loss import explained_variance, value_loss
from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.megatron.value_loss import ValueBatch, ValueLoss


def losses(values, old_values, returns, clip):
    values = torch.tensor(values, requires_grad=True)
    result = value_loss(values, torch.tensor(old_values), torch.tensor(returns), clip)
    result.loss.sum().backward()
    return result.loss.tolist(), values.grad.tolist(), result.clipped.tolist()


def test_without_clip_it_is_half_the_squared_error():
    assert losses([1.0, -0.5], [9.0, 9.0], [0.0, 1.0], None) == ([0.5, 1.125], [1.0, -1.5], [False, False])


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (0.5, 0.25, 1.0, 0.125, -0.5, False),  # Within the bound.
        (1.0, 0.0, 2.0, 1.125, 0.0, True),  # Up, beyond old + 0.5, towards the return: held at 0.5.
        (-1.0, 0.0, -2.0, 1.125, 0.0, True),  # Down, the same.
        (1.0, 0.0, -1.0, 2.0, 2.0, False),  # Beyond the bound, but away from the return: drawn back.
        (0.5, 0.5, 1.0, 0.125, -0.5, False),  # The first update: the bound is not there.
    ],
)
def test_a_value_is_not_pushed_beyond_the_bound(value, old, target, loss, gradient, clipped):
    assert losses([value], [old], [target], 0.5) == ([loss], [gradient], [clipped])


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"one shape \[T\], got \(2,\), \(3,\), \(2,\)"):
        value_loss(torch.zeros(2), torch.zeros(3), torch.zeros(2), None)


def of_lists(returns, values):
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    return explained_variance(
        len(returns), sum(returns), sum(r * r for r in returns), sum(errors), sum(e * e for e in errors)
    )


def test_explained_variance_by_hand():
    # Var(R) = 1.25; errors 0, 1, 0, 1 have the variance 0.25.
    assert of_lists([0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 2.0, 2.0]) == pytest.approx(0.8)
    assert of_lists([0.0, 1.0, 2.0, 3.0], [5.0, 6.0, 7.0, 8.0]) == 1.0
    assert of_lists([0.0, 1.0, 2.0, 3.0], [0.7] * 4) == pytest.approx(0.0)
    # Errors -3, -1, 1, 3.
    assert of_lists([0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]) == pytest.approx(-3.0)


@pytest.mark.parametrize("value", [0.0, 1.0, float(torch.tensor(0.1)), -1e4])
def test_equal_returns_explain_nothing(value):
    assert of_lists([value] * 777, [0.3] * 776 + [0.4]) == 0.0


def test_no_token_in_the_loss_gives_no_means():
    loss = ValueLoss(0.2)
    assert loss.metrics(dict.fromkeys(loss.sum_names, 0.0)) == {}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_constant"])
def test_metrics_are_those_of_all_tokens_however_they_are_split(aggregation):
    """Means over micro-batches would be others: these have 2 and 3 tokens in the loss, and one is left out of it."""
    samples = [single_turn([1], [2, 3]), single_turn([1], [4, 5, 6]), single_turn([1], [7], in_loss=False)]
    splits = [[0, 2], [1]], [[0, 1, 2]], [[2], [1], [0]]
    of_sample = (
        [[0.0, 1.0], [2.0, 3.0, 9.0], [55.0]],
        [[0.0, 0.0], [2.0, 2.0, 9.0], [66.0]],
        [[0.5, 0.5], [2, 2, 8], [7]],
    )
    loss = ValueLoss(0.25)
    results = []
    for split in splits:
        sums = dict.fromkeys(loss.sum_names, 0.0)
        denominator, total = 0, 0.0
        for part in split:
            batch = pack(flatten([samples[i] for i in part]), aggregation=aggregation, max_response_tokens=9)
            returns, old, values = (torch.tensor([x for i in part for x in column[i]]) for column in of_sample)
            term = loss.evaluate(values, ValueBatch(batch, old, returns))
            assert {value.dtype for value in term.sums.values()} == {torch.float64}
            sums = {name: value + float(term.sums[name]) for name, value in sums.items()}
            denominator += int(term.denominator)
            total += float(term.total)
        assert denominator == 5
        assert sums["loss"] == pytest.approx(total)
        results.append(loss.metrics(sums))
    assert results[0] == pytest.approx(results[1])
    assert results[0] == pytest.approx(results[2])
    # Errors of the values, bounded where that is worse: 0.5, 0.75 (clipped), 0, 1, 1.
    expected = {
        "critic/value_loss": (0.5**2 + 0.75**2 + 1 + 1) / 2 / 5,
        "critic/clip_share": 0.2,
        "critic/value_mean": 13 / 5,
        "critic/return_mean": 3.0,
        # Returns 0, 1, 2, 3, 9: variance 95 / 5 - 9 = 10; errors of the old values 0, 1, 0, 1, 0: 0.4 - 0.16.
        "critic/explained_variance": 1 - 0.24 / 10,
    }
    assert results[0] == pytest.approx(expected)
