"""The sections of a whole run. Values that depend on each other are checked here, before any process group, model or
file is used, so that `--dry-run` on a laptop accepts the same files as a cluster."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dapo_mega.algorithms.filters import OTHER_FILTERS
from dapo_mega.algorithms.own import OwnCode
from dapo_mega.config.algorithm import AlgorithmConfig
from dapo_mega.config.base import FREE, Section, merged
from dapo_mega.config.batch import BatchConfig
from dapo_mega.config.choices import settled
from dapo_mega.config.components import EnvironmentComponent, LengthDapoComponent
from dapo_mega.config.compute import check_precision
from dapo_mega.config.data import DataConfig
from dapo_mega.config.distillation import DistillationConfig, TeacherConfig, without_reward
from dapo_mega.config.environment import EnvironmentChoice, SingleTurnEnvironment
from dapo_mega.config.evaluation import EvaluationConfig, check_beside_training
from dapo_mega.config.lora import LoraConfig
from dapo_mega.config.model import ModelConfig
from dapo_mega.config.optimizer import OptimizerConfig
from dapo_mega.config.paths import LocalPathOrNone
from dapo_mega.config.reward import RewardConfig
from dapo_mega.config.rollout import RolloutConfig, check_placement
from dapo_mega.config.training import TrainingConfig
from dapo_mega.config.weight_sync import WeightSyncConfig


class SamplesConfig(Section):
    """What the model said: the groups of every step and all responses of evaluations, as parquet files under
    `output_dir/samples`."""

    enabled: bool = True
    """Write them. Off: no response is written, and no step can be replayed."""
    groups_per_step: int | None = Field(default=None, ge=1)
    """Groups of a step that are written, drawn at random; null: all, which replaying a step needs. Evaluations are
    always written whole."""
    max_gib: float = Field(default=10.0, gt=0)
    """GiB that the files of a run may take together. Beyond it the oldest steps are removed, then the oldest
    evaluations; the newest file of each kind stays."""


class ControllerConfig(Section):
    """The controller asks, rewards, records, evaluates and commands the trainer: in the trainer's first process, or in
    one of its own, which lives on with the engines' requests when trainers die and come back."""

    own_process: bool = False
    """Command the run from a process of its own. Rank 0 starts it on its machine, unless `dapo-mega control` listens
    already, there or on any machine that sees output_dir. The results are the same."""
    host: str = "127.0.0.1"
    """The address at which it listens for the trainer, one of the machine that it is on. What goes over the connection
    is not encrypted."""
    wait_limit_s: float = Field(default=600.0, gt=0)
    """Seconds for which it and the trainer wait for each other."""


class CriticConfig(Section):
    """The value model, which only `algorithm.advantage=gae` has. It is laid out, packed and computed like the policy;
    what is not said here is as in `optimizer`. Learning rate and warm-up are those of Open-Reasoner-Zero (arXiv
    2503.24290)."""

    path: LocalPathOrNone = Field(default=None, json_schema_extra=FREE)
    """Folder with the value model that training starts from: a token classifier of transformers with one label, or a
    policy, which gets a value head of zeros. It must have the policy's tokens. null: model.path."""
    learning_rate: float = Field(default=5e-6, gt=0)
    """Learning rate after warm-up; five times the policy's suits models of 1B and more. Raise it if
    critic/explained_variance stays low, lower it if critic/grad_norm jumps."""
    warmup_steps: int = Field(default=50, ge=0)
    """Rollout steps over which the critic's learning rate rises linearly from 0."""
    pretraining_steps: int = Field(default=0, ge=0)
    """Rollout steps at the start in which only the critic learns, so that the policy's first advantages do not come
    from an untrained one."""
    value_clip: float | None = Field(default=None, gt=0)
    """The loss stops pushing a value further than this from its value at the step's start. null: no bound. Set it, to a
    fraction of the range of rewards, if values jump within a step."""


