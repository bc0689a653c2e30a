"""What the console says of a held-out evaluation."""

from dapo_mega.training.evaluating import evaluation_line


def test_missing_responses_are_named():
    metrics = {"evaluation/k": 2.0, "evaluation/failed": 0.0, "evaluation/unscored": 3.0, "evaluation/reward_mean": 0.5}
    expected = "held-out evaluation after step 7: reward=0.500  without 3 responses that could not be scored"
    assert evaluation_line(7, metrics) == expected
    assert evaluation_line(7, {**metrics, "evaluation/failed": 4.0}).endswith("no score, 4 responses are missing")
