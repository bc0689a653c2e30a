"""Cost of every method's update, and of PPO's step with its critic, relative to DAPO's on the same responses.

python tools/benchmark.py methods

All sides run in this process, in turn, on one policy: `MegatronPolicy.update` with each preset's loss on the same
packed mini-batch, and a whole step after generation (scores, then two updates) with and without a critic of the
policy's size.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import benchmark_workload as workload
import torch
from benchmark_timing import Duration, measure, median_cpu, median_wall, take_turns
from benchmark_update import make_groups, mini_batches

from dapo_mega.algorithms.policy_losses import ClipCovLoss, KlCovLoss
from dapo_mega.batching.samples import samples_of_groups
from dapo_mega.cli import quiet_libraries, run_command
from dapo_mega.config import PRESETS, KlConfig, RunConfig
from dapo_mega.megatron.covariance import choose_tokens
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch
from dapo_mega.training.build import TrainingRun
from dapo_mega.training.loop import score_groups
from dapo_mega.training.trainer import Trainer


def run(options: argparse.Namespace) -> list[str]:
    """Measure and return the report's lines."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = workload.prepare_workload(folder, options)
        batch = workload.update_batch(options, num_updates=2)
        # The responses are made up, so their log-probs are of no policy.
        rollout = {"max_response_tokens": options.longest, "mismatch_stop": 1e9, "mismatch_warning": 1e9}
        config = workload.run_config(folder, model, options, batch=batch, rollout=rollout)
        with workload.built_run(_preset(config, "ppo")) as ppo:
            return _compare(ppo, config, options)


def _preset(config: RunConfig, preset: str) -> RunConfig:
    return RunConfig.model_validate({**config.model_dump(exclude={"algorithm"}), "algorithm": {"preset": preset}})


def _compare(ppo: TrainingRun, config: RunConfig, options: argparse.Namespace) -> list[str]:
    groups = make_groups(ppo, options)
    # Two trainers of one policy: only the configuration and the critic differ.
    policy = ppo.trainer.policy
    dapo = Trainer(config, ppo.trainer.processes)
    dapo.policy, dapo.facts = policy, ppo.trainer.facts
    [first, _] = mini_batches(policy, config, groups)
    scores = policy.score([batch.micro_batch for batch in first])
    mini_batch = [TokenBatch(batch.micro_batch, score.logprobs) for batch, score in zip(first, scores, strict=True)]

    def one_update(preset: str) -> Callable[[], Duration]:
        settings = _preset(config, preset).objective
        # KL adds a model, not a loss: its reference log-probs are computed before the update.
        settings = settings.model_copy(update={"kl": KlConfig()})
        batches = list(mini_batch)
        if isinstance(settings.policy_loss, ClipCovLoss | KlCovLoss):
            batches = choose_tokens(batches, settings.policy_loss, policy.processes, seed=0)
        return lambda: measure(lambda: policy.update(batches, PolicyGradient(settings)))

    def one_step(trainer: Trainer, config: RunConfig) -> Callable[[], Duration]:
        def step() -> None:
            trainer.take(samples_of_groups(groups, config, 0))
            score_groups(trainer, config, groups, 0)
            trainer.update(0.0)

        return lambda: measure(step)

    updates = take_turns(
        {preset: one_update(preset) for preset in PRESETS if preset != "ppo"}, options.rounds, options.limit_s
    )
    steps = take_turns(
        {"dapo": one_step(dapo, config), "ppo": one_step(ppo.trainer, ppo.config)}, options.rounds, options.limit_s
    )
    lines = [
        f"{options.responses} responses, {workload.num_parameters(Path(config.model.path)):,} parameters, "
        f"{options.dtype}, {options.threads} thread(s), medians of {len(updates['dapo'])} rounds in turn",
        "| one update | CPU s | wall s | CPU / dapo's |",
        "|---|---|---|---|",
    ]
    lines += _rows(updates)
    lines += ["", "| a step after generation | CPU s | wall s | CPU / dapo's |", "|---|---|---|---|", *_rows(steps)]
    return lines


def _rows(sides: dict[str, list[Duration]]) -> list[str]:
    base = median_cpu(sides["dapo"])
    return [
        f"| {name} | {median_cpu(times):.3f} | {median_wall(times):.3f} | {median_cpu(times) / base:.3f} |"
        for name, times in sides.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    options = workload.update_parser("methods", __doc__, responses=64).parse_args(argv)
    quiet_libraries()
    print("\n".join(run(options)))


if __name__ == "__main__":
    run_command(main)
