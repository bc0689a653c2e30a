"""A policy in FP8 and a real SGLang engine in bf16: the engine computes with the policy's weights of the last step."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.conftest import one_engine
from tests.integration.fleet_runs import engine_logprobs, fleet_values, train_to_the_end, training_run_of
from tests.integration.sglang_servers import API_KEY

STEPS = 3
TOKENS = [5 + 7 * i % 90 for i in range(64)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One engine in bf16 of a model whose sizes FP8 products take."""
    with one_engine(
        tmp_path_factory.mktemp("engine"), "--dtype", "bf16", hidden_size=128, intermediate_size=256
    ) as engine:
        yield engine


@pytest.mark.parametrize(("scaling", "params"), [("none", False), ("delayed", False), ("blockwise", True)])
def test_engines_get_the_weights_of_an_fp8_policy(tmp_path, monkeypatch, engine, scaling, params):
    monkeypatch.setenv("DAPO_MEGA_API_KEY", API_KEY)
    values = fleet_values(
        tmp_path,
        engine,
        num_steps=STEPS,
        model={"dtype": "bf16"},
        compute={"fp8": {"scaling": scaling, "params": params, "amax_history": 16} if scaling != "none" else {}},
        # FP8's three bits of mantissa against bf16's eight: 0.2 nats on this model of large random weights.
        rollout={"dtype": "bf16", "max_response_tokens": 32, "fleet": {"min_engines": 1}, "engine_tolerance": 0.5},
        batch={"tokens_per_microbatch": 512},
    )
    with training_run_of(values) as training_run:
        train_to_the_end(training_run)
        weights = {name: t.clone() for b in training_run.policy.stage_weights(1 << 30) for name, t in b}
    # The run's own check allows what FP8 rounds off. This one does not: the same bf16 weights, without FP8.
    peer = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.bfloat16)
    before = logprobs(peer)
    peer.load_state_dict(weights)
    after = logprobs(peer)
    served = torch.tensor([logprob for logprob, _, _ in engine_logprobs(engine.launcher.urls[0], TOKENS)[1:]])
    to_before, to_after = ((served - peers).abs().mean() for peers in (before, after))
    assert to_after < 0.06
    assert to_before > 4 * to_after


def logprobs(model):
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        scores = model(tokens).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(-1, tokens[0, 1:, None])[:, 0]
