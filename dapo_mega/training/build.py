"""Builds the parts of a run from its configuration."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dapo_mega.algorithms.entropy_control import EntropyControl
from dapo_mega.algorithms.orders import OrderedPrompts, OwnOrder
from dapo_mega.algorithms.own import try_own_code
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.checkpoints.store import CheckpointStore
from dapo_mega.cli import is_rank_zero
from dapo_mega.config import RunConfig
from dapo_mega.data import (
    PromptDataset,
    TrainingPrompts,
    load_evaluation_prompts,
    load_tokenizer,
    load_training_prompts,
)
from dapo_mega.data.preview import preview_run
from dapo_mega.data.tokenizer import decoder, stop_tokens
from dapo_mega.distributed.errors import raise_on_all_ranks
from dapo_mega.distributed.processes import Processes
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.engines.embedded.fleet import EmbeddedFleet
from dapo_mega.engines.protocol import RolloutFleet
from dapo_mega.environments.turns import make_environment
from dapo_mega.errors import InputError, StopRequested
from dapo_mega.evaluation.evaluator import Evaluator, make_evaluator
from dapo_mega.megatron.layer_specs import check_compute
from dapo_mega.megatron.megatron_policy import MegatronPolicy, ScoringModel
from dapo_mega.megatron.processes import start_processes
from dapo_mega.megatron.value_model import ValueModel
from dapo_mega.metrics import Histogram, MetricsWriter, ProgressDisplay, StageTimers
from dapo_mega.metrics.timeline import Activity
from dapo_mega.metrics.timeline.file import TimelineWriter
from dapo_mega.models import Architecture, load_architecture
from dapo_mega.preparation.card import CardReference
from dapo_mega.rewards import ComposedReward
from dapo_mega.rewards.build import make_reward, needed_correctness
from dapo_mega.rewards.trial import try_reward
from dapo_mega.rollout.collector import Collector
from dapo_mega.rollout.group_state import dataset_fingerprint
from dapo_mega.rollout.scoring import ResponseScorer, trial_record
from dapo_mega.samples.recorder import SampleRecorder
from dapo_mega.training.evaluation_beside import BesideTraining
from dapo_mega.training.histograms import StepCounts
from dapo_mega.training.run_records import dataset_cards
from dapo_mega.types import Prompt
from dapo_mega.weight_sync.push import EmbeddedWeightSync, WeightSync

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInputs:
    """The tokenizer and the datasets of a run; on rank 0 also their cards, and a text that shows prompts of them."""

    tokenizer: Any
    train_prompts: TrainingPrompts
    evaluation_prompts: PromptDataset | None
    cards: Mapping[str, CardReference]
    preview: str


@dataclass(frozen=True)
class RunRewards:
    """The rewards of training and of held-out evaluations, which are one if nothing tells them apart and they never
    score at the same time."""

    training: ComposedReward
    evaluation: ComposedReward

    def close(self) -> None:
        self.training.close()
        if self.evaluation is not self.training:
            self.evaluation.close()


@dataclass
class Controller:
    """The parts that only rank 0 has: data, rewards, metrics, samples and progress display. `writer`, `recorder`
    and `timeline` are opened when training begins, because opening them removes an earlier run's records of the steps
    to come. `interrupted` is the step of the evaluation that was under way when the loaded checkpoint was written."""

    collector: Collector
    evaluator: Evaluator | None
    beside: BesideTraining | None
    rewards: RunRewards
    progress: ProgressDisplay
    dataset_fingerprint: str
    tokenizer: Any
    preview: str = ""
    writer: MetricsWriter | None = None
    recorder: SampleRecorder | None = None
    timeline: TimelineWriter | None = None
    interrupted: int | None = None


@dataclass
class TrainingRun:
    """All parts of a run. `controller` is None except on rank 0. `unrecorded` holds the last step's metrics until they
    are recorded, and `histograms` its histograms; `counts` is what the step under way counts for these, if it has any.
    `is_intact`: weights and state are those after `step` and can be saved, and all ranks raise what is raised now.
    `stop_requested()` tells whether the run shall end before its last step. `timers` and others note in `activity` what
    this process does."""

    config: RunConfig
    policy: MegatronPolicy
    reference: ScoringModel | None
    critic: ValueModel | None
    fleet: RolloutFleet
    weight_sync: WeightSync
    store: CheckpointStore
    controller: Controller | None
    stop_requested: Callable[[], bool]
    entropy: EntropyControl
    step: int = 0
    is_intact: bool = False
    unrecorded: dict[str, float] | None = None
    histograms: dict[str, Histogram] = field(default_factory=dict)
    counts: StepCounts | None = None
    activity: Activity = field(default_factory=Activity)
    timers: StageTimers = field(init=False)

    def __post_init__(self) -> None:
        self.timers = StageTimers(self.activity)


def read_inputs(config: RunConfig) -> RunInputs:
    """Read the run's inputs, on every rank. Raises InputError before any rank waits for another."""
    cards = dataset_cards(config) if is_rank_zero() else {}
    tokenizer = load_tokenizer(config.model.path)
    train_prompts = load_training_prompts(config.data, tokenizer)
    evaluation_prompts = None
    if config.data.evaluation:
        evaluation_prompts = load_evaluation_prompts(config.data, tokenizer)
    arch = load_architecture(Path(config.model.path))[1]
    check_routing(config, arch)
    check_compute(arch, config.model, config.compute)
    try_own_code(config.own_code.values(), config.batch.group_size)
    if isinstance(order := config.data.sampling.order, OwnOrder):
        order.of_epoch(OrderedPrompts(train_prompts.prompts, config.seed), 0)
    preview = preview_run(config, tokenizer) if is_rank_zero() else ""
    return RunInputs(tokenizer, train_prompts, evaluation_prompts, cards, preview)


