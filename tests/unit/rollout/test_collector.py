"""Dynamic sampling's loop: failures are retried, groups arrive in order, starvation says why, state continues."""

import numpy as np
import pytest

from dapo_mega.batching import pack_step, samples_of_groups
from dapo_mega.config import RunConfig
from dapo_mega.errors import StarvedError
from dapo_mega.group_state import pack_groups, unpack_groups
from dapo_mega.packing import columns_from_samples
from dapo_mega.rewards import AnswerVerifier
from dapo_mega.rollout.collector import Collector
from dapo_mega.rollout.scoring import ResponseScorer
from dapo_mega.types import GenerationFailure, Prompt, Response

PROMPTS = [Prompt(i, f"p{i}", np.array([i + 1, 7], np.int32), str(i)) for i in range(20)]
TOKEN_OF_TEXT = {"right": 1, "wrong": 2}


def config(**changes):
    values = {
        "output_dir": "x",
        "num_steps": 4,
        "seed": 5,
        "model": {"path": "m"},
        "data": {"train": {"path": "d"}, "max_prompt_tokens": 8},
        "rollout": {"max_response_tokens": 16},
        "reward": {"overlong_cache_tokens": 4},
        "batch": {
            "groups_per_step": 4,
            "group_size": 4,
            "generation_groups": 6,
            "mini_batch_groups": 2,
            "tokens_per_microbatch": 64,
        },
        "algorithm": {"max_generation_rounds": 3},
    }
    for section, given in changes.items():
        values[section] = {**values.get(section, {}), **given}
    return RunConfig.model_validate(values)


class ScriptedEngine:
    """Answers by a rule; faults that a real engine cannot be made to show on demand (see test_embedded.py for the
    real one)."""

    weight_version = 0

    def __init__(self, is_right, fails=lambda request, attempt: False):
        self.is_right, self.fails = is_right, fails
        self.attempts = {}
        self.asked = []

    def generate(self, requests):
        answers = []
        for request in requests:
            attempt = self.attempts[request.request_id] = self.attempts.get(request.request_id, 0) + 1
            if self.fails(request, attempt):
                answers.append(GenerationFailure(request.request_id, "scripted"))
                continue
            prompt = int(request.prompt_token_ids[0]) - 1
            self.asked.append((request.request_id, prompt, request.seed))
            right = self.is_right(prompt, request.request_id)
            length = 3 + request.request_id % 14
            tokens = np.full(length, 1 if right else 2, np.int32)
            finish = "length" if length >= 16 else "stop"
            answers.append(Response(request.request_id, tokens, -np.ones(length, np.float32), finish, 0))
        return answers


def collector(engine, run):
    def decode(responses):
        # The scripted token says whether the answer is the truth; which truth, the request's prompt decides.
        return [f"Answer: {'T' if tokens[0] == 1 else 'F'}" for tokens in responses]

    verifier = AnswerVerifier(1, 5.0)
    prompts = [Prompt(p.index, p.text, p.token_ids, "T") for p in PROMPTS]
    scorer = ResponseScorer(run.reward, verifier, decode, run.rollout.max_response_tokens, run.seed)
    return Collector(run, prompts, engine, scorer, (2,))


def every_other(prompt, request_id):
    return request_id % 2 == 0


def test_a_step_holds_n_mixed_groups_in_cursor_order_and_surplus_waits():
    subject = collector(ScriptedEngine(every_other), config())
    groups, metrics = subject.collect(0)
    assert len(groups) == 4
    assert len(subject.buffer) == 2
    assert metrics["buffer/size"] == 2
    assert metrics["groups/kept_share"] == 1.0
    order = [g.prompt.index for g in [*groups, *subject.buffer.groups]]
    fresh = collector(ScriptedEngine(every_other), config())
    assert order == fresh.cursor.next(6)


def test_the_next_round_asks_less_when_surplus_is_held():
    engine = ScriptedEngine(every_other)
    subject = collector(engine, config())
    subject.collect(0)
    first = len(engine.asked)
    subject.collect(1)
    # Two of four groups are held: half of the six prompts are asked.
    assert first == 6 * 4
    assert len(engine.asked) - first == 3 * 4


def test_failed_generations_are_retried_and_never_scored():
    engine = ScriptedEngine(every_other, fails=lambda request, attempt: request.request_id % 3 == 0 and attempt < 3)
    subject = collector(engine, config())
    groups, metrics = subject.collect(0)
    assert len(groups) == 4
    assert metrics["rollout/retried_requests"] == 2 * 8
    assert metrics["rollout/dropped_groups"] == 0
    assert metrics["rollout/accuracy_mean"] == 0.5


