"""Samples to train on, with one row per token.

Every per-token column is a field of `Sample`, filled where samples are made. Planning, scattering and packing carry all
fields of `Sample` or of a class derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo_mega.batching.step_advantages import is_in_loss, raw_advantages, step_advantages
from dapo_mega.config import DistillationConfig, RunConfig
from dapo_mega.types import Group, LogProbs, Prompt, TokenIds, Trajectory

NO_LOGPROB: Final = -1e30
"""That of no token, which leaves all probability to the others."""
LAST_TURN: Final = 4
"""What is measured by turn tells the first four apart; the fifth stands for all that follow."""


_NUMPY: Final = {
    torch.bool: np.bool_,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.float32: np.float32,
}


def column(dtype: torch.dtype, *, outside: float = 0) -> dict[str, Any]:
    """Metadata of a per-token field of `Sample`; `outside` is its value at positions that predict no token."""
    return {"dtype": dtype, "outside": outside}


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence to train on, a row per token: every column is a CPU tensor [L], or [L, ...].

    - `token_ids` int32.
    - `response_mask`: tokens that the policy sampled and the trainer scores; never the first token.
    - `loss_mask`: response tokens that count in the loss.
    - `fresh_mask`: response tokens sampled with the weights that the step starts from.
    - `engine_ids` int16: number of the engine that sampled the token (see `FlatSamples.engines`), -1 if unknown.
    - `sample_ids` int32: number of the sample within the step, -1 at the prompt.
    - `turns` int8: number of the turn that the token was sampled in, from 0, `LAST_TURN` for later ones too.
    - `advantages` float32.
    - `rollout_logprobs` float32: the engine's log-probs of the sampled tokens, in nats.
    - `teachers` int8: number of the teacher that distils the token (see `DistillationConfig.listed`), -1 for none.
    - `teacher_logprobs` float32: the log-probs that its server gives the sampled tokens, 0 where it has none.
    - `teacher_top_ids` int32 [L, k]: the teacher's most probable tokens in place of the token, -1 where there is no
      teacher or it is a folder's, which is asked in the step; k is 0 but with `distillation.top_k`.
    - `teacher_top_logprobs` float32 [L, k]: what it gives them.
    - `routes` int16 [L, layers, experts per token]: the experts that the token before went through in the engine, and
      so those of the position that predicts this one; -1 where the trainer's router is to decide. [L, 0, 0] where it
      decides always.

    A prompt of three tokens and a response of two, the first of them sampled with older weights, by engine 4::

        token_ids        [11,  12,  13,  21,   2]
        response_mask    [ 0,   0,   0,   1,   1]
        loss_mask        [ 0,   0,   0,   1,   1]
        fresh_mask       [ 0,   0,   0,   0,   1]
        engine_ids       [-1,  -1,  -1,   4,   4]
        sample_ids       [-1,  -1,  -1,   0,   0]
        turns            [ 0,   0,   0,   0,   0]
        advantages       [0.0, 0.0, 0.0, 0.7, 0.7]
        rollout_logprobs [0.0, 0.0, 0.0, -1.2, -0.1]
        teachers         [-1,  -1,  -1,   0,   0]
        teacher_logprobs [0.0, 0.0, 0.0, -2.0, -0.2]
    """

    token_ids: Tensor = field(metadata=column(torch.int32))
    response_mask: Tensor = field(metadata=column(torch.bool))
    loss_mask: Tensor = field(metadata=column(torch.bool))
    fresh_mask: Tensor = field(metadata=column(torch.bool))
    engine_ids: Tensor = field(metadata=column(torch.int16, outside=-1))
    sample_ids: Tensor = field(metadata=column(torch.int32, outside=-1))
    turns: Tensor = field(metadata=column(torch.int8))
    advantages: Tensor = field(metadata=column(torch.float32))
    rollout_logprobs: Tensor = field(metadata=column(torch.float32))
    teachers: Tensor = field(metadata=column(torch.int8, outside=-1))
    teacher_logprobs: Tensor = field(metadata=column(torch.float32))
    teacher_top_ids: Tensor = field(metadata=column(torch.int32, outside=-1))
    teacher_top_logprobs: Tensor = field(metadata=column(torch.float32, outside=NO_LOGPROB))
    routes: Tensor = field(metadata=column(torch.int16, outside=-1))

    def __len__(self) -> int:
        return len(self.token_ids)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same columns with `function` applied to each."""
        return replace(self, **{f.name: function(getattr(self, f.name)) for f in fields(self)})


def single_turn(
    prompt_ids: TokenIds,
    response_ids: TokenIds,
    rollout_logprobs: LogProbs | None = None,
    *,
    advantage: float = 0.0,
    in_loss: bool = True,
    num_off_policy: int = 0,
    engine_ids: npt.ArrayLike = -1,
    sample_id: int = 0,
    sampled: npt.NDArray[np.bool_] | None = None,
) -> Sample:
    """A prompt [P] and the response [R] to it: [P + R] rows.

    The first `num_off_policy` tokens of the response are not fresh. `rollout_logprobs` [R] are 0 if not given;
    `engine_ids` is [R] or one number. `sampled` [R] leaves out what is said between turns.
    """
    return _sample(
        np.asarray(prompt_ids, np.int32),
        np.asarray(response_ids, np.int32),
        np.ones(len(response_ids), np.bool_) if sampled is None else sampled,
        loss_mask=in_loss,
        fresh_mask=np.arange(len(response_ids)) >= num_off_policy,
        engine_ids=engine_ids,
        sample_ids=sample_id,
        turns=0,
        advantages=advantage,
        rollout_logprobs=0.0 if rollout_logprobs is None else np.asarray(rollout_logprobs),
        teachers=-1,
        teacher_logprobs=0.0,
        **_teachers_top(None, len(response_ids), 0),
        routes=np.empty((len(prompt_ids) + len(response_ids), 0, 0), np.int16),
    )


@dataclass(frozen=True, eq=False)
class Origins:
    """What each of S samples is a part of; [S] int64 each.

    - `lengths`: the sample's rows.
    - `groups`, `trajectories`: numbers within the step. A trajectory whose history was rewritten has several samples.
    - `loss_tokens`: the tokens in the loss of the sample's whole trajectory.
    - `leads`: 1 for the first sample of a trajectory that has tokens in the loss, which stands for it where
      trajectories are counted.
    """

    lengths: Tensor
    groups: Tensor
    trajectories: Tensor
    loss_tokens: Tensor
    leads: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Origins:
        """The same fields with `function` applied to each."""
        return Origins(**{f.name: function(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True, eq=False)
class FlatSamples:
    """S concatenated samples: `columns` has the rows of all, `origins` what each sample is a part of.

    `engines[i]` is the URL of the engine with number i in `columns.engine_ids`.
    """

    columns: Sample
    origins: Origins
    engines: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def lengths(self) -> Tensor:
        """The number of rows of each sample, [S] int64."""
        return self.origins.lengths

    def select(self, indices: Sequence[int]) -> FlatSamples:
        """The samples `indices`, in that order."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        ends = self.lengths.cumsum(0)
        starts, stops = (ends - self.lengths)[chosen].tolist(), ends[chosen].tolist()

        def join(column: Tensor) -> Tensor:
            # Copying slices is far faster than indexing rows.
            runs = [column[start:stop] for start, stop in zip(starts, stops, strict=True)]
            return torch.cat(runs) if runs else column[:0]

        return FlatSamples(self.columns.map(join), self.origins.map(itemgetter(chosen)), self.engines)

    def split(self, counts: Sequence[int]) -> list[FlatSamples]:
        """Consecutive parts of `counts[i]` samples each, without copying; `counts` add up to S."""
        parts = []
        first = start = 0
        for count in counts:
            origins = self.origins.map(itemgetter(slice(first, first + count)))
            stop = start + int(origins.lengths.sum())
            parts.append(FlatSamples(self.columns.map(itemgetter(slice(start, stop))), origins, self.engines))
            first, start = first + count, stop
        return parts


