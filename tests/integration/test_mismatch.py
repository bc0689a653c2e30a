"""Trainer and engine agree after each sync; a deliberately corrupted weight is noticed, a large error ends the run."""

import logging

import pytest
import torch

from dapo_mega.batching.samples import samples_of_groups
from dapo_mega.cli import EXIT_FLEET
from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import FleetError, StarvedError
from dapo_mega.megatron.processes import stop_processes
from dapo_mega.metrics import read_metrics
from dapo_mega.training import loop as trainer
from dapo_mega.training.build import build_run
from dapo_mega.training.run import close
from tests.distributed.launching import wait_for

from .runs import finish, prepare, start

pytestmark = pytest.mark.integration


@pytest.fixture
def training_run(tmp_path, request):
    overrides = getattr(request, "param", [])
    config = load_config(RunConfig, prepare(tmp_path), ["optimizer.learning_rate=1e-2", *overrides])
    built = build_run(config, 0)
    yield built
    close(built)
    stop_processes()


def one_step(training_run):
    groups, _ = trainer.collect(training_run)
    training_run.trainer.take(samples_of_groups(groups, training_run.config, training_run.step))
    measured, _ = trainer.score_groups(training_run.trainer, training_run.config, groups, training_run.step)
    metrics = trainer.check_mismatch(training_run, measured)
    trainer.update(training_run, training_run.entropy.current())
    training_run.step += 1
    training_run.weight_sync.push(training_run.step)
    return metrics


def test_agreement_after_every_sync_and_a_warning_for_a_wrong_weight(capsys, training_run, caplog):
    training_run.weight_sync.push(0)
    with caplog.at_level(logging.WARNING, logger="dapo_mega"):
        for _ in range(3):
            metrics = one_step(training_run)
            assert metrics["rollout/logprob_abs_diff_mean"] < 1e-5
            assert metrics["rollout/logprob_abs_diff_max"] < 1e-4
            assert metrics["mismatch/effective_sample_share"] > 0.5
        assert not [r for r in caplog.records if "disagree" in r.message]
        # One element of one matrix on the engine's side only, as a broken transfer would leave it.
        weight = training_run.trainer.engine._model.model.layers[0].mlp.down_proj.weight
        with torch.no_grad():
            weight[3, 5] += 20.0
        training_run.collector.buffer.groups.clear()
        metrics = one_step(training_run)
    assert metrics["rollout/logprob_abs_diff_mean"] > training_run.config.mismatch_warning
    (warning,) = (r.message for r in caplog.records if "engine and trainer disagree" in r.message)
    assert not warning.startswith("WARNING")
    assert "disagree" not in capsys.readouterr().out
    # The next sync heals it.
    training_run.collector.buffer.groups.clear()
    assert one_step(training_run)["rollout/logprob_abs_diff_max"] < 1e-4


@pytest.mark.parametrize("training_run", [["batch.epochs=2"]], indirect=True)
def test_mu_passes_update_once_per_mini_batch_and_move_off_the_old_policy(training_run):
    training_run.weight_sync.push(0)
    groups, _ = trainer.collect(training_run)
    training_run.trainer.take(samples_of_groups(groups, training_run.config, training_run.step))
    trainer.score_groups(training_run.trainer, training_run.config, groups, training_run.step)
    metrics = trainer.update(training_run, training_run.entropy.current()).metrics
    # mu = 2 passes over 6 groups in mini-batches of 3.
    assert training_run.trainer.policy.scheduler.num_steps == 4
    # Only the very first update sees pi_theta = pi_old.
    assert metrics["policy/kl_to_old"] > 1e-7


def break_engine(training_run):
    with torch.no_grad():
        training_run.trainer.engine._model.model.norm.weight *= 100


def weights(training_run):
    return {name: tensor.clone() for bucket in training_run.trainer.policy.weights(1 << 20) for name, tensor in bucket}


def test_a_large_mismatch_ends_the_run_before_the_update(training_run):
    training_run.weight_sync.push(0)
    break_engine(training_run)
    before = weights(training_run)
    with pytest.raises(FleetError, match=r"at step 1 .*is not within rollout.mismatch_stop=0\.5"):
        one_step(training_run)
    after = weights(training_run)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    "training_run", [["reward.source=verifier", "algorithm.max_generation_rounds=1"]], indirect=True
)
def test_wrong_engines_are_blamed_for_wrong_answers_before_prompts(training_run):
    training_run.weight_sync.push(0)
    with pytest.raises(StarvedError, match="prompts of another difficulty"):
        trainer.collect(training_run)
    break_engine(training_run)
    with pytest.raises(FleetError, match="the engines' log-probs are not the trainer's") as caught:
        trainer.collect(training_run)
    assert "difficulty" not in str(caught.value)


@pytest.mark.parametrize("training_run", [["batch.mini_batch_groups=6"]], indirect=True)
def test_a_large_mismatch_of_a_single_update_leaves_no_checkpoint(training_run):
    training_run.weight_sync.push(0)
    break_engine(training_run)
    with pytest.raises(FleetError, match=r"at step 1 .*is not within rollout.mismatch_stop=0\.5"):
        one_step(training_run)
    assert training_run.step == 0


def test_a_run_that_a_mismatch_ended_continues_from_its_checkpoint(tmp_path):
    config, output = prepare(tmp_path), tmp_path / "run"
    short = ["num_steps=2", "checkpoint.every=1", "evaluation.every=0", "evaluation.at_start=false"]
    finish(start(config, 2, output, *short, "checkpoint.save_hf_at_end=false"), output)
    # Float rounding is over this limit.
    more = [*short, "num_steps=4"]
    workers = start(config, 2, output, *more, "rollout.mismatch_stop=1e-12")
    assert wait_for(workers, 240, patience_s=60) == [EXIT_FLEET] * 2
    log = (tmp_path / "run_logs" / "rank_0.log").read_text()
    (line,) = (line for line in log.splitlines() if line.startswith("error: "))
    assert "nats at step 3 (rollout/logprob_abs_diff_mean) is not within rollout.mismatch_stop=1e-12" in line
    assert "Traceback" not in log
    assert sorted(path.name for path in (output / "checkpoints").iterdir())[-1] == "step_00000002"
    finish(start(config, 2, output, *more), output)
    assert [record["step"] for record in read_metrics(output / "metrics.jsonl")] == [1, 2, 3, 4]
