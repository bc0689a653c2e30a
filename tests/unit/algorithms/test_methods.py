"""Loss and gradient of every method, against its paper's equation in float64 and against numbers derived by hand.

The equations are written here response by response, as the papers have them, from log-probs alone; the package computes
them on packed tokens.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dapo_mega.algorithms.advantages import whitened
from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.config import PRESETS, AlgorithmConfig, KlConfig, RunConfig
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch, TokenScores

REWARDS = [1.0, -1.0, 1.0, -1.0]
GREEDY_REWARD = 1.0
LENGTHS = [3, 1, 5, 4]
MAX_RESPONSE_TOKENS = 8


def settings_of(preset, **changes):
    values = {"output_dir": "x", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d"}}}
    return RunConfig(**values, algorithm={"preset": preset, **changes}).algorithm


def draws():
    """(new, old, engine): log-probs of every response, float64, far enough apart that every bound is in play."""
    generator = torch.Generator().manual_seed(0)

    def draw(scale):
        return [scale * torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS]

    old = [-1.0 - d.abs() for d in draw(1.0)]
    new = [o + d for o, d in zip(old, draw(0.5), strict=True)]
    engine = [o + sign * d for o, d, sign in zip(old, draw(1.0), (1, -1, 1, -1), strict=True)]
    return new, old, engine


def advantage(kind):
    return AlgorithmConfig(advantage=kind).advantage


def group_with(greedy_reward):
    return SimpleNamespace(greedy=SimpleNamespace(reward=greedy_reward))


def advantages_of(algorithm):
    values = algorithm.advantage.of_group(REWARDS, group_with(GREEDY_REWARD))
    return whitened(values, LENGTHS) if algorithm.normalize_advantages else values


def ours(algorithm, new, old, engine, advantages):
    """(loss, gradient of every response's log-probs) as the package has them."""
    samples = [
        single_turn(np.arange(2), np.arange(n), e.float().numpy(), advantage=float(a))
        for n, e, a in zip(LENGTHS, engine, advantages, strict=True)
    ]
    micro = pack(flatten(samples), aggregation=algorithm.aggregation, max_response_tokens=MAX_RESPONSE_TOKENS)
    logprobs = torch.cat(new).float().requires_grad_()
    batch = TokenBatch(micro, torch.cat(old).float())
    objective = PolicyGradient(algorithm.resolved(engine_differs=False))
    term = objective.evaluate(TokenScores(logprobs, torch.zeros_like(logprobs)), batch)
    assert set(term.sums) == set(objective.sum_names)
    loss = term.total / term.denominator
    loss.backward()
    metrics = objective.metrics({name: float(value.detach()) for name, value in term.sums.items()})
    return float(loss.detach()), logprobs.grad.split(LENGTHS), metrics


def mean_over_responses(terms):
    return sum(terms) / len(terms)


def surrogate(ratio, advantage, low, high):
    return torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)


def reinforce(new, old, engine, advantages, algorithm):
    """Williams 1992: maximise E[A log pi(y)], with pi(y) the product over tokens."""
    return -mean_over_responses([a * n.sum() for n, a in zip(new, advantages, strict=True)])


def ppo(new, old, engine, advantages, algorithm):
    """PPO's clipped surrogate, a mean over all tokens."""
    terms = [surrogate((n - o).exp(), a, 1 - 0.2, 1 + 0.2) for n, o, a in zip(new, old, advantages, strict=True)]
    return -torch.cat(terms).mean()


def gspo(new, old, engine, advantages, algorithm):
    """GSPO eq. 5 and 7: one ratio per response, (pi(y) / pi_old(y))^(1 / |y|)."""
    low, high = 1 - algorithm.policy_loss.low, 1 + algorithm.policy_loss.high
    return -mean_over_responses(
        [
            surrogate(((n.sum() - o.sum()) / len(n)).exp(), a, low, high)
            for n, o, a in zip(new, old, advantages, strict=True)
        ]
    )


def cispo(new, old, engine, advantages, algorithm):
    """MiniMax-M1: 1 / sum |o_i| sum_i sum_t sg(clip(r)) A log pi, without a lower bound."""
    terms = [
        (n - o).exp().detach().clamp(max=1 + algorithm.policy_loss.high) * a * n
        for n, o, a in zip(new, old, advantages, strict=True)
    ]
    return -torch.cat(terms).mean()


def sapo(new, old, engine, advantages, algorithm):
    """SAPO: 1 / G sum_i 1 / |y_i| sum_t 4 / tau sigmoid(tau (r - 1)) A, tau 1.0 for A > 0 and 1.05 otherwise."""

    def gated(n, o, a):
        tau = 1.0 if a > 0 else 1.05
        return (4 / tau / (1 + (-tau * ((n - o).exp() - 1)).exp()) * a).mean()

    return -mean_over_responses([gated(n, o, a) for n, o, a in zip(new, old, advantages, strict=True)])