def flatten(
    samples: Sequence[Sample],
    engines: Sequence[str] = (),
    *,
    trajectories: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
) -> FlatSamples:
    """Join samples of one class, in the order given; for `engines` see `FlatSamples`.

    `trajectories` [S] and `groups` [S] number, from 0 and ascending, the trajectory and the group that each sample is
    of. If they are not given, every sample is a trajectory, and every trajectory a group.
    """
    if not samples:
        raise ValueError("cannot build a batch of no samples")
    if any(sample.response_mask[0] for sample in samples):
        raise ValueError("the first token of a sample cannot be predicted: give every sample a prompt")
    joined = {
        f.name: torch.cat([getattr(sample, f.name) for sample in samples]).to(f.metadata["dtype"])
        for f in fields(samples[0])
    }
    own = np.arange(len(samples)) if trajectories is None else np.asarray(trajectories, np.int64)
    in_loss = np.array([int(sample.loss_mask.sum()) for sample in samples])
    has_any = np.flatnonzero(in_loss)
    leads = np.zeros(len(samples), np.int64)
    leads[has_any[np.unique(own[has_any], return_index=True)[1]]] = 1
    origins = Origins(
        lengths=torch.tensor([len(sample) for sample in samples]),
        groups=torch.from_numpy(own if groups is None else np.asarray(groups, np.int64)),
        trajectories=torch.from_numpy(own),
        loss_tokens=torch.from_numpy(np.bincount(own, weights=in_loss).astype(np.int64)[own]),
        leads=torch.from_numpy(leads),
    )
    return FlatSamples(type(samples[0])(**joined), origins, tuple(engines))


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The integers start, start + 1, ... of every range, one range after the other: [sum of lengths] int64."""
    return torch.arange(int(lengths.sum())) + (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)


def samples_of_groups(groups: Sequence[Group], config: RunConfig, version: int) -> FlatSamples:
    """The samples of all trajectories, groups in order, with their advantages; with token rewards, which the trainer's
    models decide, with what the trajectory's reward contributes to them.

    Overlong filtering keeps truncated trajectories out of the loss; their rewards stay in the group's statistics.
    `version` is the version of the weights that the step starts from.
    """
    advantages_of = raw_advantages if config.algorithm.has_token_rewards else step_advantages
    verdicts = [
        (float(advantage), is_in_loss(scored, config))
        for advantage, scored in zip(
            advantages_of(groups, config), (member for group in groups for member in group.trajectories), strict=True
        )
    ]
    return _join([(group.prompt, group.trajectories) for group in groups], version, verdicts, config.distillation)


def samples_to_score(members: Iterable[tuple[Prompt, Trajectory]], version: int) -> FlatSamples | None:
    """The samples of those trajectories that weights of `version` or newer ones sampled any of, none in the loss."""
    fresh = [(prompt, [trajectory]) for prompt, trajectory in members if (trajectory.versions >= version).any()]
    return _join(fresh, version, [(0.0, False)] * len(fresh)) if fresh else None


def _join(
    groups: Sequence[tuple[Prompt, Sequence[Trajectory]]],
    version: int,
    verdicts: Sequence[tuple[float, bool]],
    distillation: DistillationConfig | None = None,
) -> FlatSamples:
    """`verdicts` are each trajectory's advantage and whether it is in the loss."""
    members = [(number, prompt, member) for number, (prompt, of_group) in enumerate(groups) for member in of_group]
    engines = tuple(sorted({url for *_, member in members for url, _ in member.engine_spans if url}))
    routes_shape = max((member.routes.shape[1:] for *_, member in members), default=(0, 0))
    samples: list[Sample] = []
    trajectories, group_numbers = [], []
    for i, ((number, prompt, member), (advantage, in_loss)) in enumerate(zip(members, verdicts, strict=True)):
        fresh, engine_ids = member.versions >= version, np.full(member.num_rows, -1)
        for (url, end), start in zip(member.engine_spans, (0, *(end for _, end in member.engine_spans)), strict=False):
            engine_ids[start:end] = engines.index(url) if url else -1
        teacher = distillation.number_of(prompt.data_source) if distillation else -1
        teacher_logprobs = member.teacher_logprobs if len(member.teacher_logprobs) else np.zeros(member.num_rows)
        top = _teachers_top(member, member.num_rows, distillation.top_k if distillation else 0)
        turns = np.searchsorted([turn.stop for turn in member.turns], np.arange(member.num_rows), side="right")
        for start, stop, has_prompt in member.pieces:
            piece = slice(start, stop)
            before = prompt.token_ids if has_prompt else prompt.token_ids[:0]
            # Those of the row before.
            routes = np.full((len(before) + stop - start, *routes_shape), -1, np.int16)
            if member.routes.size:
                routes[1:] = member.routes[len(prompt.token_ids) - len(before) + start :][: len(routes) - 1]
            samples.append(
                _sample(
                    before,
                    member.token_ids[piece],
                    member.sampled[piece],
                    loss_mask=in_loss,
                    fresh_mask=fresh[piece],
                    engine_ids=engine_ids[piece],
                    sample_ids=len(samples),
                    turns=turns[piece].clip(max=LAST_TURN),
                    advantages=advantage,
                    rollout_logprobs=member.logprobs[piece],
                    teachers=teacher,
                    teacher_logprobs=teacher_logprobs[piece],
                    **{name: values[piece] for name, values in top.items()},
                    routes=routes,
                )
            )
            trajectories.append(i)
            group_numbers.append(number)
    return flatten(samples, engines, trajectories=trajectories, groups=group_numbers)


