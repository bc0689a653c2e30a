"""Payloads and answers of SGLang, without a server."""

import base64
import contextlib
import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dapo_mega.engines.sglang.api import (
    Completion,
    MalformedAnswer,
    RouteSizes,
    generate_payload,
    joined,
    parse_answer,
    parse_prompt_top,
    parse_scores,
    unfit,
)
from dapo_mega.engines.sglang.versions import VersionRange, WeightVersion, run_name
from dapo_mega.sglang_plugin import pack_logprobs
from dapo_mega.types import GenerationRequest, SamplingParams

VOCAB_SIZE = 50
REQUEST = GenerationRequest(
    7, np.array([3, 4], np.int32), (5 << 64) | 7, SamplingParams(max_new_tokens=4, stop_token_ids=(9,))
)


def answer(ids, kind="length", spans=None, logprobs=None, **meta):
    logprobs = [-0.5 - i for i in range(len(ids))] if logprobs is None else logprobs
    spans = [("2", 0, len(ids))] if spans is None else spans
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": kind},
            "completion_tokens": len(ids),
            "weight_version": "2",
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans],
            "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs, ids, strict=True)],
            **meta,
        },
    }


def packed(logprobs, ids):
    """As the plugin adds them to an answer."""
    state = SimpleNamespace(
        obj=SimpleNamespace(sampling_params=generate_payload(REQUEST, [], "r.")["sampling_params"], stream=False),
        output_token_logprobs_val=logprobs,
        output_token_logprobs_idx=ids,
    )
    meta_info = {}
    pack_logprobs(pytest.fail, None, meta_info, state, 0, None, False, finished=True)
    return meta_info["output_token_logprobs"]


def parsed(body, parts=(), versions=(2, 2), request=REQUEST, run=""):
    return parse_answer(body, request, parts, VOCAB_SIZE, VersionRange(run, *versions))


def part(ids, version, finish="abort", url=""):
    tokens = np.array(ids, np.int32)
    return Completion(tokens, -tokens.astype(np.float32), finish, ((version, len(ids)),), url)


def test_a_payload_asks_for_the_sampled_tokens_log_probs_and_nothing_more():
    payload = generate_payload(REQUEST, [], "r-1.")
    seed = payload["sampling_params"].pop("sampling_seed")
    assert 0 <= seed < 2**63
    assert payload.pop("input_ids").tolist() == [3, 4]
    assert payload == {
        "rid": "r-1.",
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 4,
            "stop_token_ids": [9],
            "custom_params": {"dapo_mega_packed_logprobs": True},
        },
        "return_logprob": True,
    }


def test_seeds_that_differ_in_the_run_or_in_the_request_stay_different():
    def seed(value):
        return generate_payload(replace(REQUEST, seed=value), [], "r.")["sampling_params"]["sampling_seed"]

    assert len({seed((run << 64) | request) for run in range(4) for request in range(100)}) == 400
    assert seed(5) == seed(5)


def test_a_payload_goes_on_after_the_parts():
    payload = generate_payload(REQUEST, [part([1], 0), part([2, 8], 1)], "r.")
    assert payload["input_ids"].tolist() == [3, 4, 1, 2, 8]
    assert payload["sampling_params"]["max_new_tokens"] == 1


def test_greedy_top_k_and_no_stop_tokens_are_said_in_sglangs_words():
    sampling = SamplingParams(temperature=0.0, top_k=5, max_new_tokens=4)
    parameters = generate_payload(replace(REQUEST, sampling=sampling), [], "r.")["sampling_params"]
    assert parameters["temperature"] == 0.0
    assert parameters["top_k"] == 5
    assert parameters["ignore_eos"] is True
    assert "stop_token_ids" not in parameters
    assert "stop" not in parameters


def test_texts_that_end_a_response_are_said_as_they_are():
    sampling = replace(REQUEST.sampling, stop=("</search>", "\n\n"))
    parameters = generate_payload(replace(REQUEST, sampling=sampling), [], "r.")["sampling_params"]
    assert parameters["stop"] == ["</search>", "\n\n"]


