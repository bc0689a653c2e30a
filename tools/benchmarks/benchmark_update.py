"""Speed of one policy update against plain transformers: forward, backward, clipping, AdamW, same tokens, same loss.

python tools/benchmark.py update --dtype fp32

Sides, all in this process, in turn:

- ours: `MegatronPolicy.update` on packed micro-batches, as in a run
- bucketed: transformers' Qwen2ForCausalLM with sdpa, responses sorted by length, padded to the longest of their
  micro-batch (with --equal nothing is padded): the most favourable way to feed it
- packed: the same model, several responses in one row told apart by position_ids (transformers masks them by blocks)
- padded: every response padded to the longest of the batch, as TRL's trainer does

For the two favourable sides several micro-batch sizes are tried and the fastest is compared. The loss is DAPO's with
given old log-probs; the gradient norms of the first update must agree. In bf16 the transformers sides keep weights,
gradients and AdamW in bf16 (their cheapest way); ours has float32 gradients and main weights.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmark_workload as workload
import numpy as np
import torch
from benchmark_timing import Duration, measure, median_cpu, median_wall, speed_ratio, take_turns
from torch import Tensor

from dapo_mega.algorithms.advantages import GroupNormAdvantage
from dapo_mega.batching.samples import samples_of_groups
from dapo_mega.cli import quiet_libraries, run_command
from dapo_mega.config import RunConfig
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch
from dapo_mega.training.build import TrainingRun
from dapo_mega.types import Group, Response, ScoredTrajectory, Trajectory

_TRIED_TOKENS = (512, 1024, 2048, 4096, 8192)
"""Micro-batch sizes tried for the favourable sides."""


def run(options: argparse.Namespace) -> list[str]:
    """Measure and return the report's lines."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = workload.prepare_workload(folder, options)
        batch = workload.update_batch(options, num_updates=1)
        config = workload.run_config(folder, model, options, batch=batch)
        with workload.built_run(config) as pipeline:
            return _compare(pipeline, model, options)


def _tried_tokens(least: int, most: int) -> list[int]:
    """The sizes between these; one that holds every row where there is none."""
    return [budget for budget in _TRIED_TOKENS if least <= budget <= most] or [least]


def _compare(pipeline: TrainingRun, model: Path, options: argparse.Namespace) -> list[str]:
    groups = make_groups(pipeline, options)
    policy = pipeline.trainer.policy
    [mini_batch] = mini_batches(policy, pipeline.config, groups)
    objective = PolicyGradient(pipeline.config.objective)
    theirs = TransformersUpdate(model, groups, options.dtype)
    num_tokens = sum(len(row.tokens) for row in theirs.rows)

    our_norm = policy.update(mini_batch, objective)["policy/grad_norm"]
    their_norm = theirs.update(theirs.bucketed(1024))
    favourable = {
        f"{kind}, {budget} tokens": theirs.timed(make(budget))
        for kind, make in (("bucketed", theirs.bucketed), ("packed", theirs.packed))
        for budget in _tried_tokens(options.longest + 16, 2 * num_tokens)
    }
    tried = take_turns(favourable, 2, limit_s=60)
    best = {
        kind: min((name for name in tried if name.startswith(kind)), key=lambda name: min(d.cpu for d in tried[name]))
        for kind in ("bucketed", "packed")
    }
    sides: dict[str, Callable[[], Duration]] = {"ours": lambda: measure(lambda: policy.update(mini_batch, objective))}
    sides |= {name: favourable[name] for name in best.values()}
    if not options.equal:
        sides["padded to the longest"] = theirs.timed(theirs.padded(options.padded_rows))
    measured = take_turns(sides, options.rounds, options.limit_s)
    lines = [
        f"one policy update: {len(theirs.rows)} responses, {num_tokens} tokens with prompts "
        f"({'all of' if options.equal else 'log-normal, longest'} {options.longest} response tokens), "
        f"{workload.num_parameters(model):,} parameters, {options.dtype}, {options.threads} thread(s), "
        f"{len(measured['ours'])} rounds in turn, medians",
        f"gradient norm of the first update: ours {our_norm:.6f}, transformers {their_norm:.6f}",
        "| side | CPU s | wall s | tokens / CPU s | ours is faster by (CPU, wall) |",
        "|---|---|---|---|---|",
    ]
    for side, durations in measured.items():
        ratio = speed_ratio(measured["ours"], durations)
        lines.append(
            f"| {side} | {median_cpu(durations):.3f} | {median_wall(durations):.3f} | "
            f"{num_tokens / median_cpu(durations):,.0f} | {ratio.cpu:.2f} x, {ratio.wall:.2f} x |"
        )
    return lines


