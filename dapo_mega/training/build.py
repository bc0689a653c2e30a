"""Builds the parts of a run from its configuration."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_mega.algorithms.entropy_control import EntropyControl
from dapo_mega.algorithms.orders import OrderedPrompts, OwnOrder
from dapo_mega.algorithms.own import try_own_code
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
from dapo_mega.data.tokenizer import decoder, num_ids, refuse_other_tokens, stop_tokens
from dapo_mega.engines.embedded.fleet import EmbeddedFleet
from dapo_mega.engines.protocol import RolloutFleet
from dapo_mega.environments.base import Environment
from dapo_mega.environments.build import make_environment, try_environment
from dapo_mega.environments.turns import task_of
from dapo_mega.errors import InputError
from dapo_mega.evaluation.evaluator import Evaluator
from dapo_mega.megatron.compute_checks import check_compute
from dapo_mega.megatron.processes import start_processes
from dapo_mega.metrics import Histogram, MetricsWriter, ProgressDisplay, StageTimers
from dapo_mega.metrics.timeline import Activity
from dapo_mega.metrics.timeline.file import TimelineWriter
from dapo_mega.models import Architecture, load_architecture
from dapo_mega.models.peft_adapters import check_lora, peft_config, trained_names
from dapo_mega.models.stored_model import critic_architecture
from dapo_mega.preparation.card import CardReference
from dapo_mega.rewards import ComposedReward
from dapo_mega.rewards.build import make_reward, needed_correctness
from dapo_mega.rewards.trial import try_reward
from dapo_mega.rollout.collector import Collector
from dapo_mega.rollout.group_state import dataset_fingerprint
from dapo_mega.rollout.scoring import ResponseScorer, trial_record
from dapo_mega.samples.recorder import SampleRecorder
from dapo_mega.training.evaluation_beside import BesideTraining
from dapo_mega.training.run_records import dataset_cards
from dapo_mega.training.trainer import Trainer
from dapo_mega.types import Group, Prompt
from dapo_mega.weight_sync.update import EmbeddedWeightSync, WeightSync

if TYPE_CHECKING:
    from dapo_mega.engines.sglang.teachers import TeacherServers

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


@dataclass(frozen=True)
class Learnt:
    """What a step was trained on."""

    step: int
    groups: Sequence[Group]
    entropy_coefficient: float


@dataclass
class TrainingRun:
    """A run as the process sees it that commands, which is rank 0: the trainer, the engines, data, rewards, and what is
    recorded.

    `unrecorded` holds the last step's metrics until they are recorded, and `histograms` its histograms. `is_intact`:
    weights and state are those after `step` and can be saved. `check_stop()` raises StopRequested when the run is to
    end before its last step. `timers` and others note in `activity` what this process does. `writer`, `recorder` and
    `timeline` are opened when training begins, because opening them removes an earlier run's records of the steps to
    come. `interrupted` is the step of the evaluation that was under way when the loaded checkpoint was written. `meet`
    waits for another trainer, where one that dies does not end this process; `learnt` has the steps that the trainer
    has not saved then.
    """

    config: RunConfig
    trainer: Trainer
    fleet: RolloutFleet
    weight_sync: WeightSync
    environment: Environment
    collector: Collector
    evaluator: Evaluator | None
    beside: BesideTraining | None
    rewards: RunRewards
    progress: ProgressDisplay
    dataset_fingerprint: str
    tokenizer: Any
    check_stop: Callable[[], None]
    entropy: EntropyControl
    activity: Activity
    teachers: TeacherServers | None = None
    preview: str = ""
    step: int = 0
    is_intact: bool = False
    unrecorded: dict[str, float] | None = None
    interrupted: int | None = None
    histograms: dict[str, Histogram] = field(default_factory=dict)
    writer: MetricsWriter | None = None
    recorder: SampleRecorder | None = None
    timeline: TimelineWriter | None = None
    meet: Callable[[], None] | None = None
    learnt: list[Learnt] = field(default_factory=list)
    timers: StageTimers = field(init=False)

    def __post_init__(self) -> None:
        self.timers = StageTimers(self.activity)


def read_inputs(config: RunConfig) -> RunInputs:
    """Read the run's inputs, on every rank. Raises InputError before any rank waits for another."""
    cards = dataset_cards(config) if is_rank_zero() else {}
    tokenizer = load_tokenizer(config.model.path)
    environment, render = make_environment(config, tokenizer)
    environment.close()
    train_prompts = load_training_prompts(config.data, tokenizer, render)
    evaluation_prompts = None
    if config.data.evaluation:
        evaluation_prompts = load_evaluation_prompts(config.data, tokenizer, render)
    family, arch = load_architecture(Path(config.model.path))
    if config.lora:
        check_lora(config.lora, family, arch)
    if config.critic_lora and config.uses_critic:
        check_lora(config.critic_lora, *critic_architecture(Path(config.critic_model.path)))
    check_routing(config, arch)
    check_compute(arch, config.model, config.compute)
    try_own_code(config.own_code.values(), config.batch.group_size)
    if isinstance(order := config.data.sampling.order, OwnOrder):
        order.of_epoch(OrderedPrompts(train_prompts.prompts, config.seed), 0)
    try_environment(config, task_of(train_prompts.prompts[0]))
    check_teachers(config, tokenizer, train_prompts.prompts)
    preview = preview_run(config, tokenizer, render=render) if is_rank_zero() else ""
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
    trainer: Trainer | None = None,
    inputs: RunInputs | None = None,
    rewards: RunRewards | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> TrainingRun:
    """Load the models and build the run, on rank 0. `start_step` is the last completed step.

    Without a `trainer` it makes one, in this process alone; inputs and rewards are made, too, unless they are given.
    `check_stop` raises StopRequested when the run is to stop.
    """
    inputs = inputs or read_inputs(config)
    teachers = None
    if config.distillation and any(teacher.urls for teacher in config.distillation.listed):
        from dapo_mega.engines.sglang.teachers import TeacherServers

        teachers = TeacherServers(config.distillation, inputs.tokenizer)
    trainer = trainer or Trainer(config, start_processes(config.parallel, config.seed), check_stop=check_stop)
    trainer.build()
    activity = Activity()
    fleet, weight_sync = _engines(config, trainer, inputs, check_stop)
    rewards = rewards or make_rewards(config)
    rewards.training.begin_step()
    decode, stop_token_ids = decoder(inputs.tokenizer), stop_tokens(Path(config.model.path), inputs.tokenizer)
    scorer = ResponseScorer(
        config.reward, rewards.training, decode, config.batch.groups_per_step * config.batch.group_size
    )
    environment, _ = make_environment(config, inputs.tokenizer)
    num_tokens = num_ids(inputs.tokenizer)
    prompts = inputs.train_prompts.prompts
    evaluator = beside = None
    if inputs.evaluation_prompts:
        evaluator = Evaluator(
            config,
            inputs.evaluation_prompts.prompts,
            rewards.evaluation,
            decode,
            stop_token_ids,
            environment.apart(),
            num_tokens,
        )
        if config.evaluation.beside_training:
            beside = BesideTraining(evaluator, config.evaluation, check_stop, activity)
    _log_datasets(inputs)
    run = TrainingRun(
        config=config,
        trainer=trainer,
        fleet=fleet,
        weight_sync=weight_sync,
        environment=environment,
        collector=Collector(config, prompts, fleet, scorer, stop_token_ids, activity, environment, num_tokens),
        evaluator=evaluator,
        beside=beside,
        rewards=rewards,
        progress=ProgressDisplay(config.num_steps, start_step),
        dataset_fingerprint=dataset_fingerprint(prompts),
        tokenizer=inputs.tokenizer,
        check_stop=check_stop,
        entropy=entropy_control(config),
        activity=activity,
        teachers=teachers,
        preview=inputs.preview,
    )
    fleet.update_outdated = lambda: weight_sync.push_to_outdated(run.step)
    return run


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
    """Raise InputError for a trained router bias that checkpoints, and so the engines, do not have, and for routes that
    are to be replayed where they cannot be."""
    if config.rollout.routing_replay:
        reason = ""
        if arch.experts is None:
            reason = "has no experts"
        elif arch.experts.groups and arch.experts.groups.ranked_by == "best":
            reason = "limits softmax routing to groups of experts, for which replay is not supported yet"
        if reason:
            raise InputError(f"rollout.routing_replay=true: {arch.model_type} {reason}; leave it out")
    has_bias = arch.experts is not None and arch.experts.has_router_bias
    if config.compute.moe.router_bias_update_rate > 0 and not has_bias:
        raise InputError(
            f"compute.moe.router_bias_update_rate > 0 trains a routing bias that {arch.model_type} does not store in "
            f"its Hugging Face checkpoint, so the engines would route otherwise than the trainer; use "
            f"compute.moe.aux_loss_coefficient"
        )