@pytest.mark.parametrize(
    ("ids", "kind", "finish"),
    [
        ([1, 2, 3, 4], "length", "length"),
        ([1, 9], "stop", "stop"),
        ([1, 2], "stop", "stop"),
        ([1, 2, 3, 9], "length", "stop"),
        ([1, 2], "abort", "abort"),
        ([], "abort", "abort"),
        ([1, 9], "abort", "stop"),
        ([1, 2, 3, 4], "abort", "length"),
    ],
)
def test_a_good_answer_is_taken_as_it_is(ids, kind, finish):
    logprobs = [-0.5 - i for i in range(len(ids))]
    completion = parsed(answer(ids, kind))
    assert completion.token_ids.tolist() == ids
    assert completion.logprobs.tolist() == logprobs
    assert parsed(answer(ids, kind, output_token_logprobs=packed(logprobs, ids))).logprobs.tolist() == logprobs
    assert completion.finish == finish
    assert completion.version_spans == (((2, len(ids)),) if ids else ())


def test_the_length_limit_counts_the_parts():
    completion = parsed(answer([1, 2, 3]), parts=[part([5], 2)])
    assert completion.finish == "length"
    with pytest.raises(MalformedAnswer, match="4 tokens where 3 were allowed"):
        parsed(answer([1, 2, 3, 4]), parts=[part([5], 2)])


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (None, "malformed"),
        ([answer([1, 2, 3, 4])], "malformed"),
        ({}, "malformed"),
        ({"output_ids": [1], "meta_info": None}, "malformed"),
        ({"output_ids": "12", "meta_info": {}}, "malformed"),
        (answer([1.5, 2, 3, 4]), "malformed"),
        (answer(["1", 2, 3, 4]), "malformed"),
        (answer([True, True, True, True]), "malformed"),
        (answer([[1], [2, 3], 3, 4]), "malformed"),
        (answer([None, 2, 3, 4]), "malformed"),
        (answer([1, 2, 3, 50]), "vocabulary"),
        (answer([-1, 2, 3, 4]), "vocabulary"),
        (answer([1, 2, 3, 2**70]), "vocabulary"),
        (answer([1, 2, 3, 4], completion_tokens=5), "token_count"),
        (answer([1, 2, 3, 4, 5]), "token_count"),
        (answer([1, 2, 3]), "token_count"),
        (answer([], "stop"), "token_count"),
        (answer([], "length"), "token_count"),
        (answer([1, 9, 3, 4]), "token_count"),
        (answer([1, 2, 3, 4], finish_reason=None), "malformed"),
        (answer([1, 2, 3, 4], finish_reason={"type": "other"}), "malformed"),
        (answer([1, 2, 3, 4], output_token_logprobs=None), "logprobs"),
        (answer([1, 2, 3, 4], output_token_logprobs=[]), "logprobs"),
        (answer([1, 2, 3, 4], output_token_logprobs=[-1.0, -1.0, -1.0, -1.0]), "logprobs"),
        (answer([1, 2, 3, 4], output_token_logprobs=[[], [], [], []]), "logprobs"),
        (answer([1, 2], "stop", output_token_logprobs=[["x", 1, None], [-1.0, 2, None]]), "logprobs"),
        (answer([1, 2], "stop", output_token_logprobs=[[-1.0, 2, None], [-1.0, 1, None]]), "logprobs"),
        (answer([1, 2, 3, 4], logprobs=[-1.0, None, -1.0, -1.0]), "logprobs"),
        (answer([1, 2, 3, 4], logprobs=[-1.0, math.nan, -1.0, -1.0]), "logprobs"),
        (answer([1, 2, 3, 4], logprobs=[-1.0, -math.inf, -1.0, -1.0]), "logprobs"),
        (answer([1, 2, 3, 4], logprobs=[-1.0, 0.01, -1.0, -1.0]), "logprobs"),
        *(
            (answer([1, 2], "stop", output_token_logprobs=packed(logprobs, ids)), "logprobs")
            for logprobs, ids in (
                ([-1.0], [1]),
                ([-1.0, -1.0], [2, 1]),
                ([-1.0, math.nan], [1, 2]),
                ([-1.0, -math.inf], [1, 2]),
                ([-1.0, 0.01], [1, 2]),
            )
        ),
        (answer([1, 2], "stop", output_token_logprobs=packed([-1.0, -1.0], [1, 2])[:-2]), "malformed"),
        (answer([1, 2], "stop", output_token_logprobs=packed([-1.0, -1.0], [1, 2])[:-4]), "logprobs"),
        (answer([1, 2, 3, 4], spans=[("1", 0, 4)]), "version"),
        (answer([1, 2, 3, 4], spans=[("2", 0, 2), ("3", 2, 4)]), "version"),
        (answer([1, 2, 3, 4], spans=[("default", 0, 4)]), "version"),
        (answer([1, 2, 3, 4], spans=[("2", 0, 3)]), "version"),
        (answer([1, 2, 3, 4], spans=[("2", 1, 4)]), "version"),
        (answer([1, 2, 3, 4], spans=[("2", 0, 1), ("2", 2, 4)]), "version"),
        (answer([1, 2, 3, 4], spans=[]), "version"),
        (answer([1, 2, 3, 4], weight_versions=None, weight_version=None), "version"),
        (answer([1, 2, 3, 4], weight_versions=7), "version"),
    ],
)
def test_a_bad_answer_is_refused_for_what_is_wrong_with_it(body, fault):
    with pytest.raises(MalformedAnswer) as caught:
        parsed(body)
    assert caught.value.fault == fault


