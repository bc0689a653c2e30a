"""Every expected number below is derived by hand in the comment beside it."""

import math
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dapo_mega.algorithms.ratios import within_bounds
from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.plan import PackingLayout
from dapo_mega.batching.samples import flatten, samples_to_score, single_turn
from dapo_mega.config import AlgorithmConfig, RunConfig
from dapo_mega.errors import FleetError
from dapo_mega.megatron.mismatch import (
    measure_engines,
    measure_mismatch,
    mismatch_warning,
    starvation_cause,
    sum_engine_ratios,
)
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch, TokenScores
from dapo_mega.types import Prompt, Response, Trajectory, Turn


@pytest.fixture
def control():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def micro_batch(lengths, stale, rollout_probability=0.5, advantages=None, multiple_of=1, engines=None):
    """Responses of the given lengths to a prompt of one token, every token sampled with the same probability."""
    samples = [
        single_turn(
            [1],
            np.arange(2, length + 2),
            np.full(length, math.log(rollout_probability), np.float32),
            advantage=1.0 if advantages is None else advantages[i],
            num_off_policy=num_stale,
            engine_ids=engines[i] if engines else -1,
        )
        for i, (length, num_stale) in enumerate(zip(lengths, stale, strict=True))
    ]
    return pack(flatten(samples), PackingLayout(multiple_of=multiple_of), max_response_tokens=8)


def log(probabilities):
    return torch.tensor(probabilities, dtype=torch.float32).log()


def test_measures_of_a_step_by_hand(control):
    # pi_rollout = 1/2. Two responses: pi_old = 1/2, 1 and 1/4, so weights 1, 2 and 1/2. The first token and the last
    # response are stale, which leaves the token of weight 2 as the only fresh one.
    settings = AlgorithmConfig(importance_cap=1.5, sequence_mask=(0.6, 2.0))
    scored = [(micro_batch([2, 1], [1, 1], multiple_of=8), log([0.5, 1.0, 0.25]))]
    metrics = measure_mismatch(scored, settings, control=control)
    ln2 = math.log(2)
    expected = {
        "mismatch/logprob_abs_diff_mean": 2 * ln2 / 3,
        "mismatch/logprob_abs_diff_max": ln2,
        # k3 = w - 1 - ln w: 0, 1 - ln 2 and -1/2 + ln 2.
        "mismatch/kl": 0.5 / 3,
        "mismatch/importance_weight_mean": 3.5 / 3,
        "mismatch/importance_weight_max": 2.0,
        # (sum w)^2 / (n sum w^2)
        "mismatch/effective_sample_share": 3.5**2 / (3 * 5.25),
        "mismatch/truncated_share": 1 / 3,
        # Geometric means: sqrt(1 x 2) and 1/2.
        "mismatch/masked_response_share": 1 / 2,
        "mismatch/fresh_token_share": 1 / 3,
        "rollout/logprob_abs_diff_mean": ln2,
        "rollout/logprob_abs_diff_max": ln2,
        "rollout/kl_to_policy": 1 - ln2,
    }
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_measures_are_those_of_any_split_and_off_changes_nothing(control):
    whole = [(micro_batch([2, 1], [0, 0]), log([0.5, 1.0, 0.25]))]
    split = [(micro_batch([2], [0]), log([0.5, 1.0])), (micro_batch([1], [0]), log([0.25]))]
    settings = AlgorithmConfig()
    metrics = measure_mismatch(whole, settings, control=control)
    assert measure_mismatch(split, settings, control=control) == pytest.approx(metrics, rel=1e-12)
    assert metrics["mismatch/truncated_share"] == metrics["mismatch/masked_response_share"] == 0