def mini_batches(policy: MegatronPolicy, config: RunConfig, groups: Sequence[Group]) -> list[list[TokenBatch]]:
    """What one pass over the groups updates the policy with."""
    batch = policy.pack(
        samples_of_groups(groups, config, 0),
        token_budget=config.batch.tokens_per_microbatch,
        groups_per_update=config.batch.mini_batch_groups,
        aggregation=config.algorithm.aggregation,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return [[TokenBatch(micro) for micro in mini_batch] for mini_batch in batch.mini_batches]


def make_groups(pipeline: TrainingRun, options: argparse.Namespace) -> list[Group]:
    """Random responses of the wanted lengths with rewards of both signs."""
    prompts = pipeline.collector.prompts
    rng = np.random.default_rng(options.seed)
    size = pipeline.config.batch.group_size
    num_groups = pipeline.config.batch.groups_per_step
    lengths = workload.response_lengths(options, num_groups * size, options.seed).reshape(num_groups, size)
    groups = []
    for i, row in enumerate(lengths):
        members = []
        for length in row:
            # The first ids are special ones: transformers holds back the gradient of the padding token's embedding.
            tokens = rng.integers(4, pipeline.trainer.policy.arch.vocab_size, length).astype(np.int32)
            response = Response(0, tokens, np.full(length, -4.0, dtype=np.float32), "stop", 0)
            reward = float(rng.choice([-1.0, 1.0]))
            members.append(
                ScoredTrajectory.judged(
                    Trajectory.of(response), text="", correct=reward > 0, accuracy_reward=reward, reward=reward
                )
            )
        groups.append(Group(prompts[i % len(prompts)], tuple(members)))
    return groups


@dataclass(frozen=True)
class _Row:
    """One response with its prompt, for the transformers side."""

    tokens: Tensor
    prompt_length: int
    advantage: float

    @property
    def num_response_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length


class _Feed:
    """One micro-batch of the transformers side: inputs [B, L], and flat positions whose next token is in the loss."""

    def __init__(self, inputs: dict[str, Tensor], rows: Sequence[_Row], starts: Sequence[int]) -> None:
        """`starts` are the flat positions of the rows' first tokens."""
        self.inputs = inputs
        self.where = torch.cat(
            [torch.arange(s + r.prompt_length - 1, s + len(r.tokens) - 1) for r, s in zip(rows, starts, strict=True)]
        )
        self.targets = torch.cat([row.tokens[row.prompt_length :] for row in rows])
        self.advantages = torch.cat([torch.full((row.num_response_tokens,), row.advantage) for row in rows])
        self.old_logprobs = torch.empty(0)


class TransformersUpdate:
    """The same update in plain transformers and torch: what a careful user would write without Megatron."""

    def __init__(self, model: Path, groups: Sequence[Group], dtype: str) -> None:
        from transformers import Qwen2ForCausalLM

        self.model = Qwen2ForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, attn_implementation="sdpa"
        ).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, weight_decay=0.1, foreach=True)
        self.rows = list(_rows(groups))
        self.num_loss_tokens = sum(row.num_response_tokens for row in self.rows)

    def bucketed(self, budget: int) -> list[_Feed]:
        """Sorted by length, padded to the longest of each micro-batch of at most `budget` positions."""
        feeds, pending = [], list[_Row]()
        for row in sorted(self.rows, key=lambda row: -len(row.tokens)):
            if pending and (len(pending) + 1) * len(pending[0].tokens) > budget:
                feeds.append(_padded_feed(pending))
                pending = []
            pending.append(row)
        return self._scored([*feeds, _padded_feed(pending)])

    def padded(self, num_rows: int) -> list[_Feed]:
        """In the order given, every row padded to the longest of all and masked."""
        width = max(len(row.tokens) for row in self.rows)
        chunks = [self.rows[i : i + num_rows] for i in range(0, len(self.rows), num_rows)]
        return self._scored([_padded_feed(rows, width) for rows in chunks])

    def packed(self, budget: int) -> list[_Feed]:
        """One row [1, T] of at most `budget` tokens per micro-batch, longest first into the first that has room."""
        bins: list[list[_Row]] = []
        for row in sorted(self.rows, key=lambda row: -len(row.tokens)):
            room = next((b for b in bins if sum(len(r.tokens) for r in b) + len(row.tokens) <= budget), None)
            if room is None:
                bins.append([row])
            else:
                room.append(row)
        return self._scored([_packed_feed(rows) for rows in bins])

    def timed(self, feeds: Sequence[_Feed]) -> Callable[[], Duration]:
        return lambda: measure(lambda: self.update(feeds))

    def update(self, feeds: Sequence[_Feed]) -> float:
        """One optimizer step; returns the gradient norm."""
        self.optimizer.zero_grad()
        for feed in feeds:
            logprobs = self._logprobs(feed)
            ratio = (logprobs - feed.old_logprobs).exp()
            clipped = ratio.clamp(0.8, 1.28)
            loss = -torch.minimum(ratio * feed.advantages, clipped * feed.advantages).sum() / self.num_loss_tokens
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(norm)

    @torch.no_grad()
    def _scored(self, feeds: list[_Feed]) -> list[_Feed]:
        """With the old log-probs filled in."""
        for feed in feeds:
            feed.old_logprobs = self._logprobs(feed)
        return feeds

    def _logprobs(self, feed: _Feed) -> Tensor:
        logits: Any = self.model(**feed.inputs, use_cache=False).logits
        chosen = logits.flatten(0, 1)[feed.where].float()
        logprobs: Tensor = chosen.gather(1, feed.targets[:, None])[:, 0] - chosen.logsumexp(-1)
        return logprobs