WRONG = [None, True, -1, 2**70, 10**400, 1e308, -1e300, math.inf, math.nan, "1", "9" * 500, [], [[[]]], {}, {"type": 1}]


def places(value, path=()):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def test_values_of_wrong_kinds_anywhere_in_an_answer_are_its_fault_and_never_reach_training():
    good = answer([1, 2, 3, 4], input_token_logprobs=[[None, 3, None], [-1.0, 4, None]])
    refused = 0
    for path in places(good):
        for wrong in WRONG:
            body = {"": copy.deepcopy(good)}
            inner = body
            *outer, last = ("", *path)
            for key in outer:
                inner = inner[key]
            inner[last] = wrong
            try:
                taken = parsed(body[""])
                assert np.isfinite(taken.logprobs).all()
                assert taken.token_ids.tolist() == [1, 2, 3, 4]
            except MalformedAnswer:
                refused += 1
            with contextlib.suppress(MalformedAnswer):
                scores = parse_scores(body[""], REQUEST.prompt_token_ids, VersionRange("", 2, 2))
                assert not np.isinf(scores).any()
    assert refused > 300


def test_rounding_of_a_certain_token_is_cut_to_zero():
    assert parsed(answer([1, 2, 3, 4], logprobs=[-1.0, 1e-7, -1.0, -1.0])).logprobs[1] == 0.0


TOP = [None, [[-0.1, 4, None], [-3.0, 0, None]], [[-0.7, 1, None], [1e-6, 7, None]]]


