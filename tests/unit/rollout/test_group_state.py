"""Responses in a checkpoint: versions of their tokens survive, and checkpoints of before there were any load."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dapo_mega.rollout.group_state import pack_groups, unpack_groups
from dapo_mega.trajectory_records import pack_trajectories, unpack_trajectories
from dapo_mega.types import Group, Prompt, Response, Trajectory, Turn
from tests.made_trajectories import scored_answer


def response(request_id, length, spans=(), engines=()):
    rng = np.random.default_rng(request_id)
    tokens = rng.integers(0, 99, length).astype(np.int32)
    return Response(request_id, tokens, rng.random(length).astype(np.float32), "stop", 3, spans, engines)


ANSWERS = [response(7, 5, ((3, 2), (4, 3), (6, 5)), (("a", 5),)), response(8, 0), response(9, 4)]
TURNS = Trajectory(
    11,
    *(response(11, 9).token_ids, response(11, 9).logprobs, np.array([1, 1, 0, 0, 1, 0, 0, 0, 1]).astype(bool)),
    turns=(Turn(2, "stop"), Turn(5, "length", {"calls": 1.0}), Turn(9, "stop")),
    version_spans=((3, 5), (4, 9)),
    engine_spans=(("a", 2), ("b", 9)),
    segments=(5, 9),
    routes=np.arange(11 * 2 * 3, dtype=np.int16).reshape(11, 2, 3),
)


TAUGHT = replace(
    Trajectory.of(ANSWERS[2]),
    teacher_logprobs=-np.arange(4, dtype=np.float32),
    teacher_top_ids=np.arange(12, dtype=np.int32),
    teacher_top_logprobs=-np.arange(12, dtype=np.float32),
)


@pytest.mark.parametrize(
    "trajectories",
    [
        [],
        list(map(Trajectory.of, ANSWERS)),
        [Trajectory.of(ANSWERS[0]), TURNS],
        [Trajectory.of(ANSWERS[0]), TAUGHT, Trajectory.of(ANSWERS[2]), TAUGHT],
    ],
)
def test_trajectories_survive_a_round_trip_through_json_and_arrays(trajectories):
    records, arrays = pack_trajectories(trajectories, "name")
    assert ("name/sampled" in arrays) == (TURNS in trajectories)
    restored = unpack_trajectories(json.loads(json.dumps(records)), arrays, "name", Trajectory)
    for old, new in zip(trajectories, restored, strict=True):
        assert (new.token_ids.dtype, new.logprobs.dtype, new.sampled.dtype) == (np.int32, np.float32, np.bool_)
        for name, value in vars(old).items():
            assert np.array_equal(getattr(new, name), value), name


def test_a_record_without_versions_of_tokens_is_of_one_version():
    records, arrays = pack_trajectories([Trajectory.of(response(7, 5))], "name")
    assert records == [
        {
            "length": 5,
            "finish_reason": "stop",
            "weight_version": 3,
            "request_id": 7,
            "version_spans": [[3, 5]],
            "engine_spans": [],
        }
    ]
    del records[0]["version_spans"], records[0]["engine_spans"]
    (restored,) = unpack_trajectories(records, arrays, "name", Trajectory)
    assert (restored.weight_version, restored.version_spans, restored.engine_spans) == (3, ((3, 5),), ())


def test_a_groups_greedy_response_survives_and_stays_apart():
    prompts = [Prompt(i, "", np.array([1], np.int32), "") for i in range(2)]
    scored = [scored_answer(response(i, i + 1), f"t{i}", i % 2 == 0, 1.0, 0.5 * i) for i in range(5)]
    groups = [Group(prompts[1], tuple(scored[:2]), scored[2]), Group(prompts[0], tuple(scored[3:]))]
    records, arrays = pack_groups(groups, "buffer")
    restored = unpack_groups(json.loads(json.dumps(records)), arrays, prompts, "buffer")
    assert [len(group.trajectories) for group in restored] == [2, 2]
    assert (restored[0].greedy.text, restored[0].greedy.reward) == ("t2", 1.0)
    assert len(restored[0].greedy.token_ids) == 3
    assert restored[1].greedy is None