def test_a_turns_mean_is_of_its_tokens_in_all_trajectories(control):
    """Against one over the trajectories' own rows, in float64."""
    rng, expected, samples, logprobs = np.random.default_rng(0), defaultdict(list), [], []
    for number in range(6):
        lengths = rng.integers([0, 1], 4, (number + 2, 2))  # Observed and sampled; some turns observe nothing.
        lengths[1, 0] += 1
        sampled, ends = np.repeat([[False, True]] * len(lengths), lengths.ravel()), lengths.sum(1).cumsum()
        engine, trainer = rng.normal(-1, 1, (2, len(sampled))).astype(np.float32)
        turns = tuple(Turn(int(end), "stop") for end in ends)
        segments = (int(ends[0]), len(sampled)) if number % 2 else (len(sampled),)
        ids, spans = np.arange(len(sampled), dtype=np.int32), ((0, 2), (1, len(sampled)))
        member = Trajectory(number, ids, engine * sampled, sampled, turns, spans, (), segments)
        samples.append(samples_to_score([(Prompt(0, "", np.array([7], np.int32), ""), member)], 1))
        logprobs.append(torch.from_numpy(trainer[sampled]))
        for turn, (start, end) in enumerate(pairwise([0, *ends])):
            rows = np.arange(max(start, 2), end)[sampled[max(start, 2) : end]]  # The others are of older weights.
            expected[turn if turn < 4 else 4].extend(np.abs(trainer.astype(float) - engine)[rows])
    packed = [pack(s, PackingLayout(multiple_of=8), max_response_tokens=99) for s in samples]
    metrics = measure_mismatch(list(zip(packed, logprobs, strict=True)), AlgorithmConfig(), control=control)
    found = {name: value for name, value in metrics.items() if "_turn_" in name}
    names = [f"rollout/logprob_abs_diff_mean_turn_{turn}" for turn in ("1", "2", "3", "4", "5_and_later")]
    assert found == pytest.approx({name: np.mean(expected[turn]) for turn, name in enumerate(names)}, rel=1e-12)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_an_engines_mean_is_of_the_fresh_tokens_that_it_sampled(control, num_parts):
    # Engine 0 sampled a whole response, engine 1 the last two of three tokens of which the second is stale as well.
    lengths, stale, engines = [2, 3, 1, 2], [0, 2, 0, 2], [0, [-1, 1, 1], -1, 2]
    old = log([0.5, 1.0, 0.125, 0.25, 0.25, 0.125, 0.5, 0.5])
    scored = []
    for part in range(num_parts):
        chosen = [i for i in range(4) if i % num_parts == part]
        starts = [sum(lengths[:i]) for i in range(5)]
        batch = micro_batch(*([values[i] for i in chosen] for values in (lengths, stale)), multiple_of=8,
                            engines=[engines[i] for i in chosen])  # fmt: skip
        scored.append((batch, torch.cat([old[starts[i] : starts[i + 1]] for i in chosen])))
    means = measure_engines(scored, ["a", "b", "c"], control=control)
    ln2 = math.log(2)
    assert means == pytest.approx({"a": ln2 / 2, "b": ln2}, rel=1e-6)


