"""Trainer and engine agree after each sync; a deliberately corrupted weight is noticed (property 7)."""

import logging

import pytest
import torch

from dapo_mega import trainer
from dapo_mega.config import RunConfig, load_config
from dapo_mega.pipeline import build_pipeline
from dapo_mega.policy.processes import stop_processes
from dapo_mega.run import close

from .runs import prepare

pytestmark = pytest.mark.integration


@pytest.fixture
def pipeline(tmp_path, request):
    overrides = getattr(request, "param", [])
    config = load_config(RunConfig, prepare(tmp_path), ["optimizer.learning_rate=1e-2", *overrides])
    built = build_pipeline(config, 0)
    yield built
    close(built)
    stop_processes()


def one_step(pipeline):
    groups, _ = trainer.collect(pipeline)
    mini_batches, metrics = trainer.attach_old_logprobs(pipeline, trainer.hand_over(pipeline, groups))
    trainer.update(pipeline, mini_batches)
    pipeline.step += 1
    pipeline.weight_sync.push(pipeline.policy, pipeline.step)
    return metrics


def test_agreement_after_every_sync_and_a_warning_for_a_corrupted_weight(pipeline, caplog):
    pipeline.weight_sync.push(pipeline.policy, 0)
    with caplog.at_level(logging.WARNING, logger="dapo_mega"):
        for _ in range(3):
            metrics = one_step(pipeline)
            assert metrics["rollout/logprob_abs_diff_mean"] < 1e-5
            assert metrics["rollout/logprob_abs_diff_max"] < 1e-4
        assert not [r for r in caplog.records if "disagree" in r.message]
        # One element of one matrix on the engine's side only, as a broken transfer would leave it.
        weight = pipeline.fleet._engine._model.model.layers[0].mlp.down_proj.weight
        with torch.no_grad():
            weight[3, 5] += 20.0
        pipeline.driver.collector.buffer.groups.clear()
        metrics = one_step(pipeline)
    assert metrics["rollout/logprob_abs_diff_mean"] > pipeline.config.mismatch_warning
    assert [r for r in caplog.records if "engine and trainer disagree" in r.message]
    # The next sync heals it.
    pipeline.driver.collector.buffer.groups.clear()
    assert one_step(pipeline)["rollout/logprob_abs_diff_max"] < 1e-4


@pytest.mark.parametrize("pipeline", [["batch.epochs=2"]], indirect=True)
def test_mu_passes_update_once_per_mini_batch_and_leave_the_old_policy_behind(pipeline):
    pipeline.weight_sync.push(pipeline.policy, 0)
    groups, _ = trainer.collect(pipeline)
    mini_batches, _ = trainer.attach_old_logprobs(pipeline, trainer.hand_over(pipeline, groups))
    metrics = trainer.update(pipeline, mini_batches)
    # mu = 2 passes over 6 groups in mini-batches of 3.
    assert pipeline.policy.scheduler.num_steps == 4
    # Only the very first update sees pi_theta = pi_old.
    assert metrics["policy/kl_to_old"] > 1e-7