def _teachers_top(member: Trajectory | None, num_rows: int, top_k: int) -> dict[str, npt.NDArray[Any]]:
    """What a server said of a trajectory's rows, [R, k] each; as if there were no teacher where none was asked."""
    found: dict[str, npt.NDArray[Any]] = {
        "teacher_top_ids": np.full((num_rows, top_k), -1, np.int32),
        "teacher_top_logprobs": np.full((num_rows, top_k), NO_LOGPROB, np.float32),
    }
    if top_k and member is not None and len(member.teacher_top_ids):
        found = {name: getattr(member, name).reshape(num_rows, top_k) for name in found}
    return found


def _sample(
    before: TokenIds,
    token_ids: TokenIds,
    sampled: npt.NDArray[np.bool_],
    *,
    routes: npt.NDArray[np.int16],
    **columns: npt.ArrayLike,
) -> Sample:
    """The tokens `before` [P] and `token_ids` [R], and `routes` of all. The other columns, [R], [R, k] or one value
    each, count where the policy `sampled` [R]."""
    rows = np.concatenate([before, token_ids]).astype(np.int32)
    mask = np.concatenate([np.zeros(len(before), np.bool_), sampled])
    found: dict[str, npt.NDArray[Any]] = {"token_ids": rows, "response_mask": mask, "routes": routes}
    for f in fields(Sample):
        if f.name in columns:
            value = np.asarray(columns[f.name])
            column = np.full((len(rows), *value.shape[1:]), f.metadata["outside"], _NUMPY[f.metadata["dtype"]])
            column[mask] = value[sampled] if value.ndim else value
            found[f.name] = column
    return Sample(**{name: torch.from_numpy(values) for name, values in found.items()})
