"""How many tokens a rollout step has, and how they become micro-batches, before any response is known."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from dapo_mega.config import RunConfig
from dapo_mega.planning.activations import MicroBatchShape
from dapo_mega.planning.rank_layout import RankLayout


@dataclass(frozen=True)
class Workload:
    """A run's batch sizes with assumed mean lengths, in tokens. Of a full micro-batch `scored_share` is scored: all of
    it, if its prompts are short."""

    config: RunConfig
    placement: RankLayout
    mean_prompt: float
    mean_response: float
    scored_share: float = 1.0

    @property
    def teachers(self) -> list[RankLayout]:
        """Those that the trainer loads, in its layout; one whose folder is not here is taken to be of the policy's
        sizes."""
        from dapo_mega.models import load_architecture  # It loads torch, which this arithmetic does without.

        distillation = self.config.distillation
        paths = [Path(teacher.path) for teacher in distillation.listed if teacher.path] if distillation else []
        archs = [load_architecture(path)[1] if path.is_dir() else self.placement.arch for path in paths]
        parallel = self.placement.parallel
        return [replace(self.placement, arch=arch, parallel=arch.layout_beside(parallel)) for arch in archs]

    @property
    def critic(self) -> RankLayout:
        """The value model beside the policy; one whose folder is not here is taken to be of the policy's sizes."""
        from dapo_mega.models.stored_model import critic_architecture  # It loads torch, as above.

        path, arch = self.config.critic.path, self.placement.arch
        if path and Path(path).is_dir():
            arch = critic_architecture(Path(path))[1]
        return replace(self.placement, arch=arch, parallel=arch.layout_beside(self.placement.parallel)).of_critic

    @property
    def longest(self) -> int:
        return self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens

    @property
    def mean_length(self) -> float:
        return self.mean_prompt + self.mean_response

    @property
    def responses_per_step(self) -> int:
        return self.config.batch.groups_per_step * self.config.batch.group_size

    @property
    def responses_per_update(self) -> int:
        return self.config.batch.mini_batch_groups * self.config.batch.group_size

    @property
    def generated_per_round(self) -> int:
        return self.config.generation_groups * self.config.batch.group_size

    def micro_batches(self, length: float) -> int:
        """Micro-batches per data-parallel rank and update when samples have `length` tokens."""
        budget = self.config.batch.tokens_per_microbatch
        # A micro-batch holds whole samples.
        tokens = self.responses_per_update * length / self.placement.data_size
        capacity = budget // length * length if length <= budget else budget
        multiple = self.config.parallel.micro_batch_multiple
        return max(1, math.ceil(tokens / capacity / multiple)) * multiple

    @property
    def micro_batch_tokens(self) -> float:
        """Mean tokens of a micro-batch of mean lengths."""
        tokens = self.responses_per_update * self.mean_length / self.placement.data_size
        return tokens / self.micro_batches(self.mean_length)

    def full_micro_batch(self) -> MicroBatchShape:
        """The most expensive micro-batch: its budget full of the longest samples."""
        budget = self.config.batch.tokens_per_microbatch
        lengths = [self.longest] * (budget // self.longest)
        if budget % self.longest:
            lengths.append(budget % self.longest)
        return MicroBatchShape(tuple(lengths), round(budget * self.scored_share))
