"""Rewards that are computed from a response alone, and their weighted sum."""

from dataclasses import replace

import numpy as np
import pytest

from dapo_mega.config import RunConfig
from dapo_mega.rewards.build import make_reward
from dapo_mega.rewards.built_in import (
    AnswerReward,
    LanguageReward,
    R1FormatReward,
    is_r1_format,
    repeated_share,
    words_by_script,
)
from dapo_mega.rewards.composed import ComposedReward, WeightedReward
from dapo_mega.rewards.records import RewardRecord, Score, ScoringFailure
from dapo_mega.rewards.verifier import AnswerVerifier
from tests.unit.rewards.growth import growing_too_fast


def record(response, prompt="", length=3, truth="42"):
    shown = ({"role": "user", "content": prompt},)
    return RewardRecord(prompt, shown, response, np.arange(length, dtype=np.int32), "stop", truth)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("<think>a\nb</think>\n\n<answer>c</answer>", True),
        ("<think></think><answer></answer>", True),
        ("a<think>a</think><answer>b</answer>", False),
        ("<think>a</think>so<answer>b</answer>", False),
        ("<think>a</think><answer>b</answer>.", False),
        ("<think>a</think><think>a</think><answer>b</answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<answer></think>b</answer>", False),
        ("<think>a</think>", False),
        ("", False),
    ],
)
def test_r1s_format_is_both_tags_once_and_nothing_else(text, expected):
    assert is_r1_format(text) is expected


def test_a_thought_that_the_prompt_has_opened_is_a_thought():
    # Response; whether it is right and in R1's form where the prompt has opened the thought, and where it has not.
    cases = [
        (r"It may be \boxed{42}. Let me <answer>42</answer> #### 42 Answer: 42", (False, 0), (True, 0)),
        (r"<think>It may be \boxed{42} <answer>42</answer> #### 42", (False, 0), (False, 0)),
        (r"So.</think> <answer>42</answer>", (True, 1), (True, 0)),
        (r"<think>So.</think> <answer>42</answer>", (True, 0), (True, 1)),
        (r"It is 7.</think> Not 7: <answer>42</answer>", (True, 0), (True, 0)),
    ]
    for style in ("auto", "r1"):
        verifier = AnswerVerifier(1, 5.0, style)
        answer, form = AnswerReward(verifier), R1FormatReward()
        for response, *expected in cases:
            records = [replace(record(response), opened_thought=tag) for tag in ("<think>", "")]
            found = zip(answer.score(records), form.score(records), strict=True)
            assert [(a.correct, f.value) for a, f in found] == expected, (style, response)
        verifier.close()
    thoughts = {"boxed": r"\boxed{42}", "gsm8k": "#### 42", "last_number": "42", "dapo": "Answer: 42"}
    for style, text in thoughts.items():
        verifier = AnswerVerifier(1, 5.0, style)
        records = [record(text), replace(record(text), opened_thought="<think>"), record(f"<think>{text}")]
        verdicts = [score.correct for score in AnswerReward(verifier).score(records)]
        assert verdicts == [True, False, style == "dapo"], style  # DAPO's rule is kept to the letter.
        verifier.close()


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "We add both numbers.", 1.0),
        ("zh", "We add both numbers.", 0.0),
        ("zh", "我们把 x 和 y 相加 then stop", 6 / 8),
        ("ja", "まずカナと漢字", 1.0),
        ("ru", "Сначала сложим two числа", 3 / 4),
        ("en", r"So $\alpha + \beta$ is \frac{a}{b} in `код` done", 1.0),
        ("en", "12 + 30 = 42", 1.0),
        ("en", "naïve café", 1.0),
    ],
)
def test_language_consistency_is_the_share_of_words_in_its_script(language, text, expected):
    (score,) = LanguageReward(language).score([record(text)])
    assert score.value == pytest.approx(expected)


