"""The sections of a whole run. Values that depend on each other are checked here, before any process group, model or
file is touched, so that `--dry-run` on a laptop accepts exactly what a cluster would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from dapo_mega.config.base import Section, merged
from dapo_mega.config.compute import ComputeConfig, ModelConfig, ParallelConfig, check_precision
from dapo_mega.config.fleet import FleetConfig, WeightSyncConfig


class ColumnsConfig(Section):
    """Where a dataset keeps its fields; dots reach into nested records (`reward_model.ground_truth`). All other columns
    of a row stay with its prompt, for rewards."""

    prompt: str = Field(default="prompt", description="Text, or a list of {role, content} messages.")
    ground_truth: str = "reward_model.ground_truth"
    data_source: str | None = None
    response: str = Field(default="response", description="Demonstration to imitate; read by supervised training.")


class DatasetConfig(Section):
    """One dataset: a file (parquet, JSON, JSONL, arrow), a folder of such files, or a Hugging Face name."""

    path: str
    split: str = Field(
        default="train", description="Of a Hugging Face dataset, or of a folder whose file names begin with splits."
    )
    columns: ColumnsConfig = ColumnsConfig()
    template: str = Field(
        default="dapo",
        description="Name of a prompt template (dapo, bare, qwen_math, r1), text containing {problem}, or as_is for a "
        "dataset whose prompts hold their instruction already, such as DAPO-Math-17k.",
    )
    chat_template: bool = Field(default=False, description="Wrap the prompt in the tokenizer's chat template.")
    ground_truth_style: Literal["verbatim", "boxed", "gsm8k"] = Field(
        default="verbatim", description="How the final answer stands in the ground-truth column."
    )
    deduplicate: bool = Field(default=True, description="Keep one row per distinct prompt (DAPO-Math-17k repeats).")
    max_rows: int | None = Field(default=None, ge=1, description="Rows read at most, before deduplication.")


class DataConfig(Section):
    """What is asked during training and evaluation."""

    train: DatasetConfig
    evaluation: DatasetConfig | None = None
    max_prompt_tokens: int = Field(default=2048, ge=1)
    long_prompts: Literal["refuse", "drop"] = Field(
        default="refuse", description="What to do with a prompt over max_prompt_tokens; drops are counted."
    )


class RolloutConfig(Section):
    """How responses are generated during training."""

    placement: Literal["embedded", "fleet", "colocated"] = Field(
        default="embedded",
        description="embedded: transformers in the trainer's processes; fleet: SGLang engines on GPUs or hosts of "
        "their own; colocated: SGLang engines on the trainer's GPUs, asleep while the policy trains.",
    )
    fleet: FleetConfig = FleetConfig()
    dtype: Literal["fp32", "bf16", "fp8", "policy"] = Field(
        default="policy", description="What the engines compute in; those of a fleet that say otherwise are refused."
    )
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_response_tokens: int = Field(default=20480, ge=1)
    max_batch_rows: int = Field(default=512, ge=1, description="Rows the embedded engine decodes at once.")
    max_attempts: int = Field(
        default=3, ge=1, description="Times a failed generation is tried before its group is dropped."
    )
    partial: bool = Field(
        default=False,
        description="Of a fleet: leave the responses that are still in flight when a step has its groups, and go on "
        "with them in the next step. Which groups a step trains on then depends on which finish first.",
    )
    mismatch_warning: float | None = Field(
        default=None,
        gt=0,
        description="Warn when engine and trainer log-probs differ by more than this many nats on average; "
        "null means 0.001 where both compute in fp32 and 0.05 otherwise.",
    )
    mismatch_stop: float | None = Field(
        default=0.5, gt=0, description="End the run at such a mean difference, in nats; null never does."
    )
    engine_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="An engine of a fleet that joins is refused when it gives a fixed sequence log-probs that differ "
        "from the trainer's by more than this many nats on average; null means 0.001 where both compute in fp32, 0.5 "
        "where the engine computes in fp8 and 0.15 otherwise.",
    )


class RewardConfig(Section):
    """Rule reward and overlong shaping (DAPO section 2.4, 3.4)."""

    source: Literal["verifier", "random"] = Field(
        default="verifier", description="random: a fair coin, the control experiment that must not learn."
    )
    extraction: Literal["dapo", "boxed", "none"] = "dapo"
    correct: float = 1.0
    incorrect: float = -1.0
    overlong_punishment: bool = True
    overlong_cache_tokens: int = Field(default=4096, ge=1)
    overlong_filtering: bool = False
    num_workers: int = Field(default=2, ge=1)
    time_limit_s: float = Field(default=5.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> RewardConfig:
        if self.correct <= self.incorrect:
            raise ValueError(f"reward.correct={self.correct} must be larger than reward.incorrect={self.incorrect}")
        return self


class KlConfig(Section):
    """KL penalty against a frozen copy of the starting model; 0 (DAPO) holds no reference model.

    As a term of the loss k1 has no gradient in expectation; it is there to be watched. k2 and k3 pull.
    """

    coefficient: float = Field(default=0.0, ge=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"


class AlgorithmConfig(Section):
    """The policy-gradient objective. `preset` fills in what is not written."""

    preset: Literal["dapo", "grpo", "dr_grpo", "rloo"] = "dapo"
    advantage: Literal["group_norm", "group_mean", "leave_one_out"] = "group_norm"
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_constant"] = "token_mean"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float | None = Field(default=10.0, gt=1)
    dynamic_sampling: bool = True
    max_generation_rounds: int = Field(default=10, ge=1)
    max_staleness: int = Field(
        default=1, ge=0, description="Steps a surplus group may wait in the buffer; 0 drops surplus at once."
    )
    entropy_coefficient: float = Field(default=0.0, ge=0)
    importance_cap: float | Literal["auto"] | None = Field(
        default="auto",
        description="Truncated importance sampling: cap of trainer over rollout probability per token. null is off; "
        "auto is 2 where the engine computes in another dtype than the trainer, else off.",
    )
    sequence_mask: tuple[float, float] | Literal["auto"] | None = Field(
        default="auto",
        description="Leave a response out of the loss whose geometric mean of trainer over rollout probability lies "
        "outside of [low, high]; null is off, auto is [0.5, 2] where importance_cap's auto is on.",
    )
    kl: KlConfig = KlConfig()

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        if not isinstance(self.importance_cap, str | None) and self.importance_cap <= 0:
            raise ValueError(f"algorithm.importance_cap={self.importance_cap:g} must be positive, auto or null")
        if isinstance(self.sequence_mask, tuple) and not 0 <= self.sequence_mask[0] < 1 < self.sequence_mask[1]:
            raise ValueError(
                f"algorithm.sequence_mask={list(self.sequence_mask)} must be [low, high] with 0 <= low < 1 < high, "
                f"such as [0.5, 2]"
            )
        return self


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "dapo": {},
    "grpo": {
        "clip_high": 0.2,
        "dual_clip": None,
        "dynamic_sampling": False,
        "aggregation": "sequence_mean_token_mean",
        "kl": {"coefficient": 0.04, "estimator": "k3"},
    },
    "dr_grpo": {
        "clip_high": 0.2,
        "dual_clip": None,
        "dynamic_sampling": False,
        "advantage": "group_mean",
        "aggregation": "sequence_mean_constant",
    },
    "rloo": {"clip_high": 0.2, "dual_clip": None, "dynamic_sampling": False, "advantage": "leave_one_out"},
}
"""What each preset changes against `AlgorithmConfig`'s defaults, which are DAPO."""


