"""The data that flows from prompt to policy update: frozen records without behaviour.

One prompt travels left to right through the system::

    Prompt -> GenerationRequest -> Response -> Trajectory -> ScoredTrajectory -> Group -> Sample -> (packed) MicroBatch

Arrays are NumPy up to `Group` and torch tensors from `Sample` (see `batching/samples.py`) on. Lengths are in tokens,
log-probabilities in nats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

TokenIds = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]
Routes = npt.NDArray[np.int16]
"""The experts of tokens in all layers [tokens, layers, experts per token]; -1 for tokens without known experts, and in
layers without any."""
NamedTensors = Iterable[tuple[str, "torch.Tensor"]]
"""Hugging Face parameter names with full (unsharded) tensors."""

FinishReason = Literal["stop", "length"]
"""`stop`: a stop token or text was sampled; `length`: the response limit cut the response off (truncated)."""

STOP_REASONS: Final[Mapping[str, str]] = {
    "done": "the environment said so",
    "turns": "it had `environment.max_turns`",
    "context": "an observation was longer than `environment.max_observation_tokens`, or left no place for a turn",
    "tokens": "it had `rollout.max_response_tokens`",
    "parse": "the environment could not read the policy's turns",
    "timeout": "it was older than `environment.trajectory_limit_s`",
    "failed": "its environment failed; it is not scored",
}
"""Why a trajectory with an environment ended."""

METRIC_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]*")
"""A part of a metric's name that a user chooses."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One question of a dataset, rendered and tokenised.

    `index` is the row in the dataset after deduplication: the prompt's identity within a run. `text` and `token_ids`
    [P] int32 already contain the chat or bare template. The rest is for rewards, and not part of the prompt's
    identity: `problem` is the text without the template, `messages` are the turns with it, as {role, content},
    `data_source` says where the row comes from, and `fields` are its other columns, read-only. `dataset` names the
    dataset of `data.mixture`, and `difficulty` is the column of that name, if there is one.
    """

    index: int
    text: str
    token_ids: TokenIds
    ground_truth: str
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    problem: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    data_source: str = ""
    dataset: str = ""
    difficulty: float | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. `temperature` > 0, or 0 for greedy; `top_k` 0 means no limit. Ids from
    `num_tokens` on pad the model's vocabulary: the embedded engine never draws them. None: there are none. `stop` are
    texts that end a response as stop tokens do."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()
    num_tokens: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def longest_stop(self) -> int:
        """A text of `stop` is in the last so many tokens of a response that it ends: a token holds at least a byte of a
        text, and some decoders leave out the space of the first one."""
        return 1 + max((len(text.encode()) for text in self.stop), default=0)


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """Ask an engine for one response.

    `request_id` is unique within a run. `seed` alone decides the random numbers of this request, so the
    response depends neither on what else is in the batch nor on which engine serves it. `engine` is the URL of the one
    that sampled the turn before, and so has the prompt's beginning in its cache; empty where there is none.
    `routes_from` is the first token whose experts are asked for, at most the prompt's length; None: no experts are.
    """

    request_id: int
    prompt_token_ids: TokenIds
    seed: int
    sampling: SamplingParams
    engine: str = ""
    routes_from: int | None = None


def no_routes() -> Routes:
    """Of no tokens: where experts are not asked for."""
    return np.empty((0, 0, 0), np.int16)


def no_tokens() -> TokenIds:
    """None, where no teacher was asked."""
    return np.empty(0, np.int32)


def no_logprobs() -> LogProbs:
    """Of no tokens: where no teacher was asked."""
    return np.empty(0, np.float32)


@dataclass(frozen=True, eq=False)
class Response:
    """What an engine sampled for one request.

    `token_ids` [L] int32 include the stop token when there is one. `logprobs` [L] float32 are the sampled
    tokens' log-probabilities under softmax(logits / temperature), not renormalised for top_p / top_k.
    `weight_version` is the oldest version of the policy's weights that sampled any of it. `version_spans` says which
    version sampled which tokens where there were several: (version, end) with ascending ends, the last of them L.
    `engine_spans` says the same of the engines of a fleet: (URL, end), also of a single one.
    `routes` are the experts of all tokens from the request's `routes_from` on, prompt and response, but for the last
    token, which went through no layer.
    """

    request_id: int
    token_ids: TokenIds
    logprobs: LogProbs
    finish_reason: FinishReason
    weight_version: int
    version_spans: tuple[tuple[int, int], ...] = ()
    engine_spans: tuple[tuple[str, int], ...] = ()
    routes: Routes = field(default_factory=no_routes)


class GenerationFailure(Exception):
    """A request that no engine answered; never turned into a reward."""

    def __init__(self, request_id: int, reason: str) -> None:
        super().__init__(request_id, reason)
        self.request_id, self.reason = request_id, reason


Answer = Response | GenerationFailure


ColumnKind = Literal["flag", "integer", "number", "text", "integers", "turns", "versions", "engines", "parts", "routes"]


def column(
    kind: ColumnKind | Literal["int32", "float32", "bool"], *, in_files: str = "", optional: bool = False
) -> dict[str, Any]:
    """Metadata of a field of `Trajectory`, which is a column of checkpoints and files of samples. The kinds int32,
    float32 and bool are arrays along the tokens. `in_files` is its name in files of samples if that is another one;
    those in which all rows have the default of an `optional` column leave it out."""
    return {"kind": kind, "in_files": in_files, "optional": optional}


@dataclass(frozen=True)
class Turn:
    """What the policy sampled for one request: it ends at row `stop` of the trajectory. `parts` are what it earned by
    itself, by name."""

    stop: int
    finish_reason: FinishReason
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def sampled_rows(sampled: npt.NDArray[np.bool_], begin: int, stop: int) -> slice:
    """The rows of a turn that end at `stop`: those from `begin`, the end of the turn before, were observed until then.
    Empty where none was sampled."""
    inside = sampled[begin:stop]
    return slice(begin + int(np.argmax(inside)) if inside.any() else stop, stop)


def extend_spans(spans: list[tuple[T, int]], more: Iterable[tuple[T, int]], start: int) -> None:
    """Add spans (what, end), with ends counted from `start`; those of one thing that follow one another become one."""
    for what, end in more:
        if spans and spans[-1][0] == what:
            spans.pop()
        spans.append((what, start + end))


def with_last_token(routes: Routes) -> Routes:
    """Those of one token more, whose experts are not known; of no tokens as they are."""
    return np.concatenate([routes, np.full_like(routes[:1], -1)]) if len(routes) else routes


@dataclass(frozen=True, eq=False)
class Trajectory:
    """All that follows a prompt, turns of the policy and what it observed between them, a row per token [R].

    A single answer is one turn. `token_ids` int32 and `logprobs` float32 are as in `Response`; where `sampled` is
    False, tokens were observed: they have log-prob 0, and no part in anything that is trained on or measured.
    `version_spans` and `engine_spans` say which weights and engines sampled which tokens: (version, end) and (URL, end)
    with ascending ends, those of versions up to R. `segments` are the ends of pieces, the last of them R: where the
    history was rewritten a new piece begins with all of it, and every piece is a sequence of its own. The first end is
    0 where no piece begins with the row's prompt. `stop` says why one with an environment is over (see
    `STOP_REASONS`); it is empty for a single answer. `routes` are the experts of the prompt's tokens and those of all
    rows [P + R, layers, experts per token], as the request said that sampled a token or came next; of no tokens where
    they were not asked for. `teacher_logprobs` are those that a teacher's server gives the sampled tokens, 0 where
    tokens were observed; of no tokens until a step that trains on them has asked. `teacher_top_ids` and
    `teacher_top_logprobs` are the teacher's `distillation.top_k` most probable tokens in place of each row, from the
    highest on, one row after the other [R x k].

    Every field is a column of checkpoints and, but for `routes`, of files of samples, see `trajectory_records`.
    """

    id: int = field(metadata=column("integer", in_files="request_id"))
    token_ids: TokenIds = field(metadata=column("int32"))
    logprobs: LogProbs = field(metadata=column("float32", in_files="engine_logprobs"))
    sampled: npt.NDArray[np.bool_] = field(metadata=column("bool", optional=True))
    turns: tuple[Turn, ...] = field(metadata=column("turns", optional=True))
    version_spans: tuple[tuple[int, int], ...] = field(metadata=column("versions"))
    engine_spans: tuple[tuple[str, int], ...] = field(metadata=column("engines"))
    segments: tuple[int, ...] = field(metadata=column("integers", optional=True))
    stop: str = field(default="", metadata=column("text", optional=True))
    routes: Routes = field(default_factory=no_routes, metadata=column("routes", optional=True))
    teacher_logprobs: LogProbs = field(default_factory=no_logprobs, metadata=column("float32", optional=True))
    teacher_top_ids: TokenIds = field(default_factory=no_tokens, metadata=column("int32", optional=True))
    teacher_top_logprobs: LogProbs = field(default_factory=no_logprobs, metadata=column("float32", optional=True))

    @classmethod
    def of(cls, response: Response) -> Trajectory:
        """A single answer."""
        length = len(response.token_ids)
        return Trajectory(
            response.request_id,
            response.token_ids,
            response.logprobs,
            np.ones(length, np.bool_),
            (Turn(length, response.finish_reason),),
            response.version_spans or ((response.weight_version, length),),
            response.engine_spans,
            (length,),
            routes=with_last_token(response.routes),
        )

    @property
    def pieces(self) -> list[tuple[int, int, bool]]:
        """First row and end of every sequence, and whether the prompt of the row is before it."""
        found = [(start, stop, not i) for i, (start, stop) in enumerate(pairwise((0, *self.segments)))]
        return found[1:] if len(found) > 1 and not self.segments[0] else found

    @property
    def num_rows(self) -> int:
        """All tokens: what packing and costs count."""
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """Sampled tokens: what penalties, aggregation and metrics count."""
        return int(np.count_nonzero(self.sampled))

    @property
    def sampled_ids(self) -> TokenIds:
        """The sampled tokens alone."""
        return self.token_ids[self.sampled]

    @property
    def versions(self) -> npt.NDArray[np.int64]:
        """The version of the weights at each row [R]."""
        numbers, ends = np.array(self.version_spans, np.int64).T
        return np.repeat(numbers, np.diff(ends, prepend=0))

    @property
    def finish_reason(self) -> FinishReason:
        """That of the last turn."""
        return self.turns[-1].finish_reason

    @property
    def is_truncated(self) -> bool:
        """Whether the last turn was cut off by its limit."""
        return self.finish_reason == "length"

    @property
    def weight_version(self) -> int:
        """The oldest version of the weights that sampled any of it."""
        return min(version for version, _ in self.version_spans)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredTrajectory(Trajectory):
    """A trajectory with its verdict.

    `correct` is None where the reward does not judge that. `accuracy_reward` is the reward before shaping by length and
    `reward` the one trained on (after the overlong punishment). `answer` is what was found in the text and compared
    with the ground truth; None where nothing was, or nothing was looked for. `parts` are the named numbers that
    `reward` is made of, before their weights.
    """

    text: str = field(metadata=column("text", in_files="response"))
    correct: bool | None = field(metadata=column("flag"))
    accuracy_reward: float = field(metadata=column("number"))
    reward: float = field(metadata=column("number"))
    answer: str | None = field(default=None, metadata=column("text"))
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), metadata=column("parts"))

    @classmethod
    def judged(cls, trajectory: Trajectory, **verdict: Any) -> ScoredTrajectory:
        """The trajectory with the fields of its verdict."""
        return cls(**vars(trajectory), **verdict)


@dataclass(frozen=True, eq=False)
class Group:
    """All trajectories of one prompt.

    `greedy` is one more, sampled greedily, where its reward is the baseline (ReMax); it is never trained on.
    """

    prompt: Prompt
    trajectories: tuple[ScoredTrajectory, ...]
    greedy: ScoredTrajectory | None = None

    @property
    def id(self) -> int:
        """That of its first trajectory."""
        return self.trajectories[0].id

    @property
    def members(self) -> tuple[ScoredTrajectory, ...]:
        """The trajectories, the greedy one last."""
        return (*self.trajectories, self.greedy) if self.greedy else self.trajectories

    @cached_property
    def weight_version(self) -> int:
        """The oldest version of the weights that sampled any of it."""
        return min(member.weight_version for member in self.members)


GroupOutcome = Literal["trained", "surplus", "all_right", "all_wrong", "no_signal", "stale", "dropped", "expired"]
"""Where a group went in a step. `surplus`: kept, and still in the buffer; `no_signal`: filtered out, neither all right
nor all wrong; `stale`: kept, and grown too old in the buffer; `dropped`: one of its requests failed, or it could not be
scored; `expired`: its tokens grew too old before it was complete."""


@dataclass(frozen=True, eq=False)
class GroupFate:
    """Where one group went in a step. `group` is None for one that was given up before it was complete and scored:
    `unscored` has those of its trajectories that were there."""

    outcome: GroupOutcome
    prompt: Prompt
    group: Group | None = None
    unscored: tuple[Trajectory, ...] = ()


@dataclass(frozen=True)
class WeightSpec:
    """A weight tensor without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class WeightBucket:
    """Full tensors that travel together, in the order of `specs`. Iterating gives names with tensors, where these are.

    `stage` is the pipeline stage that holds them. `tensors` is None except on the processes that the tensors are
    gathered on. They can be read once, before the next bucket is asked for. `sender` is the number of the process that
    sends them among the processes of its replica, which are numbered by pipeline, context and tensor rank.
    """

    stage: int
    specs: tuple[WeightSpec, ...]
    tensors: Iterable[torch.Tensor] | None
    is_last: bool
    sender: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.tensors is not None:
            for spec, tensor in zip(self.specs, self.tensors, strict=True):
                yield spec.name, tensor


Receivers = Literal["leaders", "stage_leaders", "senders"]
"""The processes of a replica on which weights are gathered: its leader gets all of them; the leader of each pipeline
stage those of the stage; or all processes of a stage get about equal numbers of its bytes."""


Selection = Literal["merged", "base", "adapters", "whole"]
"""What is sent of a policy with LoRA: its weights with the adapters in them; without; or A and B by peft's names. And
`whole`: what is merged, and the layer of multi-token prediction if it learns, which engines do not get."""


class WeightSource(Protocol):
    """The policy: its weights as Hugging Face tensors in buckets.

    At most two buckets' worth of `bucket_bytes` are in memory at a time, also while the caller still sends the bucket
    before; each bucket holds at least one tensor.
    """

    def weights(
        self, bucket_bytes: int, to: Receivers = "leaders", replicas: Collection[int] | None = None
    ) -> Iterator[WeightBucket]:
        """Collective over all processes: this process's bucket of each round. Where it gets none in a round, the bucket
        is another process's, without tensors. `replicas` are those that get weights; None for all."""

    def weight_plan(self, bucket_bytes: int) -> Sequence[Sequence[WeightBucket]]:
        """The buckets of all rounds of `weights(bucket_bytes, "senders")`, without tensors. No collective."""