def test_the_language_of_hostile_text_is_found_in_linear_time():
    pieces = ("$", "\\(", "```", "\\[", "<", "a", "`", "$ ", "\\a", "我")
    assert growing_too_fast(lambda _, text: words_by_script(text), pieces, lambda p, n: p * (n // len(p))) == {}


@pytest.mark.parametrize(
    ("tokens", "size", "expected"),
    [
        ([1, 2, 3, 4, 5], 2, 0.0),
        ([1, 2, 1, 2, 1, 2], 2, 3 / 5),
        ([7] * 10, 3, 7 / 8),
        ([1, 2], 3, 0.0),
        ([1, 2, 3], 3, 0.0),
        ([0, 0, 1, 0, 0], 2, 1 / 4),
    ],
)
def test_repetition_is_the_share_of_ngrams_that_occurred_before(tokens, size, expected):
    assert repeated_share(np.array(tokens, np.int32), size) == pytest.approx(expected)


def test_repetition_agrees_with_counting_by_hand():
    rng = np.random.default_rng(0)
    for size in (1, 2, 5, 20):
        tokens = rng.integers(0, 3, 400).astype(np.int32)
        ngrams = [tuple(tokens[i : i + size]) for i in range(400 - size + 1)]
        assert repeated_share(tokens, size) == pytest.approx(1 - len(set(ngrams)) / len(ngrams))


def run_with(**reward):
    return RunConfig.model_validate(
        {
            "output_dir": "o", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d"}},
            "rollout": {"max_response_tokens": 16}, "reward": reward,
            "algorithm": {"dynamic_sampling_on": "unequal_scores"},
        }
    )  # fmt: skip


def test_components_add_up_by_their_weights_and_are_reported_by_themselves():
    run = run_with(
        components=[
            {"kind": "answer", "extraction": "boxed", "incorrect": 0},
            {"kind": "language", "language": "en", "weight": 0.5},
            {"kind": "repetition", "ngram_tokens": 2, "weight": 2, "name": "loops"},
            {"kind": "length_dapo", "cache_tokens": 8, "weight": 0.25},
        ]
    )
    reward = make_reward(run)
    right, wrong = reward.score([record("so \\boxed{42}", length=12), record("итак \\boxed{41}", length=3)])
    reward.close()
    assert (right.correct, wrong.correct) == (True, False)
    assert (right.answer, right.outcome, wrong.outcome) == ("42", "correct", "wrong")
    assert (right.score, right.reward) == pytest.approx((1.5, 1.5 - 0.25 / 2))
    assert right.parts == pytest.approx({"answer": 1, "language": 1, "loops": 0, "length_dapo": -0.5})
    assert wrong.parts == pytest.approx({"answer": 0, "language": 0, "loops": 0, "length_dapo": 0})


def test_without_a_component_that_judges_nothing_is_correct_or_wrong():
    reward = make_reward(run_with(components=[{"kind": "r1_format"}]))
    (score,) = reward.score([record("x")])
    assert (score.reward, score.correct, score.parts) == (0.0, None, {"r1_format": 0.0})


class Fixed:
    def __init__(self, *scores):
        self.scores = scores

    def score(self, records):
        return list(self.scores)

    def close(self):
        pass


def test_one_component_decides_and_one_that_fails_leaves_no_reward():
    first = WeightedReward("first", 1.0, Fixed(Score(1.0, False, {"a": 2.0}), Score(1.0, True)))
    second = WeightedReward("second", 1.0, Fixed(Score(3.0, True, {"a": 4.0}), ScoringFailure("it broke")))
    scored, failed = ComposedReward([first, second], "second").score([record("x")] * 2)
    assert (scored.reward, scored.correct) == (4.0, True)
    assert scored.parts == {"first": 1.0, "first.a": 2.0, "second": 3.0, "second.a": 4.0}
    assert failed == ScoringFailure("second: it broke")


def test_a_part_never_takes_the_place_of_a_component():
    reward = ComposedReward([WeightedReward("own", 1.0, Fixed(Score(1.0, None, {"own": 7.0, "a": 2.0})))], None)
    assert reward.score([record("x")])[0].parts == {"own": 1.0, "own.own": 7.0, "a": 2.0}


def test_the_default_reward_is_the_rule_and_the_overlong_punishment():
    run = RunConfig.model_validate(
        {
            "output_dir": "o", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d"}},
            "rollout": {"max_response_tokens": 16}, "reward": {"overlong_cache_tokens": 3},
        }
    )  # fmt: skip
    reward = make_reward(run)
    responses = [record("Answer: 42", length=3), record("Answer: 41", length=14), record("", length=15)]
    rewards = [(score.correct, score.score, score.reward) for score in reward.score(responses)]
    reward.close()
    # Not approximately: curves must not move.
    assert rewards == [(True, 1.0, 1.0), (False, -1.0, -1.0 + (13 - 14) / 3), (False, -1.0, -1.0 + (13 - 15) / 3)]
