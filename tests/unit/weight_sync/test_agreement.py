"""The sequence that engines are compared by, and the trainer's log-probs of it however the policy is spread."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dapo_mega.batching.microbatch import context_slice, pack
from dapo_mega.batching.plan import PackingLayout
from dapo_mega.config import RunConfig
from dapo_mega.training.trainer import Trainer
from dapo_mega.types import Prompt
from dapo_mega.weight_sync.agreement import fixed_sequence, mean_difference

VOCAB_SIZE = 50


@pytest.fixture
def control():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def prompts(*lengths):
    rng = np.random.default_rng(3)
    return [Prompt(i, "", rng.integers(0, VOCAB_SIZE, n).astype(np.int32), "") for i, n in enumerate(lengths)]


def config(**rollout):
    return RunConfig.model_validate(
        {
            "output_dir": "o",
            "num_steps": 1,
            "model": {"path": "m", "dtype": rollout.pop("model", "fp32")},
            "compute": {"fp8": {"scaling": rollout.pop("scaling", "none")}},
            "data": {"train": {"path": "d"}},
            "rollout": {"placement": "fleet", "fleet": {"urls": ["http://a:1"]}, **rollout},
        }
    )


def by_hand(tokens):
    """The scripted model's log-probs: of the place and the token."""
    return -(100.0 * np.arange(len(tokens) - 1) + tokens[1:]) / 1000


class SpreadPolicy:
    """One of two context-parallel processes."""

    def __init__(self, rank, control):
        self.rank = rank
        self.arch = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.processes = SimpleNamespace(counts_outputs=True, control=control)
        self.num_scored = 0

    def pack(self, samples, *, token_budget, aggregation, max_response_tokens):
        layout = PackingLayout(multiple_of=8, segment_multiple=4)
        micro_batch = pack(samples, layout, aggregation=aggregation, max_response_tokens=max_response_tokens)
        return SimpleNamespace(mini_batches=[[context_slice(micro_batch, self.rank, 2)]])

    def score(self, batches, *, temperature):
        assert temperature == 1.0
        self.num_scored += 1
        return [
            SimpleNamespace(
                logprobs=(-(100.0 * b.positions + b.targets.token_ids) / 1000)[b.targets.response_mask].float()
            )
            for b in batches
        ]


def test_log_probs_of_parts_of_the_sequence_add_up_to_the_whole(control):
    tokens = fixed_sequence(config(), prompts(70), VOCAB_SIZE)
    parts = [scores_of(SpreadPolicy(rank, control), tokens) for rank in (0, 1)]
    assert all(np.count_nonzero(part) for part in parts)
    np.testing.assert_allclose(sum(parts), by_hand(tokens), rtol=1e-6)


def scores_of(policy, tokens):
    """Of a process of a trainer, which has this part of the sequence."""
    trainer = Trainer(config(temperature=0.5), policy.processes)
    trainer.policy = policy
    return trainer.logprobs(tokens)


@pytest.mark.parametrize("lengths", [(70,), (30, 40), (5,), (), (0, 3)])
def test_the_sequence_has_its_length_and_is_the_same_each_time(lengths):
    tokens = fixed_sequence(config(), prompts(*lengths), VOCAB_SIZE)
    assert tokens.dtype == np.int32
    assert len(tokens) == 64
    # In place of the last token of the vocabulary SGLang scores another one.
    assert tokens.min() >= 0
    assert tokens.max() < VOCAB_SIZE - 1
    assert tokens.tolist() == fixed_sequence(config(), prompts(*lengths), VOCAB_SIZE).tolist()


@pytest.mark.parametrize(
    ("rollout", "tolerance"),
    [
        ({}, 0.001),
        ({"dtype": "bf16"}, 0.15),
        ({"dtype": "fp32", "model": "bf16"}, 0.15),
        ({"dtype": "fp8", "model": "bf16"}, 0.5),
        ({"dtype": "bf16", "model": "bf16", "scaling": "blockwise"}, 0.5),
        ({"engine_tolerance": 0.02}, 0.02),
    ],
)
def test_the_tolerance_follows_from_the_precisions_unless_it_is_given(rollout, tolerance):
    assert config(**rollout).engine_tolerance == tolerance


def test_a_difference_with_what_is_no_number_is_within_no_tolerance():
    expected = np.array([-1.0, -2.0], np.float32)
    assert mean_difference(np.array([-1.5, -2.0], np.float32), expected) == 0.25
    assert not mean_difference(np.array([np.nan, -2.0], np.float32), expected) <= 1e9
    assert not torch.isfinite(torch.tensor(mean_difference(np.array([-np.inf, -2.0], np.float32), expected)))