def test_the_most_probable_tokens_of_a_prompt_are_read():
    ids, logprobs = parse_prompt_top({"output_ids": [], "meta_info": {"input_top_logprobs": TOP}}, 2, 2)
    assert ids.tolist() == [[4, 0], [1, 7]]
    np.testing.assert_array_equal(logprobs, np.array([[-0.1, -3], [-0.7, 0]], np.float32))
    assert [x.shape for x in parse_prompt_top({"output_ids": [], "meta_info": {}}, 2, 0)] == [(2, 0), (2, 0)]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, "its prompt's 2 most probable tokens are missing at some of 2 tokens"),
        (TOP[:2], "missing at some"),
        ([*TOP, TOP[1]], "missing at some"),
        ([None, TOP[1], None], "missing at some"),
        ([None, TOP[1], TOP[1][:1]], "missing at some"),
        ([None, TOP[1], [[-0.7, 1, None], [-0.9, 1.5, None]]], "not triples"),
        ([None, TOP[1], [[-0.7, 1, None], ["-1", 2, None]]], "not triples"),
        ([None, TOP[1], [[-0.7, 1, None], [-0.9, 1, None]]], "twice"),
        ([None, TOP[1], [[-0.7, 1, None], [-0.9, -1, None]]], "below 0"),
        ([None, TOP[1], [[-0.7, 1, None], [0.9, 2, None]]], "above 0"),
        ([None, TOP[1], [[-0.7, 1, None], [-float("inf"), 2, None]]], "not finite"),
        ([None, TOP[1], [[-0.7, 1, None], [-0.9, 2**40, None]]], "cannot be read"),
    ],
)
def test_most_probable_tokens_that_do_not_fit_are_refused(said, reason):
    with pytest.raises(MalformedAnswer, match=reason):
        parse_prompt_top({"output_ids": [], "meta_info": {"input_top_logprobs": said}}, 2, 2)


def test_a_server_that_reports_one_version_is_believed():
    body = answer([1, 2, 3, 4])
    del body["meta_info"]["weight_versions"]
    assert parsed(body).version_spans == ((2, 4),)


def test_weights_that_changed_on_the_way_are_reported_per_token():
    body = answer([1, 2, 3, 4], spans=[("2", 0, 1), ("3", 1, 4)])
    assert parsed(body, versions=(2, 3)).version_spans == ((2, 1), (3, 4))


@pytest.mark.parametrize(
    ("version", "foreign"),
    [
        ("mine:2", ""),
        ("mine:1", None),
        ("mine", None),
        ("default", None),
        ("other:2", WeightVersion("other", 2)),
        ("a:b:2", WeightVersion("a:b", 2)),
        ("2", WeightVersion("", 2)),
        ("a" * 1000 + ":2", None),
        ("a\x1b[31m:2", None),
    ],
)
@pytest.mark.parametrize("says_spans", [True, False])
def test_only_the_runs_own_weights_may_have_sampled_an_answer(version, foreign, says_spans):
    body = answer([1, 2, 3, 4], spans=[(version, 0, 4)], weight_version=version)
    if not says_spans:
        del body["meta_info"]["weight_versions"]
    if foreign == "":
        assert parsed(body, run="mine").version_spans == ((2, 4),)
        return
    with pytest.raises(MalformedAnswer) as caught:
        parsed(body, run="mine")
    assert (caught.value.fault, caught.value.foreign) == ("version", foreign)


SIZES = RouteSizes(num_layers=3, layers=(1, 2), per_token=2, experts=4)


def experts_of(tokens, first=0):
    """Token t goes to two neighbours of four experts; a layer without experts has what was in memory."""
    places = np.arange(first, first + tokens)[:, None, None] + np.arange(3)[:, None]
    chosen = np.concatenate([places % 4, (places + 1) % 4], -1).astype(np.int32)
    chosen[:, 0] = 99
    return chosen


def routed(request, ids, chosen, parts=(), kind="length"):
    encoded = base64.b64encode(chosen.tobytes()).decode()
    body = answer(ids, kind, routed_experts=encoded)
    return parse_answer(body, request, parts, VOCAB_SIZE, VersionRange("", 2, 2), sizes=SIZES)


def test_the_experts_of_all_tokens_but_the_last_are_asked_for_and_read_once():
    request = replace(REQUEST, routes_from=0)
    payload = generate_payload(request, [], "r.")
    assert payload["return_routed_experts"] is True
    assert "routed_experts_start_len" not in payload
    first = routed(request, [1, 2], experts_of(3), kind="abort")
    assert first.routes.dtype == np.int16
    assert first.routes[:, 1].tolist() == [[1, 2], [2, 3], [3, 0]]
    assert (first.routes[:, 0] == -1).all()
    # The first part's last token is the continuation's first.
    assert generate_payload(request, [first], "r.")["routed_experts_start_len"] == 3
    last = routed(request, [3, 5], experts_of(2, first=3), [first])
    response = joined(7, [first, last])
    assert np.array_equal(response.routes[:, 1:], experts_of(5)[:, 1:])
    assert "return_routed_experts" not in generate_payload(REQUEST, [], "r.")