def check_teachers(config: RunConfig, tokenizer: Any, prompts: Sequence[Prompt]) -> None:
    """Raise InputError for a teacher in a folder that has other tokens than the policy, for more of a teacher's tokens
    than there are, and for prompts that nothing teaches."""
    distillation = config.distillation
    if distillation is None:
        return
    for name, teacher in distillation.teachers.items():
        if teacher.path:
            refuse_other_tokens(tokenizer, teacher.path, f"distillation.teachers.{name}.path")
    models = {
        "model": config.model.path,
        **{f"distillation.teachers.{n}": t.path for n, t in distillation.teachers.items()},
    }
    for key, path in models.items():
        size = load_architecture(Path(path))[1].vocab_size if path else distillation.top_k
        if distillation.top_k > size:
            raise InputError(
                f"distillation.top_k={distillation.top_k} is more than the {size} tokens of {key}.path; lower it"
            )
    untaught = {prompt.data_source for prompt in prompts if distillation.number_of(prompt.data_source) < 0}
    if untaught and not distillation.reward_weight:
        raise InputError(
            f"distillation.teachers names none for data_source={min(untaught)!r}, and distillation.reward_weight=0 "
            f"leaves its prompts nothing to learn from; add that teacher, or one called default"
        )


def _log_datasets(inputs: RunInputs) -> None:
    datasets = {f"training prompts {name}".strip(): read for name, read in inputs.train_prompts.datasets.items()}
    for name, dataset in {**datasets, "evaluation prompts": inputs.evaluation_prompts}.items():
        if dataset:
            left_out = {"duplicates": dataset.num_duplicates, "over data.max_prompt_tokens": dataset.num_long}
            reasons = " and ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
            dropped = f", {reasons} dropped" if reasons else ""
            logger.info("%s: %d of %d rows%s", name, len(dataset.prompts), dataset.num_rows, dropped)