class BatchConfig(Section):
    """Sizes of one rollout step, in groups (one prompt and its responses)."""

    groups_per_step: int = Field(default=512, ge=1, description="N of the paper's Algorithm 1.")
    group_size: int = Field(default=16, ge=2, description="G: responses per prompt.")
    generation_groups: int | None = Field(
        default=None, ge=1, description="Prompts asked per generation round; groups_per_step when null."
    )
    mini_batch_groups: int = Field(default=32, ge=1, description="Groups per optimizer update.")
    epochs: int = Field(default=1, ge=1, description="mu: passes over the step's groups.")
    tokens_per_microbatch: int = Field(default=32768, ge=1)

    @model_validator(mode="after")
    def _check(self) -> BatchConfig:
        if self.groups_per_step % self.mini_batch_groups:
            n = self.groups_per_step
            nearest = min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - self.mini_batch_groups))
            raise ValueError(
                f"batch.mini_batch_groups={self.mini_batch_groups} does not divide batch.groups_per_step={n}; "
                f"the nearest size that does is {nearest}"
            )
        return self

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.groups_per_step // self.mini_batch_groups


class OptimizerConfig(Section):
    """AdamW of Megatron's distributed optimizer. Warm-up is linear, in rollout steps, then constant."""

    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0, description="Largest global gradient norm; 0 does not clip.")
    schedule: Literal["constant", "linear", "cosine"] = "constant"