def test_warnings_and_errors_name_the_engines_the_worst_first():
    config = RunConfig.model_validate(
        {"output_dir": "o", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d"}}}
    )
    metrics = {"rollout/logprob_abs_diff_mean": 0.1, "mismatch/logprob_abs_diff_mean": 0.1}
    engines = {"http://a": 0.001, "http://b": 0.3, "http://c": 0.002}
    told = "the worst engine is http://b with 0.3 (http://c 0.002, http://a 0.001)"
    assert told in mismatch_warning(metrics, config, 3, engines)
    assert told in starvation_cause(metrics, config, engines)
    assert "http://d with nan" in starvation_cause(metrics, config, {**engines, "http://d": math.nan})
    assert starvation_cause({}, config, {}) is None
    assert starvation_cause({"rollout/logprob_abs_diff_mean": 0.01}, config, engines) is None
    with pytest.raises(FleetError, match=r"the worst engine is http://b with 0.3"):
        mismatch_warning({**metrics, "rollout/logprob_abs_diff_mean": 0.9}, config, 3, engines)


def test_a_step_without_fresh_tokens_has_no_measure_of_them(control):
    metrics = measure_mismatch([(micro_batch([2], [2]), log([0.5, 1.0]))], AlgorithmConfig(), control=control)
    assert not [name for name in metrics if name.startswith("rollout/")]
    assert metrics["mismatch/fresh_token_share"] == 0


@pytest.mark.parametrize(
    ("spans", "oldest", "expected"),
    [((), 4, 0), ((), 3, 5), (((3, 2), (4, 5)), 3, 2), (((2, 2), (3, 5)), 2, 5), (((4, 5),), 4, 0)],
)
def test_stale_tokens_are_those_before_the_last_change_of_weights(spans, oldest, expected):
    response = Response(0, np.zeros(5, np.int32), np.zeros(5, np.float32), "stop", oldest, spans)
    assert int((Trajectory.of(response).versions < 4).sum()) == expected


def test_a_response_is_masked_by_its_geometric_mean_alone():
    batch = micro_batch([2, 2, 1], [0, 0, 0], rollout_probability=1 / 8, multiple_of=16)
    # Weights 4 and 1/4: mean 1. 1 and 1/4: mean 1/2. 2. The last segment is padding.
    logprobs = log([1 / 2, 1 / 32, 1 / 8, 1 / 32, 1 / 4])
    assert within_bounds(sum_engine_ratios(batch, logprobs), (0.6, 1.9)).tolist() == [True, False, False, True]
    assert within_bounds(sum_engine_ratios(batch, logprobs), (0.4, 2.1)).tolist() == [True, True, True, True]
    assert within_bounds(sum_engine_ratios(batch, logprobs + math.nan), (0.0, 9.0)).tolist() == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("is_scored_before", [True, False])
def test_a_masked_response_has_no_gradient_and_stays_in_the_denominator(is_scored_before):
    batch = micro_batch([2, 2], [0, 0], advantages=[1.0, -2.0])
    # The second response's mean is 1/4.
    old = log([0.5, 0.5, 0.125, 0.125])
    results = {}
    for mask in (None, (0.5, 2.0)):
        logprobs = old.clone().requires_grad_()
        settings = AlgorithmConfig(sequence_mask=mask, entropy_coefficient=0.1, kl={"coefficient": 0.3})
        tokens = TokenBatch(batch, old if is_scored_before else None, reference_logprobs=old + 0.2)
        term = PolicyGradient(settings).evaluate(TokenScores(logprobs, torch.ones(4)), tokens)
        term.total.backward()
        results[mask] = logprobs.grad, int(term.denominator)
    (plain, all_tokens), (masked, denominator) = results[None], results[(0.5, 2.0)]
    assert plain[2:].abs().min() > 0
    assert masked[2:].tolist() == [0, 0]
    torch.testing.assert_close(masked[:2], plain[:2])
    assert denominator == all_tokens == 4


def config(**rollout):
    return RunConfig.model_validate(
        {
            "output_dir": "o",
            "num_steps": 1,
            "model": {"path": "m", "dtype": "fp32"},
            "data": {"train": {"path": "d"}},
            "rollout": rollout,
        }
    )


def measured(fresh, everything=0.0):
    return {"rollout/logprob_abs_diff_mean": fresh, "mismatch/logprob_abs_diff_mean": everything}


def test_a_mismatch_over_the_limits_warns_and_then_ends_the_run():
    run = config(mismatch_warning=0.01, mismatch_stop=0.2)
    assert mismatch_warning(measured(0.01), run, 3) is None
    warning = mismatch_warning(measured(0.02), run, 3)
    assert "0.02 nats at step 3 is over 0.01 (rollout.mismatch_warning)" in warning
    with pytest.raises(
        FleetError, match=r"0\.3 nats at step 3 .*rollout.mismatch_stop=0\.2.*last checkpoint"
    ) as caught:
        mismatch_warning(measured(0.3), run, 3)
    assert "\n" not in str(caught.value)


def test_tokens_of_older_weights_are_under_no_limit_but_must_be_numbers():
    run = config(mismatch_warning=0.01, mismatch_stop=0.2)
    assert mismatch_warning(measured(0.0, 3.0), run, 1) is None
    assert mismatch_warning({"mismatch/logprob_abs_diff_mean": 3.0}, run, 1) is None
    for metrics in (measured(math.nan, math.nan), measured(0.0, math.nan)):
        with pytest.raises(FleetError, match=r"difference\| nan nats"):
            mismatch_warning(metrics, run, 1)


def test_without_a_limit_a_mismatch_only_warns():
    run = config(mismatch_stop=None)
    for mean in (9.0, math.nan):
        assert "engine and trainer disagree" in mismatch_warning(measured(mean, mean), run, 1)
