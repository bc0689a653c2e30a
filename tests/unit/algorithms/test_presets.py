"""The mini-batch loss of every preset on one small batch, against numbers derived by hand.

One group of three responses to one prompt, max_response_tokens = 4:

    response  length  truncated  probability ratios per token
    a         2       no         1.0, 1.5
    b         3       no         1.0, 0.5, 2.0
    c         1       yes        1.0           (masked where overlong filtering is on)
"""

import math

import numpy as np
import pytest
import torch

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.config import AlgorithmConfig, RunConfig
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch, TokenScores

RATIOS = {"a": [1.0, 1.5], "b": [1.0, 0.5, 2.0], "c": [1.0]}
REWARDS = [1.0, -1.0, -1.0]
MAX_RESPONSE_TOKENS = 4


def algorithm(preset, **changes):
    run = RunConfig(
        output_dir="x",
        num_steps=1,
        model={"path": "m"},
        data={"train": {"path": "d"}},
        algorithm={"preset": preset, **changes},
    )
    return run.algorithm


def minibatch_loss(config: AlgorithmConfig, mask_truncated: bool, entropy: float = 0.0, rollout: float = 0.5) -> float:
    advantages = config.advantage.of_group(REWARDS)
    samples = [
        single_turn(
            np.arange(2),
            np.arange(len(ratios)),
            np.full(len(ratios), math.log(rollout), dtype=np.float32),
            advantage=float(advantage),
            in_loss=not (name == "c" and mask_truncated),
        )
        for (name, ratios), advantage in zip(RATIOS.items(), advantages, strict=True)
    ]
    micro_batch = pack(flatten(samples), aggregation=config.aggregation, max_response_tokens=MAX_RESPONSE_TOKENS)
    ratios = torch.tensor([r for rs in RATIOS.values() for r in rs])
    old = torch.full((len(ratios),), math.log(0.5))
    reference = old + math.log(0.5)

    batch = TokenBatch(micro_batch, old, reference)
    entropies = torch.full((len(ratios),), entropy)
    objective = PolicyGradient(config.resolved(engine_differs=False))
    term = objective.evaluate(TokenScores(old + ratios.log(), entropies), batch)
    assert set(term.sums) == set(objective.sum_names)
    return float(term.total) / int(term.denominator)


# group_norm: mean -1/3, unbiased std sqrt((16 + 4 + 4) / 9 / 2) = 2 / sqrt(3):
#   A_a = (4/3) / (2/sqrt 3) = 2/sqrt 3, A_b = A_c = -1/sqrt 3.  (1e-6 in the denominator is below the tolerance.)
N = 1 / math.sqrt(3)


def test_dapo():
    # Clip 0.2 / 0.28, dual clip 10. a: -A, -1.28 A = -2.28 * 2N. b (A = -N): N, 0.8 N, 2 N = 3.8 N. c: N.
    # Token mean over 6 tokens: (-4.56 + 3.8 + 1) N / 6.
    assert minibatch_loss(algorithm("dapo"), False) == pytest.approx(0.24 * N / 6, rel=1e-5)


def test_dapo_with_the_truncated_response_masked():
    # c leaves numerator and denominator: (-4.56 + 3.8) N / 5. Its reward stays in the statistics: same N.
    assert minibatch_loss(algorithm("dapo"), True) == pytest.approx(-0.76 * N / 5, rel=1e-5)


def test_grpo():
    # Clip 0.2 / 0.2: a: -(1 + 1.2) 2N / 2 = -2.2 N; b: 3.8 N / 3; c: N. Mean over 3 responses.
    # KL 0.04 * k3 with d = log ref - log pi = log(1/2) - log r, averaged per response like the loss:
    #   k3(r) = 1/(2r) + log(2r) - 1.
    def k3(r):
        return 1 / (2 * r) + math.log(2 * r) - 1

    kl = sum(sum(k3(r) for r in ratios) / len(ratios) for ratios in RATIOS.values())
    expected = (-2.2 * N + 3.8 * N / 3 + N + 0.04 * kl) / 3
    assert minibatch_loss(algorithm("grpo"), False) == pytest.approx(expected, rel=1e-5)


def test_grpo_with_the_truncated_response_masked():
    expected = (-2.2 * N + 3.8 * N / 3) / 2
    assert minibatch_loss(algorithm("grpo", kl={"coefficient": 0.0}), True) == pytest.approx(expected, rel=1e-5)


def test_dr_grpo():
    # A_a = 4/3, A_b = A_c = -2/3; sums over tokens, divided by 3 responses * 4 tokens.
    # a: -(1 + 1.2) 4/3; b: (1 + 0.8 + 2) 2/3; c: 2/3.
    expected = (-2.2 * 4 / 3 + 3.8 * 2 / 3 + 2 / 3) / 12
    assert minibatch_loss(algorithm("dr_grpo"), False) == pytest.approx(expected, rel=1e-5)


def test_rloo():
    # A_a = 1 - (-1) = 2, A_b = A_c = -1 - 0 = -1; token mean over 6.
    expected = (-2.2 * 2 + 3.8 + 1) / 6
    assert minibatch_loss(algorithm("rloo"), False) == pytest.approx(expected, rel=1e-5)


def test_a_value_written_beside_a_preset_wins():
    assert algorithm("grpo").kl.coefficient == 0.04
    assert algorithm("grpo", kl={"coefficient": 0.1}).kl.coefficient == 0.1
    assert algorithm("grpo", kl={"coefficient": 0.1}).kl.estimator == "k3"
    assert algorithm("dapo").policy_loss.high == 0.28


def test_entropy_bonus_lowers_the_loss_by_coefficient_times_mean_entropy():
    config = algorithm("dapo", entropy_coefficient=0.5)
    without = minibatch_loss(algorithm("dapo"), False)
    assert minibatch_loss(config, False, entropy=3.0) == pytest.approx(without - 1.5)


@pytest.mark.parametrize(("cap", "weight"), [(3.0, 2.0), (1.5, 1.5), (None, 1.0)])
def test_importance_weights_scale_the_loss_up_to_the_cap(cap, weight):
    # pi_old = 1/2 and pi_rollout = 1/4 everywhere: every token's weight is 2.
    plain = minibatch_loss(algorithm("dapo"), False)
    config = algorithm("dapo", importance_cap=cap)
    assert minibatch_loss(config, False, rollout=0.25) == pytest.approx(weight * plain, rel=1e-5)
