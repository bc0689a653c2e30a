"""Families that SGLang reads in ways of its own: engines have what was trained, and the policy's log-probs."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dapo_mega.batching import microbatch
from dapo_mega.batching.samples import flatten, single_turn
from tests.distributed.tiny import make_gpt_oss_model, make_olmo3_model

from .conftest import SharedEngines
from .fleet_runs import checked_records, fleet_values, train_to_the_end, training_run_of
from .sglang_servers import API_KEY, NUM_TOKENS, VOCAB_SIZE, call, serving_engines, tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SINKS = Path(__file__).parent / "engine_sinks"
SIZES = {"vocab_size": VOCAB_SIZE, "bos_token_id": 2, "eos_token_id": 1, "max_position_embeddings": 1024}
PROMPT, NUM_SAMPLED = [5, 6, 7, 8, 40, 41, 42], 24


@pytest.mark.parametrize(
    ("make", "options", "modules"),
    [
        pytest.param(partial(make_olmo3_model, **SIZES), (), None, id="olmo3", marks=pytest.mark.whole_table),
        # SGLang refuses gpt-oss with `torch_native`, takes `intel_amx`, and then uses `torch_native` where that is not.
        pytest.param(
            partial(make_gpt_oss_model, **SIZES), ("--", "--attention-backend", "intel_amx"), SINKS, id="gpt_oss"
        ),
    ],
)
def test_engines_have_what_was_trained(tmp_path, monkeypatch, make, options, modules):
    monkeypatch.setenv("DAPO_MEGA_API_KEY", API_KEY)
    model = make(tmp_path / "model")
    for file in tiny_model(tmp_path / "tokenizer").glob("*token*"):
        shutil.copyfile(file, model / file.name)
    with serving_engines(model, tmp_path / "served", 1, "--dtype", "fp32", *options, modules=modules) as launcher:
        (url,) = launcher.urls
        rollout = {"max_response_tokens": 48, "fleet": {"min_engines": 1}}
        values = fleet_values(
            tmp_path, SharedEngines(launcher, model, ""), rollout=rollout, optimizer={"learning_rate": 1e-2}
        )
        with training_run_of(values) as training_run:
            train_to_the_end(training_run)
            checked_records(tmp_path / "run", 3)
            sampling = {"temperature": 0, "max_new_tokens": NUM_SAMPLED, "ignore_eos": True}
            body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
            greedy = call(url, "/generate", body)[1]["meta_info"]["output_token_logprobs"]
            tokens = [token for _, token, *_ in greedy]
            sequence = np.array([*PROMPT, *tokens], np.int32)
            scores = scored(training_run, [single_turn(sequence[: len(PROMPT)], sequence[len(PROMPT) :])])
            # Engines draw what the tokenizer has; the likeliest row of the embedding may be one that pads it.
            last = scored(training_run, [single_turn(sequence[:-1], [token]) for token in range(NUM_TOKENS)])
    assert (scores - torch.tensor([logprob for logprob, *_ in greedy])).abs().max() < 1e-4
    assert last.max() - last[tokens[-1]] < 1e-4


def scored(training_run, samples):
    """Log-probs by the policy of what the samples answer, one after the other."""
    batch = microbatch.pack(flatten(samples), max_response_tokens=64)
    return training_run.trainer.policy.score([batch])[0].logprobs
