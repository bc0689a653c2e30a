"""The trainer: what all processes of a run do together. Each has one, with its shards of the models.

Rank 0 gives the commands, and the other ranks obey (`distributed/commands.py`). A step is `take`, `score`, `update`;
the batch, the scores and what the updates computed stay with the processes that hold them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.algorithms.advantages import GaeAdvantage
from dapo_mega.algorithms.policy_losses import ClipCovLoss, KlCovLoss
from dapo_mega.algorithms.ratios import kl_estimate, mean_over
from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.batching.plan import PackingStats
from dapo_mega.batching.samples import FlatSamples, flatten, single_turn
from dapo_mega.batching.step import PlannedSamples, plan_samples
from dapo_mega.config import DistillationConfig, RunConfig
from dapo_mega.distributed.commands import Own, command, gathered
from dapo_mega.distributed.links import Links
from dapo_mega.distributed.processes import Processes
from dapo_mega.engines.embedded.fleet import split
from dapo_mega.errors import StopRequested
from dapo_mega.megatron.covariance import choose_tokens
from dapo_mega.megatron.lent_memory import Held, LentMemory
from dapo_mega.megatron.megatron_model import MegatronModel
from dapo_mega.megatron.megatron_policy import MegatronPolicy, ScoringModel, WithoutAdapters
from dapo_mega.megatron.mismatch import measure_engines, measure_mismatch
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch, TokenScores, needs_whole_trajectories
from dapo_mega.megatron.token_advantages import (
    advantages_from_values,
    distilled,
    normalized,
    subtract_following_penalties,
    sums_of_trajectories,
    with_advantages_of,
)
from dapo_mega.megatron.value_loss import ValueBatch, ValueLoss
from dapo_mega.megatron.value_model import ValueModel
from dapo_mega.metrics import Histogram
from dapo_mega.samples.token_values import TokenRuns, runs_of
from dapo_mega.training.histograms import StepCounts
from dapo_mega.training.model_trainer import Facts, ModelTrainer
from dapo_mega.types import Answer, GenerationRequest, LogProbs, TokenIds
from dapo_mega.weight_sync.broadcast import BroadcastSender, WeightCommands
from dapo_mega.weight_sync.shared_memory import refuse_several_machines
from dapo_mega.weight_sync.update import SenderPlaces

if TYPE_CHECKING:
    from dapo_mega.engines.embedded.engine import EmbeddedEngine

T = TypeVar("T")
Metrics = dict[str, float]
Reference = ScoringModel | WithoutAdapters
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Mismatch and entropy of the step's tokens, and the mean mismatch by the engine's URL."""

    metrics: Metrics
    by_engine: Metrics


@dataclass(frozen=True)
class Scores:
    """What scoring a step came to. `measured` is None where its update measures. `penalties` [S] float64 are the sums
    over each trajectory's tokens of a KL penalty in the reward, where advantages compare trajectories: then
    `Trainer.set_advantages` is due."""

    measured: Measured | None
    metrics: Metrics
    penalties: Floats | None = None


@dataclass(frozen=True)
class Updated:
    """Means over the updates of a step, what the first one measured if the step was not scored before, every update's
    metrics in order, and histograms if they were asked for."""

    metrics: Metrics
    measured: Measured | None
    updates: Sequence[Metrics]
    histograms: dict[str, Histogram]


@dataclass
class _Scored:
    """This process's part of a step that is scored; `critic_batches` is empty without a critic. `distances` [N] of the
    policy from its teacher, log p_policy - log p_teacher, are 0 of tokens without one, and with
    `distillation.top_k`."""

    everything: list[MicroBatch]
    scores: Sequence[TokenScores | None]
    references: Sequence[TokenScores | None]
    penalties: list[Tensor] | None = None
    distances: list[Tensor] | None = None
    mini_batches: list[list[TokenBatch]] = field(default_factory=list)
    critic_batches: list[list[ValueBatch]] = field(default_factory=list)


@dataclass
class _Trace:
    """What a step's updates computed: log-probs [N] of the response tokens of `batches` under the weights that the step
    starts from, and those of the tokens that later updates used; of several passes over a token the last counts."""

    batches: list[MicroBatch] = field(default_factory=list)
    start_logprobs: list[Tensor] = field(default_factory=list)
    updated: dict[int, tuple[MicroBatch, Tensor]] = field(default_factory=dict)