def topr(new, old, engine, advantages, algorithm):
    """TOPR: R log pi(y) for positive R; for the others with the weight min(pi(y) / mu(y), 1), where mu sampled y."""

    def term(n, e, a):
        weight = 1.0 if a >= 0 else (n.sum() - e.sum()).exp().detach().clamp(max=1)
        return weight * a * n.sum()

    return -mean_over_responses([term(n, e, a) for n, e, a in zip(new, engine, advantages, strict=True)])


def kimi(new, old, engine, advantages, algorithm):
    """Kimi k1.5 eq. 2: the squared distance of A from tau log(pi(y) / pi_old(y)), over 2 tau, less its constant."""
    tau = algorithm.policy_loss.temperature
    terms = [
        ((a - tau * (n.sum() - o.sum())) ** 2 - a**2) / (2 * tau) for n, o, a in zip(new, old, advantages, strict=True)
    ]
    return mean_over_responses(terms)


def decoupled(new, old, engine, advantages, algorithm):
    """AReaL eq. 5: the surrogate against the proximal policy, weighted by proximal / behaviour where that is at most
    5."""
    terms = []
    for n, o, e, a in zip(new, old, engine, advantages, strict=True):
        weight = (o - e).exp()
        terms.append(weight * (weight <= 5) * surrogate((n - o).exp(), a, 0.8, 1.2))
    return -torch.cat(terms).mean()


EQUATIONS = {
    "reinforce": reinforce,
    "reinforce_pp": ppo,
    "reinforce_pp_baseline": ppo,
    "rloo": ppo,
    "remax": reinforce,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "topr": topr,
    "kimi": kimi,
    "decoupled": decoupled,
}


@pytest.mark.parametrize("preset", EQUATIONS)
def test_loss_and_gradient_are_those_of_the_paper(preset):
    changes = {"kl": {"coefficient": 0.0}} if "kl" in PRESETS[preset] else {}
    algorithm = settings_of(preset, **changes)
    new, old, engine = draws()
    advantages = advantages_of(algorithm)
    leaves = [n.clone().requires_grad_() for n in new]
    expected = EQUATIONS[preset](leaves, old, engine, advantages.tolist(), algorithm)
    expected.backward()
    loss, gradients, _ = ours(algorithm, new, old, engine, advantages)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(gradient.double(), leaf.grad, rtol=2e-5, atol=1e-7)


def test_the_bounds_of_the_equations_are_in_play():
    """Otherwise the test above would also pass without them."""
    new, old, engine = draws()
    ratios, weights = (torch.cat(new) - torch.cat(old)).exp(), (torch.cat(old) - torch.cat(engine)).exp()
    assert min(ratios) < 0.8
    assert max(ratios) > 1.2
    assert max(weights) > 5

    def share(side, preset, **changes):
        return ours(settings_of(preset, **changes), new, old, engine, np.array(REWARDS))[2][f"policy/clip_{side}_share"]

    assert 0 < share("low", "gspo") < 1
    assert 0 < share("high", "gspo") < 1
    assert 0 < share("low", "topr") < 1
    assert 0 < share("high", "cispo", clip_high=0.5) < 1
    assert share("low", "cispo") == 0


def one_response(preset, ratios, advantage, **changes):
    """Loss of one response with these ratios, pi_old = 1/2, of the trainer and of the engine."""
    algorithm = settings_of(preset, **changes)
    old = torch.full((len(ratios),), math.log(0.5))
    micro = pack(
        flatten([single_turn(np.arange(2), np.arange(len(ratios)), old.numpy(), advantage=advantage)]),
        aggregation=algorithm.aggregation,
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )
    new = (old + torch.tensor(ratios).log()).requires_grad_()
    term = PolicyGradient(algorithm.resolved(engine_differs=False)).evaluate(
        TokenScores(new, torch.zeros_like(new)), TokenBatch(micro, old)
    )
    loss = term.total / term.denominator
    loss.backward()
    return float(loss.detach()), new.grad.tolist()