def _rows(groups: Sequence[Group]) -> Iterator[_Row]:
    for group in groups:
        advantages = GroupNormAdvantage().of_group([scored.reward for scored in group.trajectories])
        for scored, advantage in zip(group.trajectories, advantages, strict=True):
            tokens = np.concatenate([group.prompt.token_ids, scored.token_ids]).astype(np.int64)
            yield _Row(torch.from_numpy(tokens), len(group.prompt.token_ids), float(advantage))


def _padded_feed(rows: Sequence[_Row], masked_width: int = 0) -> _Feed:
    """Padded to the longest row, or to `masked_width` with an attention mask."""
    width = masked_width or max(len(row.tokens) for row in rows)
    tokens, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        mask[i, : len(row.tokens)] = 1
    # Padding on the right is seen by no real token: without a mask sdpa takes its fast causal kernel.
    inputs = {"input_ids": tokens} | ({"attention_mask": mask} if masked_width else {})
    return _Feed(inputs, rows, [i * width for i in range(len(rows))])


def _packed_feed(rows: Sequence[_Row]) -> _Feed:
    tokens = torch.cat([row.tokens for row in rows])[None]
    positions = torch.cat([torch.arange(len(row.tokens)) for row in rows])[None]
    starts = np.cumsum([0] + [len(row.tokens) for row in rows[:-1]]).tolist()
    return _Feed({"input_ids": tokens, "position_ids": positions}, rows, starts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = workload.update_parser("update", __doc__, responses=128)
    parser.add_argument(
        "--padded-rows", type=int, default=16, help="rows per padded micro-batch (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    quiet_libraries()
    print("\n".join(run(options)))


if __name__ == "__main__":
    run_command(main)
