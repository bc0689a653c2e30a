"""What was recorded is read back as it was trained on, and a replay knows which steps it can repeat."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from dapo_mega.checkpoints.folders import write_manifest
from dapo_mega.errors import InputError
from dapo_mega.samples.files import file_of, samples_folder, write_table
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.reading import read_step
from dapo_mega.samples.rows import SampleFile, Training, rows_of
from dapo_mega.samples.table import account_of, metadata_of, to_table
from dapo_mega.training.differences import compare_numbers, compare_samples
from dapo_mega.training.replay import plan_replay
from dapo_mega.types import Group, GroupFate, Prompt, Response
from tests.made_trajectories import scored_answer

PROMPTS = [Prompt(i, f"prompt {i}", np.array([5, 6, i], np.int32), str(i)) for i in range(3)]


class Letters:
    def batch_decode(self, sequences, skip_special_tokens):
        return ["".join(chr(97 + i % 26) for i in ids) for ids in sequences]


def scored(request_id, length):
    rng = np.random.default_rng(request_id)
    ids = rng.integers(0, 26, length).astype(np.int32)
    response = Response(request_id, ids, -rng.random(length, dtype=np.float32), "stop", 3, ((3, 1), (4, length)))
    reward = float(rng.normal())
    return scored_answer(response, "text", bool(request_id % 2), 1.0, reward, None, {"format": 1 / 3})


def recorded(folder, step=5):
    """Two trained groups, the first with a greedy response, and a filtered one; their groups in order of training."""
    groups = [
        Group(PROMPTS[1], (scored(7, 4), scored(8, 6)), greedy=scored(9, 3)),
        Group(PROMPTS[0], (scored(2, 5), scored(3, 2))),
        Group(PROMPTS[2], (scored(20, 5), scored(21, 2))),
    ]
    rows = []
    for group, outcome in zip(groups, ("trained", "trained", "all_right"), strict=True):
        for row in rows_of(GroupFate(outcome, group.prompt, group)):
            if outcome == "trained" and not row.is_greedy:
                number = sum(r.training is not None for r in rows)
                own = row.trajectory.logprobs
                row = replace(row, training=Training(number, 1 / 7, True, own / 3, own / 2 if number else None))
            rows.append(row)
    account = {"all_recorded": True, "world_size": 2, "updates": []}
    write_table(
        file_of(samples_folder(folder), "training", step),
        to_table(SampleFile(step, "training", rows, account), TokenPieces(Letters())),
    )
    return groups[:2]


def values(thing):
    """All fields of a record, arrays as lists."""
    if hasattr(thing, "__dataclass_fields__"):
        return {name: values(getattr(thing, name)) for name in thing.__dataclass_fields__}
    if isinstance(thing, np.ndarray):
        return thing.dtype, thing.tolist()
    return [values(t) for t in thing] if isinstance(thing, tuple) else thing


def test_groups_come_back_bit_for_bit_and_in_order(tmp_path):
    groups = recorded(tmp_path)
    step = read_step(file_of(samples_folder(tmp_path), "training", 5))
    for got, expected in zip(step.groups, groups, strict=True):
        expected = replace(expected, prompt=replace(expected.prompt, fields=got.prompt.fields))
        assert values(got) == values(expected)
    assert [sample.request_id for sample in step.samples] == [7, 8, 2, 3]
    assert (step.samples[2].trainer_logprobs == groups[1].trajectories[0].logprobs / 3).all()
    assert (step.samples[0].update_logprobs, step.samples[0].advantage) == (None, 1 / 7)


def with_account(path, **changes):
    table = pq.read_table(path)
    account = account_of(table.schema.metadata)
    write_table(path, table.replace_schema_metadata(metadata_of({**account, **changes})))


def test_a_step_that_cannot_be_replayed_is_refused_with_those_that_can(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({}))
    for step in (1, 2, 4, 5, 6, 9):
        recorded(tmp_path, step)
    for step in (3, 7):
        checkpoint = tmp_path / "checkpoints" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "loop.json").write_text("{}")
        write_manifest(checkpoint)
    can = "; steps 1-2, 4-6 can be"
    with pytest.raises(InputError, match=f"step 9 .* has no file of step 8, which .*of step 7.*{can}"):
        plan_replay(tmp_path, 9)
    with pytest.raises(InputError, match=f"has no file of step 3, which were removed, .*from the first step on.*{can}"):
        plan_replay(tmp_path, 3)
    with_account(file_of(samples_folder(tmp_path), "training", 5), all_recorded=False)
    with pytest.raises(InputError, match=r"of step 5 only some groups were written .*steps 1-2, 4 can be"):
        plan_replay(tmp_path, 6)
    starved = to_table(SampleFile(6, "training", [], {"all_recorded": True}), TokenPieces(Letters()))
    write_table(file_of(samples_folder(tmp_path), "training", 6), starved)
    with_account(file_of(samples_folder(tmp_path), "training", 5), all_recorded=True)
    with pytest.raises(InputError, match=r"step 6 trained on nothing: .*steps 1-2, 4-5 can be"):
        plan_replay(tmp_path, 6)
    plan = plan_replay(tmp_path, 4)
    assert (plan.start.name, plan.steps, plan.recorded_world_size) == ("step_00000003", (4,), 2)
    assert (plan_replay(tmp_path, 2).start, plan_replay(tmp_path, 2).steps) == (None, (1, 2))


def test_what_differs_is_named_with_its_place(tmp_path):
    recorded(tmp_path)
    samples = read_step(file_of(samples_folder(tmp_path), "training", 5)).samples
    missing = np.full(4, np.nan, np.float32)
    same = [
        (
            np.stack([s.trainer_logprobs, np.full(len(s.trainer_logprobs), s.advantage, np.float32)]),
            (missing if s.update_logprobs is None else s.update_logprobs)[None],
        )
        for s in samples
    ]
    assert all(d.is_equal for d in compare_samples(samples, same, 1e-5))
    same[1][0][0, 3] += 0.25
    found = {d.name: d for d in compare_samples(samples, same, 1e-5)}
    off = found["log-probs at the step's start"]
    assert (off.num_different, off.where, round(off.largest, 5)) == (1, "response 8, token 4", 0.25)
    assert off.excess > 1
    assert found["ratios in the last update"].where == "response 8, token 4"
    assert found["advantages"].is_equal
    assert found["log-probs in the last update"].is_equal
    (loss,) = compare_numbers({"policy/loss": 0.5, "time/step_s": 1.0}, {"policy/loss": 0.5000049}, 1e-5)
    assert not loss.is_equal
    assert loss.excess <= 1
    (loss,) = compare_numbers({"policy/loss": 0.5}, {"policy/loss": float("nan")}, 1e-5)
    assert loss.excess > 1