def test_a_group_whose_request_keeps_failing_is_dropped_and_counted():
    engine = ScriptedEngine(every_other, fails=lambda request, attempt: request.request_id == 1)
    subject = collector(engine, config())
    groups, metrics = subject.collect(0)
    assert metrics["rollout/dropped_groups"] == 1
    assert metrics["groups/offered"] == 5
    assert all(r.response.request_id >= 4 for g in groups for r in g.responses)
    assert engine.attempts[1] == 3


def test_starvation_names_the_acceptance_rate():
    # Only prompt 0 is ever mixed.
    engine = ScriptedEngine(lambda prompt, request_id: prompt == 0 and request_id % 2 == 0)
    subject = collector(engine, config())
    with pytest.raises(StarvedError, match=r"after 3 generation rounds.*acceptance rate \d+\.\d%.*all wrong"):
        subject.collect(0)


def test_stale_surplus_is_dropped_and_counted():
    subject = collector(ScriptedEngine(every_other), config(algorithm={"max_staleness": 1}))
    subject.collect(0)
    _, metrics = subject.collect(5)
    assert metrics["buffer/stale_dropped"] == 2


def test_a_restored_collector_continues_as_if_nothing_had_happened():
    run = config()
    whole = collector(ScriptedEngine(every_other), run)
    whole.collect(0)
    state = whole.state()
    records, arrays = pack_groups(whole.buffer.groups)
    expected, _ = whole.collect(1)
    resumed = collector(ScriptedEngine(every_other), run)
    resumed.load_state(state, unpack_groups(records, arrays, resumed.prompts))
    got, _ = resumed.collect(1)
    assert [g.prompt.index for g in got] == [g.prompt.index for g in expected]
    ids = [[r.response.request_id for r in g.responses] for g in got]
    assert ids == [[r.response.request_id for r in g.responses] for g in expected]


def test_request_seeds_are_unique_and_depend_on_the_run_seed():
    engine = ScriptedEngine(every_other)
    collector(engine, config()).collect(0)
    seeds = {seed for _, _, seed in engine.asked}
    assert len(seeds) == len(engine.asked)
    other = ScriptedEngine(every_other)
    collector(other, RunConfig.model_validate({**config().model_dump(), "seed": 6})).collect(0)
    assert not seeds & {seed for _, _, seed in other.asked}


def test_overlong_filtering_masks_the_loss_but_not_the_statistics():
    plain, filtered = config(), config(reward={"overlong_filtering": True})
    groups, _ = collector(ScriptedEngine(every_other), plain).collect(0)
    all_in = samples_of_groups(groups, plain, 0)
    masked = samples_of_groups(groups, filtered, 0)
    truncated = [len(s.token_ids) - s.prompt_length >= 16 for s in masked]
    assert any(truncated)
    assert [s.in_loss for s in masked] == [not t for t in truncated]
    assert all(s.in_loss for s in all_in)
    assert [s.advantage for s in masked] == [s.advantage for s in all_in]


def test_rewards_are_the_rule_reward_plus_the_soft_punishment():
    groups, metrics = collector(ScriptedEngine(every_other), config()).collect(0)
    for scored in (r for g in groups for r in g.responses):
        length = len(scored.response.token_ids)
        base = 1.0 if scored.correct else -1.0
        # L_max 16, L_cache 4: free up to 12, then -1/4 per token, -1 from 16 on.
        assert scored.accuracy_reward == base
        assert scored.reward == pytest.approx(base - min(max(length - 12, 0) / 4, 1.0))
    assert metrics["rollout/reward_mean"] < metrics["rollout/accuracy_reward_mean"]


def test_mini_batches_are_whole_groups_and_every_rank_gets_as_many_micro_batches():
    run = config()
    groups, _ = collector(ScriptedEngine(every_other), run).collect(0)
    columns = columns_from_samples(samples_of_groups(groups, run, 0))
    ranks = [
        pack_step(columns, run, data_rank=rank, data_size=2, multiple_of=1, attention_cost=0.0) for rank in range(2)
    ]
    assert [len(batch.mini_batches) for batch in ranks] == [2, 2]
    for i in range(2):
        assert len(ranks[0].mini_batches[i]) == len(ranks[1].mini_batches[i])
        tokens = sum(micro.num_tokens for batch in ranks for micro in batch.mini_batches[i])
        assert tokens == columns.lengths[i * 8 : (i + 1) * 8].sum()
        denominators = sum(micro.denominator for batch in ranks for micro in batch.mini_batches[i])
        part = slice(i * 8, (i + 1) * 8)
        assert denominators == (columns.lengths - columns.prompt_lengths)[part].sum()
    assert 0 < ranks[0].packing_efficiency <= 1