def test_a_call_that_was_cut_off_leaves_its_experts_to_the_next():
    request = replace(REQUEST, routes_from=0)
    cut_off = parse_answer(answer([1, 2], "abort"), request, (), VOCAB_SIZE, VersionRange("", 2, 2), sizes=SIZES)
    assert "routed_experts_start_len" not in generate_payload(request, [cut_off], "r.")
    assert len(joined(7, [cut_off, routed(request, [3, 5], experts_of(5), [cut_off])]).routes) == 5


@pytest.mark.parametrize("fault", ["few", "outside", "beyond", "twice", "none", "garbled"])
def test_experts_that_no_tokens_can_have_gone_through_are_refused(fault):
    chosen = experts_of(5)
    chosen[3, 2] = {"outside": [0, 4], "beyond": [0, 2**16 + 1], "twice": [1, 1]}.get(fault, chosen[3, 2])
    given = {"few": chosen[1:], "none": None}.get(fault, chosen)
    encoded = "=" if fault == "garbled" else given if given is None else base64.b64encode(given.tobytes()).decode()
    body = answer([1, 2, 3, 5], routed_experts=encoded)
    with pytest.raises(MalformedAnswer) as caught:
        parse_answer(body, replace(REQUEST, routes_from=0), (), VOCAB_SIZE, VersionRange("", 2, 2), sizes=SIZES)
    assert caught.value.fault == ("malformed" if fault == "garbled" else "routes")


def test_an_answer_has_room_for_the_experts_of_a_whole_response():
    request = replace(REQUEST, routes_from=0)
    assert SIZES.num_bytes(request) >= len(base64.b64encode(experts_of(5).tobytes()))
    assert SIZES.num_bytes(REQUEST) == 0


def test_every_start_of_a_run_has_a_readable_name_of_its_own():
    first, second = run_name("runs/my run: 1"), run_name("runs/my run: 1")
    assert first != second
    assert first.startswith("my_run_1@")
    assert WeightVersion.parse(WeightVersion(first, 7)) == WeightVersion(first, 7)


def test_parts_are_joined_with_the_versions_of_their_tokens():
    parts = [part([1, 2], 4), part([3], 4), part([5, 6], 6, finish="stop")]
    response = joined(7, parts)
    assert response.token_ids.tolist() == [1, 2, 3, 5, 6]
    assert response.logprobs.tolist() == [-1, -2, -3, -5, -6]
    assert response.finish_reason == "stop"
    assert response.weight_version == 4
    assert response.version_spans == ((4, 3), (6, 5))


def test_parts_are_joined_with_the_engines_that_sampled_them():
    parts = [part([1, 2], 4, url="a"), part([3], 5, url="a"), part([5, 6], 5, finish="stop", url="b")]
    assert joined(7, parts).engine_spans == (("a", 3), ("b", 5))


def test_a_response_of_one_version_needs_no_spans():
    response = joined(7, [part([1, 2], 4), part([3], 4, finish="length")])
    assert response.weight_version == 4
    assert response.version_spans == ()


@pytest.mark.parametrize(
    ("prompt", "complaint"), [([], "empty"), ([3, 50], "token id 50"), ([-1, 3], "token id -1"), ([0, 49], "")]
)
def test_a_prompt_that_would_kill_a_server_is_found(prompt, complaint):
    found = unfit(replace(REQUEST, prompt_token_ids=np.array(prompt, np.int32)), VOCAB_SIZE)
    assert complaint in found
    assert bool(found) == bool(complaint)