@pytest.mark.parametrize(
    ("preset", "advantage", "changes", "loss", "gradient"),
    [
        # Ratios 1 and 1/4: log pi = log 1/2 and log 1/8, whose sum is -4 log 2. log(pi / pi_old) = -2 log 2.
        ("reinforce", 2.0, {}, 8 * math.log(2), [-2, -2]),
        # Geometric mean 1/2, inside bounds of 0.6: -s A = -1, and each token has half of its gradient.
        ("gspo", 2.0, {"clip_low": 0.6}, -1.0, [-0.5, -0.5]),
        # Outside a lower bound of 0.4, and A < 0: the loss is -0.6 A, without a gradient.
        ("gspo", -2.0, {"clip_low": 0.4}, 1.2, [0, 0]),
        # Weights 1 and 1/4: -(1 x 2 x log 1/2 + 1/4 x 2 x log 1/8) / 2 = (log 2 + 3/4 log 2).
        ("cispo", 2.0, {}, 1.75 * math.log(2), [-1, -0.25]),
        # With a lower bound of 0.5 the second weight is 1/2.
        ("cispo", 2.0, {"clip_low": 0.5}, 2.5 * math.log(2), [-1, -0.5]),
        # Product 1/4: weight 1/4 for A < 0, 1 for A > 0.
        ("topr", -2.0, {}, -2 * math.log(2), [0.5, 0.5]),
        ("topr", 2.0, {}, 8 * math.log(2), [-2, -2]),
        # S = -2 log 2, tau = 1/2: -A S + S^2 / 4; gradient -A + S / 2.
        (
            "kimi",
            2.0,
            {"mirror_temperature": 0.5},
            4 * math.log(2) + math.log(2) ** 2,
            [-2 - math.log(2), -2 - math.log(2)],
        ),
    ],
)
def test_numbers_derived_by_hand(preset, advantage, changes, loss, gradient):
    got, slopes = one_response(preset, [1.0, 0.25], advantage, **changes)
    assert got == pytest.approx(loss, rel=1e-5)
    assert slopes == pytest.approx(gradient, rel=1e-5, abs=1e-7)


def test_the_soft_gate_by_hand():
    # sigmoid(0) = 1/2: -(4 / 1) / 2 x 2 = -4 at r = 1; at r = 2 sigmoid(1). Slopes: -4 s (1 - s) r A.
    s = 1 / (1 + math.exp(-1))
    loss, slopes = one_response("sapo", [1.0, 2.0], 2.0)
    assert loss == pytest.approx((-4 - 8 * s) / 2, rel=1e-6)
    assert slopes == pytest.approx([-2 / 2, -4 * s * (1 - s) * 2 * 2 / 2], rel=1e-5)


def test_chosen_tokens_are_held_back():
    # Ratios 1, 2 and 1/2, A = 2; the last two are chosen. Clip-Cov: no gradient of theirs. KL-Cov: -r A, and |log r|
    # more for them, whose slope is the sign of log r. One response of three tokens: divided by 3.
    slopes = {"clip_cov": [-2, 0, 0], "kl_cov": [-2, -4 + 1, -1 - 1]}
    losses = {"clip_cov": -2 - 4 - 1, "kl_cov": -2 - 4 - 1 + 2 * math.log(2)}
    for preset, expected in slopes.items():
        old = torch.zeros(3)
        new = torch.tensor([1.0, 2.0, 0.5]).log().requires_grad_()
        micro = pack(flatten([single_turn(np.arange(2), np.arange(3), advantage=2.0)]), max_response_tokens=8)
        batch = TokenBatch(micro, old, chosen=torch.tensor([False, True, True]))
        objective = PolicyGradient(settings_of(preset).resolved(engine_differs=False))
        term = objective.evaluate(TokenScores(new, torch.zeros(3)), batch)
        term.total.backward()
        assert float(term.total.detach()) == pytest.approx(losses[preset], rel=1e-5), preset
        assert new.grad.tolist() == pytest.approx(expected, rel=1e-5), preset
        assert objective.metrics({k: float(v) for k, v in term.sums.items()})["policy/covariance_share"] == 2 / 3


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        # pi_old / pi_engine per token: 2, 4 and 1/8; their product is 1.
        ({"importance_cap": 3.0}, [2, 3, 0.125]),
        ({"importance_cap": 100.0, "importance_level": "sequence"}, [1, 1, 1]),
        ({"importance_cap": 0.5, "importance_level": "sequence"}, [0.5, 0.5, 0.5]),
        ({"token_mask": [0.25, 3.0]}, [1, 0, 0]),
        ({"token_mask": [0.0, 3.0], "importance_cap": 3.0}, [2, 0, 0.125]),
        # The engine's own probabilities as old ones: ratios 2, 4 and 1/8, clipped at 0.2 and 1.28 x A.
        ({"old_policy": "engine", "clip_high": 10.0, "clip_low": 1.0}, [2, 4, 0.125]),
    ],
)
def test_corrections_for_the_engine_weigh_tokens(changes, weights):
    algorithm = settings_of("dapo", **changes)
    old = torch.full((3,), 0.5).log().requires_grad_()
    engine = torch.tensor([0.25, 0.125, 4.0]).log()
    micro = pack(flatten([single_turn(np.arange(2), np.arange(3), engine.numpy(), advantage=1.0)]),
                 max_response_tokens=8)  # fmt: skip
    term = PolicyGradient(algorithm.resolved(engine_differs=False)).evaluate(
        TokenScores(old, torch.zeros(3)), TokenBatch(micro, old.detach())
    )
    term.total.backward()
    assert old.grad.tolist() == pytest.approx([-float(w) for w in weights], rel=1e-5)