class RunConfig(TrainingConfig):
    """A whole run, as written to `output_dir/config.yaml`."""

    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentChoice = Field(default=SingleTurnEnvironment(), discriminator="kind")
    """What the policy acts in. With turns, rollout.max_response_tokens is for all of a trajectory."""
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    distillation: DistillationConfig | None = None
    """On-policy distillation: teachers score the policy's tokens, in place of the reward or beside it. null: none."""
    critic: CriticConfig = CriticConfig()
    batch: BatchConfig = BatchConfig()
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), json_schema_extra=FREE)
    weight_sync: WeightSyncConfig = Field(default=WeightSyncConfig(), json_schema_extra=FREE)
    samples: SamplesConfig = Field(default=SamplesConfig(), json_schema_extra=FREE)
    controller: ControllerConfig = Field(default=ControllerConfig(), json_schema_extra=FREE)

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, raw: Any) -> Any:
        return settled(cls, raw, {})

    @model_validator(mode="before")
    @classmethod
    def _let_asynchronous_responses_continue(cls, raw: Any) -> Any:
        """Without a value of its own, `weight_sync.in_flight` is what the schedule can do."""
        rollout = raw.get("rollout") if isinstance(raw, Mapping) else None
        if not isinstance(rollout, Mapping) or rollout.get("schedule") != "asynchronous":
            return raw
        return merged({"weight_sync": {"in_flight": "continue"}}, raw)

    @model_validator(mode="before")
    @classmethod
    def _leave_equal_rewards_in(cls, raw: Any) -> Any:
        """Without values of their own, filter and advantage are what a teacher alone needs."""
        if not isinstance(raw, Mapping) or not without_reward(raw):
            return raw
        return merged({"algorithm": {"dynamic_sampling": False, "advantage": {"kind": "reward"}}}, raw)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_precision(self.model, self.compute)
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if self.batch.tokens_per_microbatch < longest:
            raise ValueError(
                f"batch.tokens_per_microbatch={self.batch.tokens_per_microbatch} is smaller than the longest sample, "
                f"data.max_prompt_tokens + rollout.max_response_tokens = {longest}; set it to at least {longest}"
            )
        self._check_reward()
        self._check_algorithm()
        if self.distillation:
            self._check_distillation(self.distillation)
        check_placement(self.rollout, self.weight_sync)
        if self.rollout.offload_trainer and self.compute.fp8.params:
            raise ValueError(
                "rollout.offload_trainer=true cannot lend weights that are kept in FP8; set compute.fp8.params=false, "
                "or leave it out"
            )
        check_beside_training(self.evaluation, self.rollout)
        way = (self.rollout.placement, self.engine_dtype, self.sync_transport)
        if self.weight_sync.full_every > 1 and way != ("fleet", "bf16", "distributed"):
            raise ValueError(
                f"weight_sync.full_every={self.weight_sync.full_every} broadcasts changes to bf16 engines, but "
                f"these are {way[0]}, in {way[1]}, and get weights by {way[2]}; set rollout.placement=fleet, "
                f"rollout.dtype=bf16 and weight_sync.transport=distributed, or weight_sync.full_every=1"
            )
        if self.sends_adapters and (way[0], way[2], self.weight_sync.full_every) != ("fleet", "distributed", 1):
            raise ValueError(
                f"lora.send=adapters broadcasts whole adapters to a fleet, but engines are {way[0]}, get weights by "
                f"{way[2]}, and weight_sync.full_every={self.weight_sync.full_every}; set rollout.placement=fleet, "
                f"weight_sync.transport=distributed and weight_sync.full_every=1, or lora.send=merged"
            )
        if self.sends_adapters and way[1] == "fp8":
            raise ValueError("lora.send=adapters with rollout.dtype=fp8 is not supported yet; set lora.send=merged")
        if self.rollout.schedule == "partial" and self.algorithm.max_staleness == 0:
            raise ValueError(
                "rollout.schedule=partial continues responses that older weights began, but algorithm.max_staleness=0 "
                "drops them all; the smallest possible is 1"
            )
        if (
            self.data.sampling.needs_outcomes
            and self.algorithm.dynamic_sampling_on.kind != "score_threshold"
            and self.reward.deciding is None
        ):
            raise ValueError(
                "data.sampling.order=prioritised and data.sampling.retire_after need to know which responses are "
                "correct, and no component of the reward says so; set algorithm.dynamic_sampling_on={kind: "
                "score_threshold, threshold: NUMBER}, or leave them out"
            )
        if self.uses_critic and self.critic.pretraining_steps >= self.num_steps:
            raise ValueError(
                f"critic.pretraining_steps={self.critic.pretraining_steps} leaves the policy none of num_steps="
                f"{self.num_steps} to learn in; lower it"
            )
        wants_evaluation = self.evaluation.every or self.evaluation.at_start or self.evaluation.at_end
        if wants_evaluation and self.data.evaluation is None:
            raise ValueError(
                "evaluation is asked for but data.evaluation names no dataset; add it or set "
                "evaluation.every=0 evaluation.at_start=false evaluation.at_end=false"
            )
        return self

    def _check_reward(self) -> None:
        longest = self.rollout.max_response_tokens
        if self.reward.overlong_punishment and self.reward.overlong_cache_tokens > longest:
            raise ValueError(
                f"reward.overlong_cache_tokens={self.reward.overlong_cache_tokens} is larger than "
                f"rollout.max_response_tokens={longest}; choose a smaller cache or set reward.overlong_punishment=false"
            )
        for part in self.reward.components:
            if isinstance(part, EnvironmentComponent) and self.environment.kind == "single_turn":
                raise ValueError(
                    f"reward.components: {part.label} is what an environment of your own gives, and "
                    f"environment=single_turn gives nothing; set environment={{kind: function, path: FILE.py:NAME}}"
                )
            if isinstance(part, LengthDapoComponent) and part.cache_tokens > longest:
                raise ValueError(
                    f"reward.components: {part.label} has cache_tokens={part.cache_tokens}, which is larger than "
                    f"rollout.max_response_tokens={longest}; choose a smaller cache"
                )
        if self.algorithm.filters_on_correctness and self.reward.deciding is None:
            raise ValueError(
                f"algorithm.dynamic_sampling_on=correctness, but no component of the reward says which responses are "
                f"correct; {OTHER_FILTERS}"
            )

    def _check_distillation(self, distillation: DistillationConfig) -> None:
        if not distillation.reward_weight and self.algorithm.dynamic_sampling:
            raise ValueError(
                "algorithm.dynamic_sampling=true would drop groups whose rewards are equal, and with distillation."
                "reward_weight=0 the teacher teaches by these, too; leave dynamic_sampling out, or raise the weight"
            )
        if self.rollout.temperature != 1 and any(teacher.urls for teacher in distillation.listed):
            raise ValueError(
                f"distillation: servers score tokens at temperature 1, and rollout.temperature="
                f"{self.rollout.temperature:g}; set it to 1, or give the teacher as a path"
            )

    def _check_algorithm(self) -> None:
        algorithm, size = self.algorithm, self.batch.group_size
        if self.batch.groups_per_step > (most := algorithm.max_generation_rounds * self.generation_groups):
            raise ValueError(
                f"batch.groups_per_step={self.batch.groups_per_step} is more than a step can have: {most}, which is "
                f"algorithm.max_generation_rounds={algorithm.max_generation_rounds} x batch.generation_groups="
                f"{self.generation_groups}; lower the first or raise one of the others"
            )
        kind = algorithm.advantage.kind
        if size == 1 and algorithm.advantage.compares_group and kind != "function":
            raise ValueError(
                f"batch.group_size=1 leaves algorithm.advantage={kind} no other response to compare "
                f"with; set it to at least 2, or algorithm.advantage to reward, greedy_baseline or gae"
            )
        if size == 1 and algorithm.dynamic_sampling:
            raise ValueError(
                "batch.group_size=1 leaves no group with right and wrong responses, which "
                "algorithm.dynamic_sampling=true asks for; set algorithm.dynamic_sampling=false, or a larger group"
            )
        if size * self.batch.groups_per_step == 1 and algorithm.normalize_advantages:
            raise ValueError(
                "algorithm.normalize_advantages=true makes every advantage 0 in a step of one response; raise "
                "batch.groups_per_step or batch.group_size"
            )

    @property
    def mismatch_warning(self) -> float:
        """Mean |log-prob difference| between engine and trainer, in nats, above which the run warns."""
        if self.rollout.mismatch_warning is not None:
            return self.rollout.mismatch_warning
        return 0.001 if self.model.dtype == self.engine_dtype == "fp32" else 0.05

    @property
    def engine_tolerance(self) -> float:
        """Mean |log-prob difference| on a fixed sequence, in nats, above which a joining engine is refused."""
        if self.rollout.engine_tolerance is not None:
            return self.rollout.engine_tolerance
        if self.model.dtype == self.engine_dtype == "fp32":
            return 0.001
        return 0.5 if self.engine_dtype == "fp8" or self.compute.fp8.enabled else 0.15

    @property
    def engine_dtype(self) -> str:
        """The rollout engines' dtype: fp32, bf16 or fp8."""
        return self.model.dtype if self.rollout.dtype == "policy" else self.rollout.dtype

    @property
    def sync_transport(self) -> Literal["distributed", "disk", "tensor"]:
        """The transport of weights to a fleet's engines."""
        if self.weight_sync.transport != "auto":
            return self.weight_sync.transport
        return "tensor" if self.rollout.placement == "colocated" else "distributed"

    @property
    def objective(self) -> AlgorithmConfig:
        """The section algorithm, resolved for this run's precisions."""
        is_same = self.engine_dtype == self.model.dtype and not self.compute.fp8.enabled
        return self.algorithm.resolved(engine_differs=not is_same)

    @property
    def own_code(self) -> dict[str, OwnCode]:
        """The code of the user's own in this run's choices, by its key."""
        algorithm, order = self.algorithm, self.data.sampling.order
        choices = (algorithm.policy_loss, algorithm.advantage, algorithm.dynamic_sampling_on, order, self.environment)
        return {choice.key: choice for choice in choices if isinstance(choice, OwnCode)}

    @property
    def scores_before_updates(self) -> bool:
        """Whether a step scores its responses before it trains on them. A single update scores them itself."""
        algorithm = self.algorithm
        uses_scores = algorithm.has_token_rewards or algorithm.policy_loss.chooses_tokens
        of_sampled_tokens = self.distillation is not None and not self.distillation.top_k
        return self.batch.updates_per_step > 1 or uses_scores or of_sampled_tokens

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return self.algorithm.advantage.uses_critic

    @property
    def critic_model(self) -> ModelConfig:
        """The critic as a model: the policy's settings with its own folder."""
        return self.model.model_copy(update={"path": self.critic.path or self.model.path})

    def teacher_model(self, teacher: TeacherConfig) -> ModelConfig:
        """A teacher as a model: the policy's settings with its own folder."""
        return self.model.model_copy(update={"path": teacher.path})

    @property
    def critic_lora(self) -> LoraConfig | None:
        """The critic's adapters are of the policy's kind, and new."""
        return self.lora and self.lora.model_copy(update={"path": None, "send": "merged"})

    @property
    def critic_optimizer(self) -> OptimizerConfig:
        """The policy's optimizer with the critic's learning rate and warm-up."""
        own = {"learning_rate": self.critic.learning_rate, "warmup_steps": self.critic.warmup_steps}
        return self.optimizer.model_copy(update=own)

    @property
    def sends_adapters(self) -> bool:
        """Whether engines get adapters, which requests have to name."""
        return bool(self.lora and self.lora.send == "adapters") and self.rollout.placement != "embedded"

    @property
    def generation_groups(self) -> int:
        return self.batch.generation_groups or self.batch.groups_per_step
