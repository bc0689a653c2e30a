"""What a dataset says of a prompt beside problem and answer arrives wherever responses are scored."""

import json
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_mega.config import DatasetConfig
from dapo_mega.data.prompts import load_prompts
from dapo_mega.data.tokenizer import build_byte_tokenizer
from dapo_mega.evaluation.evaluator import Evaluator
from dapo_mega.rewards.build import make_reward
from tests.unit.rollout.test_collector import HookedScorer, ScriptedEngine, collector, config, every_other, partial

RECORDS = [
    {
        "prompt": chr(ord("a") + i),
        "reward_model": {"ground_truth": "T", "style": "rule"},
        "difficulty": 3 + i,
        "tests": [{"input": "1", "weight": 0.5}],
    }
    for i in range(20)
]


def fields_of(number):
    """What is left of a record without problem and answer."""
    return {"reward_model": {"style": "rule"}, "difficulty": 3 + number, "tests": [{"input": "1", "weight": 0.5}]}


@pytest.fixture(params=["parquet", "jsonl"])
def prompts(request, tmp_path):
    path = tmp_path / f"data.{request.param}"
    if request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return load_prompts(DatasetConfig(path=str(path), template="as_is"), build_byte_tokenizer(), 100).prompts


class Seen:
    """Fields of the prompts whose responses were scored, by the prompt's index."""

    def __init__(self):
        self.fields = {}

    def __call__(self, asked):
        self.fields.update((prompt.index, dict(prompt.fields)) for prompt, _ in asked)


def assert_own(seen, indices):
    assert seen.fields == {index: fields_of(index) for index in indices}


def test_in_training(prompts):
    seen = Seen()
    groups, _ = collector(ScriptedEngine(every_other), config(), prompts, seen).collect(0)
    assert_own(seen, seen.fields)
    assert {group.prompt.index for group in groups} <= seen.fields.keys()


def test_after_a_restart_with_groups_in_flight(prompts):
    subject = collector(ScriptedEngine(every_other), partial(), prompts)
    subject.collect(0)
    values, arrays = subject.state()
    assert values["in_flight"]
    seen = Seen()
    resumed = collector(ScriptedEngine(every_other), partial(), prompts, seen)
    resumed.load_state(json.loads(json.dumps(values)), arrays)
    resumed.collect(1)
    assert {record["prompt"] for record in values["in_flight"]} <= seen.fields.keys()
    assert_own(seen, seen.fields)


def test_in_an_evaluation(prompts):
    run, seen = config(evaluation={"samples_per_prompt": 2}), Seen()
    with closing(make_reward(run)) as reward:
        evaluator = Evaluator(run, prompts, reward, lambda responses: ["Answer: T"] * len(responses), (2,))
        evaluator._scorer = HookedScorer(run.reward, reward, evaluator._scorer._decode)
        evaluator._scorer.before = seen
        engine = ScriptedEngine(every_other)
        metrics = engine.run(evaluator.run(engine.generate))
    assert_own(seen, range(len(RECORDS)))
    assert (metrics["evaluation/avg_at_k"], metrics["evaluation/maj_at_k"]) == (1.0, 1.0)
