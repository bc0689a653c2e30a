"""Scores the responses beside this file by the reward of run.yaml: python configs/recipes/code/score_responses.py"""

import json
from pathlib import Path

from dapo_mega.config import RunConfig, load_config
from dapo_mega.rewards.build import make_reward
from dapo_mega.rewards.records import RewardRecord, ScoringFailure

FOLDER = Path(__file__).parent


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def main() -> None:
    """One line per response: its score, whether it is correct, its first line of code."""
    problems = rows("problems.jsonl")
    records = [
        RewardRecord(
            problems[row["problem"]]["prompt"],
            (),
            row["response"],
            (),
            "stop",
            json.dumps(problems[row["problem"]]["tests"]),
        )
        for row in rows("responses.jsonl")
    ]
    reward = make_reward(load_config(RunConfig, FOLDER / "run.yaml"))
    try:
        for record, score in zip(records, reward.score(records), strict=True):
            start = record.response.removeprefix("```python\n").splitlines()[0]
            if isinstance(score, ScoringFailure):
                print(f"failed: {score.reason}")
            else:
                print(f"{score.reward:.2f}  {'correct' if score.correct else score.outcome:<9}  {start}")
    finally:
        reward.close()


if __name__ == "__main__":
    main()
