"""How responses are generated during training."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from dapo_mega.config.base import FREE, Section
from dapo_mega.config.fleet import FleetConfig
from dapo_mega.config.weight_sync import WeightSyncConfig

Schedule = Literal["synchronous", "partial", "asynchronous"]


class RolloutConfig(Section):
    """How responses are generated during training."""

    placement: Literal["embedded", "fleet", "colocated"] = "embedded"
    """What generates. embedded: transformers in the trainer's processes, for CPUs and tests; fleet: SGLang engines on
    GPUs or machines of their own; colocated: SGLang engines on the trainer's GPUs, asleep while the policy trains."""
    offload_trainer: bool = Field(default=False, json_schema_extra=FREE)
    """Colocated engines: while they generate, weights, gradients and optimizer leave the GPU for host memory and come
    back as they were. Engines may take the whole GPU then; a step takes longer by the copies."""
    fleet: FleetConfig = Field(default=FleetConfig(), json_schema_extra=FREE)
    dtype: Literal["fp32", "bf16", "fp8", "policy"] = "policy"
    """Number format in which engines compute; policy: model.dtype. An engine with another one is refused."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature in training. Leave it at 1 unless entropy is far too low or high."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that hold this share of the probability. 1: from all. Below 1 the trainer's
    probabilities are not those sampled from."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many likeliest tokens. 0: from all. Above 0 the trainer's probabilities are not those sampled
    from."""
    stop: tuple[str, ...] = Field(default=(), max_length=32)
    """Texts, such as "User:", that end a response beside the model's end tokens, however the tokenizer splits them.
    They belong to the response, with what else its last token holds. SGLang engines need --with-text."""
    max_response_tokens: int = Field(default=20480, ge=1)
    """Longest response in tokens; longer ones are cut off. With data.max_prompt_tokens it must fit the model's context.
    Raise it if rollout/truncated_share is high."""
    max_batch_rows: int = Field(default=512, ge=1, json_schema_extra=FREE)
    """Embedded engine: responses it decodes at once. Lower it when out of memory."""
    max_attempts: int = Field(default=3, ge=1)
    """SGLang engines: attempts at a response before its group is dropped."""
    schedule: Schedule = "synchronous"
    """When engines generate. synchronous: while the policy waits for a step's groups; partial (fleet): what is
    unfinished when a step has its groups goes on in the next step; asynchronous (fleet): new groups also start while
    the policy trains. Both save waiting, but which groups a step gets then depends on timing."""
    routing_replay: bool = False
    """Mixtures of experts: old log-probs and updates send tokens through the experts that the engine chose, as two
    roundings of one router may choose differently (arXiv 2510.11370). SGLang engines need
    --enable-return-routed-experts."""
    mismatch_warning: float | None = Field(default=None, gt=0, json_schema_extra=FREE)
    """Warn when engine and trainer log-probs differ by more than this many nats on average; null: 0.001 if both compute
    in fp32, else 0.05."""
    mismatch_stop: float | None = Field(default=0.5, gt=0, json_schema_extra=FREE)
    """End the run if engine and trainer log-probs differ by more than this many nats on average; null: never."""
    engine_tolerance: float | None = Field(default=None, gt=0, json_schema_extra=FREE)
    """SGLang engines: refuse an engine that joins if its log-probs of a fixed sequence differ from the trainer's by
    more than this many nats on average; null: 0.001 if both compute in fp32, 0.5 if one of them computes in FP8, else
    0.15."""

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("rollout.stop has an empty text, which would end every response at once; leave it out")
        return stop

    @model_validator(mode="before")
    @classmethod
    def _read_partial(cls, raw: Any) -> Any:
        """Runs of earlier versions have `partial` in place of `schedule`."""
        if not isinstance(raw, Mapping) or not isinstance(raw.get("partial"), bool):
            return raw
        given = {key: value for key, value in raw.items() if key != "partial"}
        if not raw["partial"]:
            return given
        if given.setdefault("schedule", "partial") != "partial":
            raise ValueError(
                f"rollout.partial=true is an earlier name of rollout.schedule=partial, but rollout.schedule="
                f"{given['schedule']} is given too; leave rollout.partial out"
            )
        return given

    @property
    def continues_responses(self) -> bool:
        """Whether responses may be in flight when a step has its groups."""
        return self.schedule != "synchronous"


def check_placement(rollout: RolloutConfig, weight_sync: WeightSyncConfig) -> None:
    """Raises ValueError for fleet settings that contradict the placement."""
    fleet = rollout.fleet
    if rollout.offload_trainer and rollout.placement != "colocated":
        raise ValueError(
            f"rollout.offload_trainer=true lends the trainer's memory to engines on the same GPUs, but "
            f"rollout.placement={rollout.placement} has none; leave it out, or set rollout.placement=colocated"
        )
    if rollout.placement == "embedded":
        if fleet.urls or fleet.rendezvous:
            key = f"rollout.fleet.{'urls' if fleet.urls else 'rendezvous'}"
            raise ValueError(f"{key} is for rollout.placement=fleet or colocated, not embedded; set one of them")
        if rollout.continues_responses:
            raise ValueError(
                f"rollout.schedule={rollout.schedule} is for rollout.placement=fleet, not embedded; set one of them"
            )
        if rollout.dtype == "fp8":
            raise ValueError("rollout.dtype=fp8 needs engines of a fleet; the embedded engine computes in fp32 or bf16")
        return
    if not fleet.urls and not fleet.rendezvous:
        raise ValueError(
            f"rollout.placement={rollout.placement} needs engines: give their addresses in rollout.fleet.urls, or "
            f"rollout.fleet.rendezvous=host:port and start them with launch/serve_rollouts.py --rendezvous host:port"
        )
    if rollout.continues_responses and rollout.placement == "colocated":
        raise ValueError(
            f"rollout.schedule={rollout.schedule} leaves responses in flight while the policy trains, but colocated "
            f"engines sleep then; use rollout.placement=fleet"
        )
    if rollout.schedule == "asynchronous" and weight_sync.in_flight == "finish":
        raise ValueError(
            "weight_sync.in_flight=finish waits for all responses at every weight update, but "
            "rollout.schedule=asynchronous is to have some always; set weight_sync.in_flight=continue"
        )