def make_rewards(config: RunConfig) -> RunRewards:
    """The run's rewards, not yet tried. Their processes start when they are needed."""
    training = make_reward(config)
    takes_turns = not config.evaluation.beside_training and config.rollout.schedule == "synchronous"
    is_same = config.reward.for_evaluation() == config.reward and takes_turns
    return RunRewards(training, training if is_same else make_reward(config, for_evaluation=True))


def try_rewards(config: RunConfig, rewards: RunRewards, prompt: Prompt) -> None:
    """Score a made-up response to this prompt and log what came out, unless the reward is the rule.

    Raises InputError for a reward that cannot be used.
    """
    if not config.reward.is_own:
        return
    for line in try_reward(rewards.training, trial_record(prompt), needs_correctness=needed_correctness(config)):
        logger.info("reward of a made-up response to the first prompt: %s", line)


def build_run(
    config: RunConfig,
    start_step: int = 0,
    *,
    inputs: RunInputs | None = None,
    processes: Processes | None = None,
    rewards: RunRewards | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> TrainingRun:
    """Load the model and build the run. `start_step` is the last completed step.

    Reads the inputs unless they are given, and starts the process groups unless `processes` is given. `rewards` are for
    rank 0, and made unless they are given.
    """
    inputs = inputs or read_inputs(config)
    processes = processes or start_processes(config.parallel, config.seed)
    if config.threads_per_process:
        torch.set_num_threads(config.threads_per_process)
    policy, reference, critic = build_models(config, processes)

    def check_stop() -> None:
        if stop_requested():
            raise StopRequested("the run was asked to stop")

    rollouts = start_rollouts(config, policy, inputs.train_prompts.prompts, check_stop)
    activity = Activity()
    controller = None
    with raise_on_all_ranks(processes.control):
        if processes.rank == 0:
            rewards = rewards or make_rewards(config)
            controller = _controller(config, rollouts, inputs, rewards, start_step, check_stop, activity)
    run = TrainingRun(
        config=config,
        policy=policy,
        reference=reference,
        critic=critic,
        fleet=rollouts.fleet,
        weight_sync=rollouts.weight_sync,
        store=CheckpointStore.of_run(config.output_dir, config.checkpoint),
        controller=controller,
        stop_requested=stop_requested,
        entropy=entropy_control(config),
        activity=activity,
    )

    def update_outdated_engines() -> None:
        with activity.span("weights", f"version {run.step}, to engines that joined"):
            rollouts.weight_sync.push_to_outdated(policy, run.step)

    rollouts.fleet.on_outdated_engines(update_outdated_engines)
    return run


def build_models(
    config: RunConfig, processes: Processes
) -> tuple[MegatronPolicy, ScoringModel | None, ValueModel | None]:
    """The policy, the reference of a KL penalty and the critic of PPO, as the run begins with them."""
    policy = MegatronPolicy(
        config.model,
        config.parallel,
        config.optimizer,
        processes,
        temperature=config.rollout.temperature,
        updates_per_step=config.batch.updates_per_step,
        num_steps=config.num_steps,
        compute=config.compute,
    )
    reference = None
    if config.algorithm.uses_reference:
        reference = ScoringModel(config.model, config.parallel, processes, config.rollout.temperature, config.compute)

    critic = None
    if config.uses_critic:
        critic = ValueModel(
            config.critic_model,
            config.parallel,
            config.critic_optimizer,
            processes,
            updates_per_step=config.batch.updates_per_step,
            num_steps=config.num_steps,
            compute=config.compute,
        )
    return policy, reference, critic


def entropy_control(config: RunConfig) -> EntropyControl:
    """The entropy bonus of a run that begins."""
    algorithm = config.algorithm
    return EntropyControl(
        algorithm.entropy_coefficient,
        algorithm.entropy_target,
        algorithm.entropy_step,
        maximum=math.inf if algorithm.entropy_max is None else algorithm.entropy_max,
    )


def check_routing(config: RunConfig, arch: Architecture) -> None:
    """Raise InputError for a trained router bias that checkpoints, and so the engines, do not have."""
    has_bias = arch.experts is not None and arch.experts.has_router_bias
    if config.compute.moe.router_bias_update_rate > 0 and not has_bias:
        raise InputError(
            f"compute.moe.router_bias_update_rate > 0 trains a routing bias that {arch.model_type} does not store in "
            f"its Hugging Face checkpoint, so the engines would route otherwise than the trainer; use "
            f"compute.moe.aux_loss_coefficient"
        )


def _controller(
    config: RunConfig,
    rollouts: Rollouts,
    inputs: RunInputs,
    rewards: RunRewards,
    start_step: int,
    check_stop: Callable[[], None],
    activity: Activity,
) -> Controller:
    tokenizer, train_prompts, evaluation_prompts = inputs.tokenizer, inputs.train_prompts, inputs.evaluation_prompts
    decode = decoder(tokenizer)
    stop_token_ids = stop_tokens(Path(config.model.path), tokenizer)
    responses_per_step = config.batch.groups_per_step * config.batch.group_size
    rewards.training.begin_step()
    scorer = ResponseScorer(config.reward, rewards.training, decode, responses_per_step)
    environment = make_environment(config, tokenizer)
    evaluator = beside = None
    if evaluation_prompts:
        evaluator = make_evaluator(
            config, evaluation_prompts.prompts, rewards.evaluation, decode, stop_token_ids, environment
        )
        if config.evaluation.beside_training:
            beside = BesideTraining(evaluator, config.evaluation, check_stop, activity)
    datasets = {f"training prompts {name}".strip(): read for name, read in train_prompts.datasets.items()}
    for name, dataset in {**datasets, "evaluation prompts": evaluation_prompts}.items():
        if dataset:
            left_out = {"duplicates": dataset.num_duplicates, "over data.max_prompt_tokens": dataset.num_long}
            reasons = " and ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
            dropped = f", {reasons} dropped" if reasons else ""
            logger.info("%s: %d of %d rows%s", name, len(dataset.prompts), dataset.num_rows, dropped)
    collector = Collector(config, train_prompts.prompts, rollouts.fleet, scorer, stop_token_ids, activity, environment)
    return Controller(
        collector=collector,
        evaluator=evaluator,
        beside=beside,
        rewards=rewards,
        progress=ProgressDisplay(config.num_steps, start_step),
        dataset_fingerprint=dataset_fingerprint(train_prompts.prompts),
        tokenizer=tokenizer,
        preview=inputs.preview,
    )


@dataclass(frozen=True)
class Rollouts:
    """The engines of a run and their weight sync."""

    fleet: RolloutFleet
    weight_sync: WeightSync


def start_rollouts(
    config: RunConfig, policy: MegatronPolicy, prompts: Sequence[Prompt], check_stop: Callable[[], None]
) -> Rollouts:
    """Start the run's engines or connect to them, on every rank. `prompts` are the training prompts; `check_stop`
    raises StopRequested when the run is to stop.

    Raises InputError, on all ranks, for a missing API key or if it cannot listen on the rendezvous address.
    """
    if config.rollout.placement == "embedded":
        return _embedded(config, policy.processes, check_stop)
    return _fleet(config, policy, prompts, check_stop)


def _embedded(config: RunConfig, processes: Processes, check_stop: Callable[[], None]) -> Rollouts:
    engine = None
    if processes.is_leader:
        dtype = torch.bfloat16 if config.engine_dtype == "bf16" else torch.float32
        engine = EmbeddedEngine.from_config(
            config.model.path,
            dtype,
            max_batch_rows=config.rollout.max_batch_rows,
            device=processes.device,
            check_stop=check_stop,
        )
    fleet = EmbeddedFleet(processes, engine, check_stop)
    return Rollouts(fleet, EmbeddedWeightSync(fleet, config.weight_sync.bucket_mib))


def _fleet(
    config: RunConfig, policy: MegatronPolicy, prompts: Sequence[Prompt], check_stop: Callable[[], None]
) -> Rollouts:
    from dapo_mega.config.fleet import require_api_key
    from dapo_mega.engines.sglang.fleet import SglangFleet
    from dapo_mega.engines.sglang.fleet_client import FleetClient
    from dapo_mega.engines.sglang.versions import run_name
    from dapo_mega.weight_sync.agreement import PolicyAgreement
    from dapo_mega.weight_sync.fleet_sync import FleetWeightSync
    from dapo_mega.weight_sync.transports import make_transport

    processes = policy.processes
    client = None
    run = run_name(config.output_dir)
    with raise_on_all_ranks(processes.control):
        if processes.rank == 0:
            key = require_api_key(config.rollout.fleet.api_key_env)
            client = FleetClient(config, policy.arch.vocab_size, key, run, policy.arch, check_stop)
    fleet = SglangFleet(processes, client)
    transport = make_transport(config, processes, lambda folder: save_hf_checkpoint(policy, folder))
    weight_sync = FleetWeightSync(
        processes, client, config.weight_sync, transport, run, PolicyAgreement(policy, config, prompts)
    )
    return Rollouts(fleet, weight_sync)
