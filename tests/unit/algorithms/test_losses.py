"""Every expected number below is derived by hand in the comment beside it."""

import math
from dataclasses import replace

import pytest
import torch

from dapo_mega.algorithms.policy_losses import ClipLoss, LossInputs
from dapo_mega.algorithms.ratios import effective_share, importance_weights, kl_estimate, segment_sums, within_bounds


def loss_of(ratios, advantages, dual_clip=None):
    """Per-token loss, gradient, and which tokens count in a share, for given probability ratios, pi_old = 1/2."""
    old = torch.full((len(ratios),), math.log(0.5), dtype=torch.float64)
    new = old + torch.tensor(ratios, dtype=torch.float64).log()
    new.requires_grad_()
    tokens = LossInputs(new, old, torch.tensor(advantages, dtype=torch.float64), torch.ones(len(ratios)) > 0)
    kind = ClipLoss(low=0.2, high=0.28, dual_clip=dual_clip)
    loss = kind.token_losses(tokens).loss
    loss.sum().backward()
    alone = [kind.token_losses(replace(tokens, in_loss=only)).sums for only in torch.eye(len(ratios)) > 0]
    return loss, new.grad, lambda share: [bool(sums[share]) for sums in alone]


def test_clip_higher_bounds_each_side_on_its_own():
    #            r A              clip(r) A         min -> loss = -min
    # r 1.5 A 1:  1.5,             1.28             -> -1.28  (upper bound, no gradient)
    # r 0.5 A 1:  0.5,             0.8              -> -0.5   (gradient -r A = -0.5)
    # r 1.5 A -1: -1.5,           -1.28             ->  1.5   (gradient  1.5)
    # r 0.5 A -1: -0.5,           -0.8              ->  0.8   (lower bound, no gradient)
    # r 1.25 A 1: inside because the upper bound is 1.28, not 1.2
    loss, gradient, counted = loss_of([1.5, 0.5, 1.5, 0.5, 1.25], [1, 1, -1, -1, 1])
    torch.testing.assert_close(loss, torch.tensor([-1.28, -0.5, 1.5, 0.8, -1.25], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([0.0, -0.5, 1.5, 0.0, -1.25], dtype=torch.float64))
    assert counted("policy/clip_high_share") == [True, False, False, False, False]
    assert counted("policy/clip_low_share") == [False, False, False, True, False]


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    # A = -2, c = 10: the loss -r A = 2 r is bounded by 20, reached at r = 10. A = 2 is untouched by c.
    loss, gradient, counted = loss_of([12.0, 9.0, 12.0], [-2, -2, 2], dual_clip=10.0)
    torch.testing.assert_close(loss, torch.tensor([20.0, 18.0, -2.56], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([0.0, 18.0, 0.0], dtype=torch.float64))
    assert counted("policy/dual_clip_share") == [True, False, False]


def test_on_policy_gradient_is_minus_the_advantage():
    _, gradient, _ = loss_of([1.0, 1.0], [0.7, -1.3])
    torch.testing.assert_close(gradient, torch.tensor([-0.7, 1.3], dtype=torch.float64))


def test_zero_advantage_has_no_loss_and_no_gradient():
    loss, gradient, _ = loss_of([3.0, 0.1], [0, 0], dual_clip=10.0)
    assert loss.abs().sum() == 0
    assert gradient.abs().sum() == 0


def test_importance_weights_are_bounded_by_the_cap_and_have_no_gradient():
    # pi_old = 1/2. pi_rollout = 1/4 -> weight 2; 1/8 -> 4, capped to 3; 1 -> 1/2.
    old = torch.full((3,), 0.5, dtype=torch.float64).log().requires_grad_()
    weights = importance_weights(old, torch.tensor([0.25, 0.125, 1.0], dtype=torch.float64).log(), 3.0)
    torch.testing.assert_close(weights, torch.tensor([2.0, 3.0, 0.5], dtype=torch.float64))
    assert not weights.requires_grad


def test_a_segment_is_within_bounds_by_its_geometric_mean():
    # Ratios 2 and 1/8: geometric mean 1/2. 3: itself. No token: always. Sums do not depend on the tokens' order.
    ratios, ids = torch.tensor([2.0, 3.0, 0.125], dtype=torch.float64), torch.tensor([0, 1, 0])
    sums = segment_sums(ratios.log(), ids, 3)
    torch.testing.assert_close(sums, torch.tensor([[math.log(0.25), math.log(3), 0], [2, 1, 0]], dtype=torch.float64))
    assert within_bounds(sums, (0.6, 4.0)).tolist() == [False, True, True]
    assert within_bounds(sums, (0.4, 2.0)).tolist() == [True, False, True]
    # Parts of segments, as context parallelism holds them, add up.
    parts = segment_sums(ratios[:1].log(), ids[:1], 3) + segment_sums(ratios[1:].log(), ids[1:], 3)
    torch.testing.assert_close(parts, sums)


def test_extreme_ratios_stay_finite():
    old = torch.tensor([-200.0, 0.0])
    new = torch.tensor([0.0, -200.0], requires_grad=True)
    tokens = LossInputs(new, old, torch.tensor([-1.0, 1.0]), torch.ones(2) > 0)
    loss = ClipLoss(dual_clip=None).token_losses(tokens).loss
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(new.grad).all()


def test_shapes_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        ClipLoss().token_losses(LossInputs(torch.zeros(3), torch.zeros(3), torch.zeros(2), torch.ones(3) > 0))


@pytest.mark.parametrize(
    ("kind", "expected"),
    # log pi = log 1/2, log ref = log 1/4, d = log ref - log pi = -log 2.
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 + math.log(2) - 1)],
)
def test_kl_estimators(kind, expected):
    estimate = kl_estimate(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), kind)
    assert estimate.item() == pytest.approx(expected, rel=1e-6)


def test_the_gradient_of_a_kl_never_pushes_away_from_the_reference():
    """However far it is: a token below the reference is pushed up by every estimate but k1, and one above it down."""
    d = torch.tensor([-90.0, -21.0, -1.0, -1e-4, 1e-4, 1.0, 19.9, 20.1, 90.0])
    for kind in ("k2", "k3"):
        logprobs = (-d).requires_grad_()
        values = kl_estimate(logprobs, torch.zeros_like(d), kind)
        values.sum().backward()
        assert (logprobs.grad * d.sign() <= 0).all(), (kind, logprobs.grad)
        assert values[3:5].tolist() == pytest.approx([5e-9, 5e-9], rel=1e-2), kind


def test_k1_and_k3_are_unbiased_for_a_known_pair_of_distributions():
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    true_kl = (policy * (policy / reference).log()).sum()
    for kind in ("k1", "k3"):
        expectation = (policy * kl_estimate(policy.log(), reference.log(), kind)).sum()
        torch.testing.assert_close(expectation, true_kl)


def test_unequal_weights_leave_a_share_of_the_samples():
    weights = [1.0, 1.0, 4.0]
    share = effective_share(sum(weights), sum(w * w for w in weights), len(weights))
    assert share == 36 / (3 * 18)
    assert effective_share(5.0, 5.0, 5) == 1.0
