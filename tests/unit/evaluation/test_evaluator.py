"""What an evaluation in a run reports where its prompts come from several sources."""

import numpy as np
import pytest

from dapo_mega.config import RunConfig
from dapo_mega.evaluation.evaluator import Evaluator
from dapo_mega.metrics.catalogue import describe
from dapo_mega.rewards.composed import ComposedScore
from dapo_mega.types import GenerationFailure, Prompt, Response, Trajectory

K = 2


class LengthIsEven:
    def begin_step(self):
        pass

    def score(self, records):
        verdicts = [len(record.token_ids) % 2 == 0 for record in records]
        return [ComposedScore(float(v), float(v), v, {}, str(v)) for v in verdicts]


def metrics_of(sources, lengths, failed=()):
    """Response j to prompt i has `lengths[i][j]` tokens."""
    config = RunConfig.model_validate(
        {
            "output_dir": "o",
            "num_steps": 1,
            "model": {"path": "m"},
            "data": {"train": {"path": "d"}},
            "evaluation": {"samples_per_prompt": K},
        }
    )
    prompts = [Prompt(i, "?", np.array([5], np.int32), "g", data_source=source) for i, source in enumerate(sources)]
    evaluator = Evaluator(config, prompts, LengthIsEven(), lambda texts: ["" for _ in texts], ())

    def answer(number, request):
        if number in failed:
            return GenerationFailure(request.request_id, "no engine")
        length = lengths[number // K][number % K]
        tokens = np.full(length, 7, np.int32)
        return Trajectory.of(Response(request.request_id, tokens, np.zeros(length, np.float32), "stop", 0))

    metrics = evaluator.measure([answer(number, request) for number, request in enumerate(evaluator.requests)])
    assert all(describe(name) for name in metrics), metrics
    return {name.removeprefix("evaluation/"): value for name, value in metrics.items()}


def test_each_of_several_sources_has_accuracy_length_and_share():
    found = metrics_of(["math", "gsm 8k", "math", "math"], [(2, 3), (4, 4), (1, 1), (6, 5)])
    expected = {"share_math": 3 / 4, "avg_at_k_math": 1 / 3, "response_length_mean_math": 18 / 6}
    expected |= {"share_gsm_8k": 1 / 4, "avg_at_k_gsm_8k": 1.0, "response_length_mean_gsm_8k": 4.0}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["avg_at_k"] == pytest.approx((3 * expected["avg_at_k_math"] + 1.0) / 4)


def test_an_evaluation_with_a_missing_response_has_no_score():
    found = metrics_of(["math", "gsm", "math"], [(2, 3), (4, 4), (1, 1)], failed=(4,))
    assert found == {"k": 2, "failed": 1, "unscored": 0}


def test_prompts_of_one_source_have_no_values_of_their_own():
    assert not [name for name in metrics_of(["math"] * 2, [(1, 2), (2, 2)]) if name.endswith("_math")]