class EvaluationConfig(Section):
    """Held-out evaluation through the same engine: avg@k, pass@k, maj@k."""

    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0 evaluates only as asked below.")
    at_start: bool = False
    at_end: bool = False
    samples_per_prompt: int = Field(default=32, ge=1, description="k.")
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=0.7, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)


class CheckpointConfig(Section):
    """Megatron distributed checkpoints under `output_dir/checkpoints`, and exports for other programs."""

    every: int = Field(default=20, ge=0, description="Steps between checkpoints; 0 saves only at the end.")
    keep_last: int = Field(default=2, ge=1, description="Newest checkpoints kept.")
    keep_every: int | None = Field(
        default=None, ge=1, description="Checkpoints of steps that are a multiple of this are never removed."
    )
    asynchronous: bool = Field(
        default=True, description="Write the files while training goes on, from a copy in host memory."
    )
    hf_every: int = Field(
        default=0, ge=0, description="Steps between Hugging Face exports to output_dir/hf_step_N, all kept; 0 is off."
    )
    grace_s: float = Field(
        default=25.0,
        ge=0,
        description="Seconds after SIGTERM in which the step under way and its checkpoint are seen through. torchrun "
        "kills its processes after 30 s, or what its --shutdown-timeout says.",
    )
    save_hf_at_end: bool = Field(default=True, description="Export the trained model to output_dir/hf.")

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        if self.keep_every and self.every and self.keep_every % self.every:
            nearest = max(round(self.keep_every / self.every), 1) * self.every
            raise ValueError(
                f"checkpoint.keep_every={self.keep_every} is not a multiple of checkpoint.every={self.every}, so it "
                f"would miss checkpoints; the nearest multiple is {nearest}"
            )
        return self


class RunConfig(Section):
    """A whole run, as written to `output_dir/config.yaml`."""

    output_dir: str
    seed: int = Field(default=0, ge=0, lt=2**63)
    num_steps: int = Field(ge=1)
    threads_per_process: int | None = Field(default=None, ge=1, description="Intra-op threads on the CPU.")
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    batch: BatchConfig = BatchConfig()
    parallel: ParallelConfig = ParallelConfig()
    compute: ComputeConfig = ComputeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and isinstance(raw.get("algorithm"), Mapping):
            algorithm = raw["algorithm"]
            preset = PRESETS.get(str(algorithm.get("preset", "dapo")), {})
            return {**raw, "algorithm": merged(preset, algorithm)}
        return raw

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        check_precision(self.model, self.compute)
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if self.batch.tokens_per_microbatch < longest:
            raise ValueError(
                f"batch.tokens_per_microbatch={self.batch.tokens_per_microbatch} is smaller than the longest sample, "
                f"data.max_prompt_tokens + rollout.max_response_tokens = {longest}; set it to at least {longest}"
            )
        if self.reward.overlong_punishment and self.reward.overlong_cache_tokens > self.rollout.max_response_tokens:
            raise ValueError(
                f"reward.overlong_cache_tokens={self.reward.overlong_cache_tokens} is larger than "
                f"rollout.max_response_tokens={self.rollout.max_response_tokens}; choose a smaller cache or set "
                f"reward.overlong_punishment=false"
            )
        _check_placement(self.rollout, self.weight_sync)
        way = (self.rollout.placement, self.engine_dtype, self.sync_transport)
        if self.weight_sync.full_every > 1 and way != ("fleet", "bf16", "distributed"):
            raise ValueError(
                f"weight_sync.full_every={self.weight_sync.full_every} broadcasts changes to bf16 engines, and those "
                f"are {way[0]}, in {way[1]}, and get weights by {way[2]}; set rollout.placement=fleet, "
                f"rollout.dtype=bf16 and weight_sync.transport=distributed, or weight_sync.full_every=1"
            )
        if self.rollout.partial and self.algorithm.max_staleness == 0:
            raise ValueError(
                "rollout.partial=true goes on with responses that older weights began, but algorithm.max_staleness=0 "
                "drops them all; set it to at least 1"
            )
        wants_evaluation = self.evaluation.every or self.evaluation.at_start or self.evaluation.at_end
        if wants_evaluation and self.data.evaluation is None:
            raise ValueError(
                "evaluation is asked for but data.evaluation names no dataset; add it or set "
                "evaluation.every=0 evaluation.at_start=false evaluation.at_end=false"
            )
        return self

    @property
    def mismatch_warning(self) -> float:
        """Mean |log-prob difference| between engine and trainer, in nats, that is worth a warning."""
        if self.rollout.mismatch_warning is not None:
            return self.rollout.mismatch_warning
        return 0.001 if self.model.dtype == self.engine_dtype == "fp32" else 0.05

    @property
    def engine_tolerance(self) -> float:
        """Mean |log-prob difference| on a fixed sequence, in nats, over which an engine that joins is refused."""
        if self.rollout.engine_tolerance is not None:
            return self.rollout.engine_tolerance
        if self.model.dtype == self.engine_dtype == "fp32":
            return 0.001
        return 0.5 if self.engine_dtype == "fp8" else 0.15

    @property
    def engine_dtype(self) -> str:
        """What the rollout engines compute in: fp32, bf16 or fp8."""
        return self.model.dtype if self.rollout.dtype == "policy" else self.rollout.dtype

    @property
    def sync_transport(self) -> Literal["distributed", "disk", "tensor"]:
        """How weights travel to a fleet's engines."""
        if self.weight_sync.transport != "auto":
            return self.weight_sync.transport
        return "tensor" if self.rollout.placement == "colocated" else "distributed"

    @property
    def objective(self) -> AlgorithmConfig:
        """`algorithm` with what is decided automatically filled in; nothing in it is "auto"."""
        is_same = self.engine_dtype == self.model.dtype and not self.compute.fp8.enabled
        automatic = {
            "importance_cap": None if is_same else 2.0,
            "sequence_mask": None if is_same else (0.5, 2.0),
        }
        decided = {name: value for name, value in automatic.items() if getattr(self.algorithm, name) == "auto"}
        return self.algorithm.model_copy(update=decided)

    @property
    def generation_groups(self) -> int:
        return self.batch.generation_groups or self.batch.groups_per_step


