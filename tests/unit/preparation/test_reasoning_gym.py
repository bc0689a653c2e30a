"""reasoning-gym: rows that its own scorers judge, and generators that are refused by name."""

import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from dapo_mega.commands import prepare
from dapo_mega.errors import InputError
from dapo_mega.rewards.function import FunctionReward
from dapo_mega.rewards.records import RewardRecord

# Runs answers that look like Python past every scorer, and prints the generators that compile one of them.
RUNS = """
import json, sys
import reasoning_gym
from reasoning_gym.factory import DATASETS

ANSWERS = ["['canary']", "[['canary']]", "(canary, 1)", "__import__('canary')", "canary + 1", "{'canary': 1}", "canary"]
found = set()
def watch(event, arguments):
    if event == "compile" and "canary" in str(arguments[0]):
        found.add(name)
sys.addaudithook(watch)
for name in sorted(DATASETS.keys() - {"composite"}):
    generator = reasoning_gym.create_dataset(name, seed=1, size=1)
    problem = generator[0]
    for answer in ANSWERS:
        try:
            generator.score_answer(answer, problem)
        except Exception:
            pass
print(json.dumps(sorted(found)))  # Some generators print dots, without an end of line.
"""


@pytest.fixture
def prepared(tmp_path):
    """`prepared(generators...)` writes 12 rows to train on and 5 held out, and returns both splits."""
    pytest.importorskip("reasoning_gym", reason="the library reasoning-gym is not installed")

    def run(*arguments, name="data"):
        prepare.main(
            ["reasoning-gym", *arguments, "--output", str(tmp_path / name), "--num-train", "12", "--num-eval", "5"]
        )
        return [pq.read_table(tmp_path / name / f"{split}.parquet").to_pylist() for split in ("train", "eval")]

    return run


def record(row, response):
    fields = {"reasoning_gym": row["reasoning_gym"]}
    return RewardRecord(row["prompt"], (), response, np.zeros(1, np.int32), "stop", "", fields=fields)


def test_the_generators_scorers_judge_the_rows_in_the_rewards_processes(prepared):
    generators = ["prime_factorization", "arc_1d={max_size: 12}", "arc_agi"]
    train, held_out = prepared(*generators)
    assert (len(train), len(held_out)) == (12, 5)
    assert {row["data_source"] for row in held_out} == {"prime_factorization", "arc_1d", "arc_agi"}
    assert len({row["prompt"] for row in train + held_out}) == 17
    assert [train, held_out] == prepared(*generators, name="again")
    assert prepared(*generators, "--seed", "1", name="other")[0][0]["prompt"] not in {row["prompt"] for row in train}

    right = [
        f"<think><answer>1</answer></think><answer>{row['reward_model']['ground_truth']}</answer>" for row in train
    ]
    unreadable = ["<answer>two times seven</answer>", "I do not know"]
    reward = FunctionReward("dapo_mega.rewards.reasoning_gym:score", num_workers=1, retries=0)
    try:
        results = reward.score(list(map(record, train, right)))
        wrong = reward.score([record(train[0], text) for text in unreadable])
    finally:
        reward.close()
    assert {(result.value, result.correct) for result in results} == {(1.0, True)}
    assert {(result.value, result.correct) for result in wrong} == {(0.0, False)}
    assert [result.parts["unreadable"] for result in wrong] == [1.0, 0.0]  # Its scorer raises at words.


def test_a_scorer_that_is_broken_is_a_failure_and_not_a_zero(prepared):
    (row, *_), _ = prepared("prime_factorization")
    row["reasoning_gym"] = row["reasoning_gym"].replace(
        f"'answer': '{row['reward_model']['ground_truth']}'", "'answer': 'a'"
    )
    reward = FunctionReward("dapo_mega.rewards.reasoning_gym:score", num_workers=1, retries=0)
    try:
        (result,) = reward.score([record(row, "<answer>2 x 2</answer>")])
    finally:
        reward.close()
    assert "invalid literal for int" in result.reason


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["game_of_life_halting"], "game_of_life_halting: its scorer gives 1.0 to 'definitely wrong'"),
        (["rush_hour"], "rush_hour stores no answer"),
        (["countdown"], "scorer of countdown runs an answer as Python, without a sandbox; leave it out, or allow it"),
        (["chain_summ"], "no generator 'chain_summ'; it has ab, acre"),
        (["chain_sum={terms: 3}"], "chain_sum refuses {'terms': 3}: .*; its options are min_terms"),
        (["chain_sum={min_terms: 3, max_terms: 2}"], "chain_sum refuses"),
        (["chain_sum={seed: 3}"], "seed and size are --seed"),
        (["chain_sum", "chain_sum"], "chain_sum, chain_sum; give each once"),
        (["coin_flip={max_trials: 3}"], r"coin_flip has \d+ different questions in 340"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(arguments, said, prepared):
    with pytest.raises(InputError, match=said):
        prepared(*arguments)


@pytest.mark.slow
def test_which_scorers_run_an_answer_as_a_program_is_known():
    pytest.importorskip("reasoning_gym", reason="the library reasoning-gym is not installed")
    from dapo_mega.rewards.reasoning_gym import RUNS_ANSWERS

    printed = subprocess.run([sys.executable, "-c", RUNS], capture_output=True, text=True, timeout=300, check=True)
    assert set(json.loads(printed.stdout[printed.stdout.index("[") :])) == RUNS_ANSWERS


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "dapo_mega.rewards.reasoning_gym", raising=False)
    with pytest.raises(InputError, match=r"pip install 'dapo_mega\[reasoning-gym\]'"):
        prepare.main(["reasoning-gym", "chain_sum", "--output", str(tmp_path / "data")])