def _engines(
    config: RunConfig, trainer: Trainer, inputs: RunInputs, check_stop: Callable[[], None]
) -> tuple[RolloutFleet, WeightSync]:
    """Start the run's engines or connect to them. `check_stop` raises StopRequested when the run is to stop.

    Raises InputError for a missing API key or if it cannot listen on the rendezvous address.
    """
    if config.rollout.placement == "embedded":
        return EmbeddedFleet(trainer, check_stop), EmbeddedWeightSync(trainer.load_engines)
    from dapo_mega.config.fleet import require_api_key
    from dapo_mega.engines.sglang.fleet_client import FleetClient
    from dapo_mega.engines.sglang.versions import run_name
    from dapo_mega.weight_sync.agreement import Agreement, fixed_sequence
    from dapo_mega.weight_sync.fleet_sync import FleetWeightSync
    from dapo_mega.weight_sync.transports import make_transport

    run, (family, arch) = run_name(config.output_dir), load_architecture(Path(config.model.path))
    key = require_api_key(config.rollout.fleet.api_key_env)
    client = FleetClient(config, arch.vocab_size, key, run, arch, check_stop)
    tokens = fixed_sequence(config, inputs.train_prompts.prompts, arch.vocab_size)
    agreement = Agreement(tokens, config.engine_tolerance)
    adapter = None
    if config.lora and config.sends_adapters:
        adapter = peft_config(config.lora, trained_names(family, arch, config.lora.targets))

    return client, FleetWeightSync(
        trainer,
        client,
        config.weight_sync,
        lambda: make_transport(config, trainer, trainer.open_sender()),
        run,
        agreement,
        adapter,
        lends_memory=config.rollout.offload_trainer,
    )
