"""Responses in a checkpoint: versions of their tokens survive, and checkpoints of before there were any load."""

import json

import numpy as np
import pytest

from dapo_mega.rollout.group_state import pack_groups, pack_responses, unpack_groups, unpack_responses
from dapo_mega.types import Group, Prompt, Response, ScoredResponse


def response(request_id, length, spans=(), engines=()):
    rng = np.random.default_rng(request_id)
    tokens = rng.integers(0, 99, length).astype(np.int32)
    return Response(request_id, tokens, rng.random(length).astype(np.float32), "stop", 3, spans, engines)


@pytest.mark.parametrize(
    "responses", [[], [response(7, 5, ((3, 2), (4, 3), (6, 5)), (("a", 5),)), response(8, 0), response(9, 4)]]
)
def test_responses_survive_a_round_trip_through_json_and_arrays(responses):
    records, arrays = pack_responses(responses, "name")
    assert set(arrays) == {"name/token_ids", "name/logprobs"}
    restored = unpack_responses(json.loads(json.dumps(records)), arrays, "name")
    for old, new in zip(responses, restored, strict=True):
        assert new.token_ids.dtype == np.int32
        assert new.logprobs.dtype == np.float32
        for name, value in vars(old).items():
            assert np.array_equal(getattr(new, name), value), name
        assert (new.version_spans, new.engine_spans) == (old.version_spans, old.engine_spans)


def test_a_record_without_versions_of_tokens_is_of_one_version():
    records, arrays = pack_responses([response(7, 5)], "name")
    del records[0]["version_spans"], records[0]["engine_spans"]
    (restored,) = unpack_responses(records, arrays, "name")
    assert (restored.weight_version, restored.version_spans, restored.engine_spans) == (3, (), ())


def test_a_groups_greedy_response_survives_and_stays_apart():
    prompts = [Prompt(i, "", np.array([1], np.int32), "") for i in range(2)]
    scored = [ScoredResponse(response(i, i + 1), f"t{i}", i % 2 == 0, 1.0, 0.5 * i) for i in range(5)]
    groups = [Group(prompts[1], tuple(scored[:2]), 3, scored[2]), Group(prompts[0], tuple(scored[3:]), 3)]
    records, arrays = pack_groups(groups, "buffer")
    restored = unpack_groups(json.loads(json.dumps(records)), arrays, prompts, "buffer")
    assert [len(group.responses) for group in restored] == [2, 2]
    assert (restored[0].greedy.text, restored[0].greedy.reward) == ("t2", 1.0)
    assert len(restored[0].greedy.response.token_ids) == 3
    assert restored[1].greedy is None