class Trainer(ModelTrainer[RunConfig], WeightCommands):
    """Trains a policy by RL, with the reference of a KL penalty and the critic of PPO where the method has them. Where
    engines are embedded, each replica's leader has one."""

    reference: Reference | None = None

    def __init__(
        self,
        config: RunConfig,
        processes: Processes | None,
        began: Callable[[], None] = lambda: None,
        check_stop: Callable[[], None] = lambda: None,
        elsewhere: Links | None = None,
    ) -> None:
        """`check_stop` is called while embedded engines generate, and may raise StopRequested."""
        super().__init__(config, processes, began, elsewhere)
        self._check_stop = check_stop
        self.engine: EmbeddedEngine | None = None
        self.weight_version = -1
        self._counts: StepCounts | None = None
        self._scored: _Scored
        self._trace = _Trace()
        self._lent: LentMemory | None = None

    # ---- models and engines ----

    def build(self, *, with_engines: bool = True) -> None:
        """Load the models, and the embedded engines. Raises InputError for those that cannot be trained here."""
        self.facts = self._build(with_engines=with_engines)

    @command
    def _build(self, *, with_engines: bool) -> Facts:
        config, processes = self._config, self.processes
        if config.threads_per_process:
            torch.set_num_threads(config.threads_per_process)
        self.policy, self.reference, self.critic, self.teachers = build_models(config, processes)
        self._lent = None
        if with_engines and config.rollout.placement == "embedded" and processes.is_leader:
            # With transformers' models, which take a process a second to import.
            from dapo_mega.engines.embedded.engine import EmbeddedEngine

            self.engine = EmbeddedEngine(
                config.model.path,
                torch.bfloat16 if config.engine_dtype == "bf16" else torch.float32,
                max_batch_rows=config.rollout.max_batch_rows,
                device=processes.device,
                check_stop=self._check_stop,
            )
        return self._facts()

    def open_sender(self) -> SenderPlaces | None:
        """Prepare to send weights to a fleet of engines; returns from where, if by broadcast. Raises InputError if the
        configured way does not fit."""
        opened = self._open_sender()
        if self._config.sync_transport == "tensor":
            refuse_several_machines(host for host, _ in opened)
        return opened[0][1]

    @gathered
    def _open_sender(self) -> tuple[str, SenderPlaces | None]:
        from dapo_mega.weight_sync.transports import make_sender

        self.sender = make_sender(self._config, self.processes)
        return socket.gethostname(), self.sender.places if isinstance(self.sender, BroadcastSender) else None

    def load_engines(self, version: int) -> None:
        """Give the weights to the embedded engines."""
        self.weight_version = -1
        self._load_engines(version)
        self.weight_version = version

    @command
    def _load_engines(self, version: int) -> None:
        buckets = self.policy.weights(int(self._config.weight_sync.bucket_mib * 2**20))
        if self.engine:
            self.engine.load_weights(buckets, version)
        else:
            for _ in buckets:
                pass

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """The answers of the embedded engines, each of which takes a part. Raises StopRequested when the run is to
        stop."""
        found = self._generate(requests)
        if None in found:
            raise StopRequested("the run was stopped while responses were generated")
        by_id = {answer.request_id: answer for answers in found if answers for answer in answers}
        return [by_id[request.request_id] for request in requests]

    @gathered
    def _generate(self, requests: Sequence[GenerationRequest]) -> Sequence[Answer] | None:
        """None of a leader that is to stop."""
        if not self.engine:
            return ()
        try:
            return self.engine.generate(split(requests, self.processes.data_size)[self.processes.data_rank])
        except StopRequested:
            return None

    @command
    def hold(self, held: Held) -> None:
        """With `rollout.offload_trainer`: what of the models is on the device until the next call."""
        if self._lent is None:
            built = (self.reference, self.critic, *self.teachers.values())
            others = [model for model in built if isinstance(model, MegatronModel)]
            self._lent = LentMemory(self.policy, others, self.processes.device)
        self._lent.hold(held)

    @property
    def is_lent(self) -> bool:
        """Whether engines have memory of the models, which cannot be used then."""
        return self._lent is not None and self._lent.held != "all"

    @command
    def logprobs(self, tokens: TokenIds) -> LogProbs:
        """The policy's log-probs [L - 1] of all tokens but the first, at temperature 1, as engines score prompts."""
        (micro_batches,) = self.policy.pack(
            flatten([single_turn(tokens[:1], tokens[1:], in_loss=False)]),
            token_budget=self._config.batch.tokens_per_microbatch,
            aggregation=self._config.algorithm.aggregation,
            max_response_tokens=self._config.rollout.max_response_tokens,
        ).mini_batches
        scores = self.policy.score(micro_batches, temperature=1.0)
        logprobs = torch.zeros(len(tokens) - 1, dtype=torch.float32)
        if self.processes.counts_outputs:
            for micro_batch, score in zip(micro_batches, scores, strict=True):
                logprobs[micro_batch.of_responses(micro_batch.positions).cpu()] = score.logprobs.float().cpu()
        dist.all_reduce(logprobs, group=self.processes.control)
        return logprobs.numpy()

    # ---- a step ----

    def take(self, samples: FlatSamples, *, in_mini_batches: bool = True) -> PackingStats:
        """Give every process its part of a step's samples. Raises InputError for samples that fit no micro-batch."""
        config = self._config
        settings: dict[str, Any] = {"token_budget": config.batch.tokens_per_microbatch}
        if in_mini_batches:
            settings["groups_per_update"] = config.batch.mini_batch_groups
            settings["whole_trajectories"] = needs_whole_trajectories(config)
        return self._take(Own(plan_samples(samples, self.facts.packing_layout, **settings)))

    @command
    def _take(self, samples: Own[PlannedSamples]) -> PackingStats:
        self._batch = self.policy.receive(
            samples.value,
            aggregation=self._config.algorithm.aggregation,
            max_response_tokens=self._config.rollout.max_response_tokens,
        )
        return self._batch.stats

    @command
    def measure(self) -> Measured:
        """Score the batch by the policy and measure the engines' mismatch."""
        self._counts = None
        return self._measured(self._micro_batches, self.policy.score(self._micro_batches))

    @command
    def score(self, step: int, *, counts: bool = False) -> Scores:
        """pi_old <- pi_theta: score every response token of the batch with the weights that the step after `step`
        starts from, by the reference, and by the critic.

        A KL penalty in the reward and the critic's values become part of the advantages. A step with a single update
        needs no scoring pass: its update scores the tokens. With `counts` the step's histograms are counted.
        """
        self.step, self._trace = step, _Trace()
        self._counts = StepCounts() if counts else None
        config, everything = self._config, self._micro_batches
        references = self.reference.score(everything) if self.reference else [None] * len(everything)
        scored = self._scored = _Scored(everything, [None] * len(everything), references)
        measured, metrics = None, Metrics()
        if config.scores_before_updates:
            own = scored.scores = self.policy.score(everything)
            measured = self._measured(everything, own)
        if config.distillation:
            everything, of_teachers = self._distil(everything, config.distillation)
            scored.everything, metrics = everything, metrics | of_teachers
        if not config.algorithm.has_token_rewards:
            self._set_targets(everything)
            return Scores(measured, metrics)
        if config.algorithm.penalizes_rewards:
            kl = [
                kl_estimate(scores.logprobs, reference.logprobs, config.algorithm.kl.estimator)
                for scores, reference in zip(own, references, strict=True)
                if reference
            ]
            metrics["policy/kl_to_reference"] = self._mean(kl)
            scored.penalties = [config.algorithm.kl.coefficient * of_tokens for of_tokens in kl]
        values = self.critic.score(everything) if self.critic else None
        advantage = config.algorithm.advantage
        if isinstance(advantage, GaeAdvantage):
            assert values is not None
            changed, returns = advantages_from_values(
                everything,
                values,
                scored.penalties,
                self.processes,
                discount=advantage.discount,
                decay=advantage.decay,
            )
            critic_batches = [ValueBatch(*fields) for fields in zip(changed, values, returns, strict=True)]
            self._set_targets(self._normalized(changed), critic_batches)
            return Scores(measured, metrics)
        assert scored.penalties is not None
        if advantage.compares_group:
            return Scores(measured, metrics, sums_of_trajectories(everything, scored.penalties, self.processes))
        self._set_targets(self._normalized(subtract_following_penalties(everything, scored.penalties, self.processes)))
        return Scores(measured, metrics)

    def _distil(
        self, everything: list[MicroBatch], distillation: DistillationConfig
    ) -> tuple[list[MicroBatch], Metrics]:
        """Ask the teachers that are here. The policy's distances from all are kept for `_set_targets`, or with `top_k`
        the micro-batches get what the teachers said."""
        top_k = distillation.top_k
        of_models = {number: teacher.score(everything, top_k=top_k) for number, teacher in self.teachers.items()}
        distances: list[Tensor] = []
        taught: list[tuple[Tensor, Tensor]] = []
        batches = list(everything)
        for i, micro in enumerate(everything if self.processes.is_last_stage else ()):
            found, has_teacher = micro.teacher_logprobs({number: of[i].logprobs for number, of in of_models.items()})
            distance = torch.zeros(len(found))
            if top_k:
                batches[i] = micro.with_teacher_top({n: (of[i].other_ids, of[i].others) for n, of in of_models.items()})
            elif own := self._scored.scores[i]:
                distance = (own.logprobs.float().cpu() - found) * has_teacher
            distances.append(distance)
            taught.append((distance[has_teacher], found[has_teacher]))
        self._scored.distances = distances
        metrics = {"policy/teacher_logprob": self._mean([logprobs for _, logprobs in taught])}
        if not top_k:
            metrics["policy/kl_to_teacher"] = self._mean([distance for distance, _ in taught])
        return batches, metrics

    @command
    def set_advantages(self, advantages: Floats) -> None:
        """Give all tokens of each trajectory of the batch its advantage [S]."""
        self._set_targets(with_advantages_of(self._scored.everything, advantages))

    def _normalized(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        return normalized(batches, self.processes) if self._config.algorithm.normalize_advantages else list(batches)

    def _set_targets(self, everything: Sequence[MicroBatch], critic_batches: Sequence[ValueBatch] = ()) -> None:
        scored, loss = self._scored, self._config.algorithm.policy_loss
        if self._config.distillation and scored.distances:
            everything = distilled(everything, scored.distances, self._config.distillation)
        token_batches = [
            TokenBatch(micro_batch, score.logprobs if score else None, reference.logprobs if reference else None)
            for micro_batch, score, reference in zip(everything, scored.scores, scored.references, strict=True)
        ]
        scored.mini_batches = list(self._by_mini_batch(token_batches))
        scored.critic_batches = list(self._by_mini_batch(critic_batches)) if critic_batches else []
        if isinstance(loss, ClipCovLoss | KlCovLoss):
            scored.mini_batches = [
                choose_tokens(mini, loss, self.processes, seed=self.step) for mini in scored.mini_batches
            ]

    def _by_mini_batch(self, of_micro_batches: Sequence[T]) -> Iterator[list[T]]:
        remaining = iter(of_micro_batches)
        for mini_batch in self._batch.mini_batches:
            yield [next(remaining) for _ in mini_batch]

    @command
    def update(self, entropy_coefficient: float, *, traced: bool = False) -> Updated:
        """mu passes over the batch with one optimizer update per mini-batch, of the policy and of the critic if there
        is one. With `traced` what it computes of tokens is kept for `token_values`."""
        config, scored = self._config, self._scored
        settings = config.objective.model_copy(update={"entropy_coefficient": entropy_coefficient})
        ratios = self._counts.ratios if self._counts else None
        distillation = config.distillation
        teacher_weight = distillation.coefficient if distillation and distillation.top_k else 0.0
        objective = PolicyGradient(settings, self.processes.context, ratios, teacher_weight)
        if not config.scores_before_updates:
            scores: list[TokenScores] = []
            metrics = self.policy.update(scored.mini_batches[0], objective, scores=scores)
            batches = [batch.micro_batch for batch in scored.mini_batches[0]]
            if traced:
                self._trace = _Trace(batches, [score.logprobs for score in scores])
            measured = self._measured(batches, scores)
            self.step += 1
            return Updated({**measured.metrics, **metrics}, measured, [metrics], self._histograms())
        if traced:
            together = [batch for mini in scored.mini_batches for batch in mini]
            start_logprobs = [batch.old_logprobs for batch in together if batch.old_logprobs is not None]
            self._trace = _Trace([batch.micro_batch for batch in together], start_logprobs)
        updates: list[Metrics] = []
        trains_policy = not config.uses_critic or self.step >= config.critic.pretraining_steps
        for epoch in range(config.batch.epochs):
            for i, mini_batch in enumerate(scored.mini_batches):
                # The first update starts from the weights that the tokens were scored with.
                own: list[TokenScores] | None = [] if traced and (epoch or i) else None
                metrics = {}
                if trains_policy:
                    metrics = self.policy.update(mini_batch, objective, scores=own, score_entropy=False)
                if self.critic:
                    metrics |= self.critic.update(scored.critic_batches[i], ValueLoss(config.critic.value_clip))
                for batch, score in zip(mini_batch, own or [], strict=False):
                    self._trace.updated[id(batch)] = (batch.micro_batch, score.logprobs)
                updates.append(metrics)
        self.step += 1
        return Updated(_means(updates), None, updates, self._histograms())

    @gathered
    def token_values(self, samples: Sequence[int] | None = None) -> tuple[TokenRuns, TokenRuns] | None:
        """What each process knows of the response tokens of these samples (None: all) after a traced update: log-probs
        at the step's start with the advantages, and log-probs of the last update."""
        if not self.processes.counts_outputs:
            return None
        trace, updated = self._trace, list(self._trace.updated.values())
        at_start = runs_of(trace.batches, [trace.start_logprobs, [micro.advantages for micro in trace.batches]])
        at_update = runs_of([micro for micro, _ in updated], [[logprobs for _, logprobs in updated]])
        return at_start.only(samples), at_update.only(samples)

    def _histograms(self) -> dict[str, Histogram]:
        return self._counts.histograms(self._scored.mini_batches, self.processes) if self._counts else {}

    def _measured(self, batches: Sequence[MicroBatch], scores: Sequence[TokenScores]) -> Measured:
        processes, engines = self.processes, self._batch.engines
        pairs = zip(batches, scores, strict=True) if processes.counts_outputs else ()
        scored = [(micro_batch, score.logprobs) for micro_batch, score in pairs]
        if self._counts is not None:
            for micro_batch, logprobs in scored:
                self._counts.importance_weights.add(logprobs - micro_batch.rollout_logprobs.to(logprobs.device))
        metrics = measure_mismatch(
            scored, self._config.objective, control=processes.control, context_group=processes.context
        )
        by_engine = measure_engines(scored, engines, control=processes.control) if engines else {}
        return Measured({"policy/entropy": self._mean([score.entropy for score in scores]), **metrics}, by_engine)

    def _mean(self, of_tokens: Sequence[Tensor]) -> float:
        """The mean over all response tokens of the step."""
        sums = torch.zeros(2, dtype=torch.float64)
        for values in of_tokens if self.processes.counts_outputs else ():
            sums += torch.stack([values.double().sum().cpu(), torch.tensor(float(len(values)))])
        dist.all_reduce(sums, group=self.processes.control)
        return mean_over(*sums.tolist())

    def close(self) -> None:
        """Free engines and what is shared with them, in this process."""
        if self.engine:
            self.engine.close()
        if isinstance(self.sender, BroadcastSender):
            self.sender.close()


def build_models(
    config: RunConfig, processes: Processes
) -> tuple[MegatronPolicy, Reference | None, ValueModel | None, dict[int, ScoringModel]]:
    """The policy, the reference of a KL penalty, the critic of PPO and the teachers without a server, by number, as the
    run begins with them."""
    policy = MegatronPolicy(
        config.model,
        config.parallel,
        config.optimizer,
        processes,
        temperature=config.rollout.temperature,
        updates_per_step=config.batch.updates_per_step,
        num_steps=config.num_steps,
        compute=config.compute,
        lora=config.lora,
        seed=config.seed,
    )
    reference: Reference | None = None
    if config.algorithm.uses_reference and config.lora:
        reference = WithoutAdapters(policy)
    elif config.algorithm.uses_reference:
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
            lora=config.critic_lora,
            seed=config.seed,
        )
    teachers = {
        number: ScoringModel(
            config.teacher_model(teacher), config.parallel, processes, config.rollout.temperature, config.compute
        )
        for number, teacher in enumerate(config.distillation.listed if config.distillation else ())
        if teacher.path
    }
    return policy, reference, critic, teachers


def _means(updates: Sequence[Metrics]) -> Metrics:
    """Each metric's mean over the updates that have it."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    values = {name: [metrics[name] for metrics in updates if name in metrics] for name in names}
    return {name: sum(of_updates) / len(of_updates) for name, of_updates in values.items()}