def _check_placement(rollout: RolloutConfig, weight_sync: WeightSyncConfig) -> None:
    """Refuse settings of a fleet that the placement contradicts."""
    fleet = rollout.fleet
    if rollout.placement == "embedded":
        given = [
            name
            for name, value in (
                ("rollout.fleet.urls", fleet.urls),
                ("rollout.fleet.rendezvous", fleet.rendezvous),
                ("rollout.partial", rollout.partial),
            )
            if value
        ]
        if given:
            raise ValueError(f"{given[0]} is for rollout.placement=fleet or colocated, not embedded; set one of them")
        if rollout.dtype == "fp8":
            raise ValueError("rollout.dtype=fp8 needs engines of a fleet; the embedded engine computes in fp32 or bf16")
        return
    if not fleet.urls and not fleet.rendezvous:
        raise ValueError(
            f"rollout.placement={rollout.placement} needs engines: give their addresses in rollout.fleet.urls, or "
            f"rollout.fleet.rendezvous=host:port and start them with launch/serve_rollouts.py --rendezvous host:port"
        )
    if rollout.partial and rollout.placement == "colocated":
        raise ValueError(
            "rollout.partial=true leaves responses in flight while the policy trains, but colocated engines sleep "
            "then; use rollout.placement=fleet"
        )


class SftDataConfig(Section):
    """Demonstrations for supervised training."""

    train: DatasetConfig
    max_tokens: int = Field(default=2048, ge=2, description="Longest prompt plus response; longer rows are refused.")


class SftConfig(Section):
    """Supervised fine-tuning (R1's cold start) with the same policy code."""

    output_dir: str
    seed: int = Field(default=0, ge=0, lt=2**63)
    num_steps: int = Field(ge=1)
    batch_samples: int = Field(default=256, ge=1, description="Demonstrations per optimizer update.")
    tokens_per_microbatch: int = Field(default=8192, ge=1)
    threads_per_process: int | None = Field(default=None, ge=1)
    model: ModelConfig
    data: SftDataConfig
    parallel: ParallelConfig = ParallelConfig()
    compute: ComputeConfig = ComputeConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)

    @model_validator(mode="after")
    def _check(self) -> SftConfig:
        check_precision(self.model, self.compute)
        if self.tokens_per_microbatch < self.data.max_tokens:
            raise ValueError(
                f"tokens_per_microbatch={self.tokens_per_microbatch} is smaller than data.max_tokens="
                f"{self.data.max_tokens}; set it to at least that"
            )
        return self