@pytest.mark.parametrize("preset", EQUATIONS)
def test_what_is_left_out_of_the_loss_need_not_be_a_number(preset):
    """The second response has no token in the loss, and its numbers are NaN: loss, gradients and metrics are as if they
    were others."""
    algorithm = settings_of(preset, importance_level="sequence", kl={"coefficient": 0.1}, entropy_coefficient=0.1)
    objective = PolicyGradient(algorithm.resolved(engine_differs=True))
    found = []
    for filling in (0.5, math.nan):
        left_out = torch.tensor([0.0] * 3 + [filling] * 2)
        samples = [
            single_turn([1], np.arange(n), part.numpy() - 1, advantage=1 + float(part[0]), in_loss=not part.any())
            for n, part in ((3, left_out[:3]), (2, left_out[3:]))
        ]
        micro = pack(flatten(samples), aggregation=algorithm.aggregation, max_response_tokens=MAX_RESPONSE_TOKENS)
        leaf = torch.full((5,), -1.1, requires_grad=True)
        new = leaf + left_out
        batch = TokenBatch(micro, left_out - 1.2, left_out - 1.3)
        term = objective.evaluate(TokenScores(new, left_out + 1), batch)
        term.total.backward()
        found.append((float(term.total.detach()), leaf.grad.tolist(), [float(s) for s in term.sums.values()]))
    assert found[1] == found[0]
    assert found[0][1][0] != 0
    assert found[0][1][3:] == [0, 0]


def test_an_update_without_tokens_has_no_means():
    for preset in PRESETS:
        objective = PolicyGradient(settings_of(preset, kl={"coefficient": 0.1}).resolved(engine_differs=False))
        assert objective.metrics(dict.fromkeys(objective.sum_names, 0.0)) == {"policy/loss_tokens": 0}, preset


def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens():
    # Advantages 1 and -1 with 3 and 1 tokens: mean 1/2, deviation sqrt((3 x 1/4 + 9/4) / 4) = sqrt(3) / 2.
    values = whitened([1.0, -1.0], [3, 1])
    assert values.tolist() == pytest.approx([1 / math.sqrt(3), -math.sqrt(3)])
    assert whitened([0.1, 0.1, 7.0], [3, 1, 0]).tolist() == [0, 0, 0], "equal advantages, and one outside the loss"
    assert whitened([1.0, 2.0], [0, 0]).tolist() == [0, 0]
    # The root of a variance of 1e-12 + 1e-8: noise does not become a signal.
    assert whitened([1e-6, -1e-6], [1, 1]).tolist() == pytest.approx([0.01, -0.01], rel=1e-3)
    assert whitened([0.1 + 0.2, 0.3], [1, 1]).tolist() == [0, 0]


def test_baselines():
    assert advantage("reward").of_group([1.0, -1.0]).tolist() == [1, -1]
    assert advantage("greedy_baseline").of_group([1.0, -1.0], group_with(1.0)).tolist() == [0, -2]
    assert advantage("reward").of_group([1.0]).tolist() == [1]
    with pytest.raises(ValueError, match="finite reward of a greedy response, got None"):
        advantage("greedy_baseline").of_group([1.0, -1.0])
    with pytest.raises(ValueError, match="rewards must be finite"):
        advantage("reward").of_group([1.0, math.nan])
    with pytest.raises(ValueError, match="at least 2 entries"):
        advantage("group_mean").of_group([1.0])


@pytest.mark.parametrize("preset", ["dapo", *EQUATIONS])
def test_a_response_without_tokens_counts_nowhere(preset):
    algorithm = settings_of(preset)

    def loss_of(lengths):
        samples = [
            single_turn(np.arange(2), np.arange(n), advantage=a) for n, a in zip(lengths, (1.0, -2.0), strict=True)
        ]
        micro = pack(flatten(samples), aggregation=algorithm.aggregation, max_response_tokens=MAX_RESPONSE_TOKENS)
        old = torch.full((sum(lengths),), math.log(0.5))
        term = PolicyGradient(algorithm.model_copy(update={"kl": KlConfig()})).evaluate(
            TokenScores(old + 0.1, torch.zeros_like(old)), TokenBatch(micro, old)
        )
        return float(term.total), int(term.denominator)

    (total, denominator), (alone, _) = loss_of([3, 0]), loss_of([3, 1])
    assert math.isfinite(total)
    assert denominator == {"token_mean": 3, "sequence_mean_constant": 8}.get(algorithm.aggregation, 1)
    assert total != alone
