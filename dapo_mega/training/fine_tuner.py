"""The models that are fine-tuned, and what a step of imitation and its evaluation do with them."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.batching.samples import Sample, flatten, single_turn
from dapo_mega.batching.step import PlannedSamples, plan_samples
from dapo_mega.config import SftConfig
from dapo_mega.data import Demonstration
from dapo_mega.distributed.commands import Own, command
from dapo_mega.megatron.megatron_policy import MegatronPolicy, ScoringModel, WithoutAdapters
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.training.model_trainer import Facts, ModelTrainer

RowT = TypeVar("RowT")
Reference = ScoringModel | WithoutAdapters

_NEARLY_GREEDY: Final = 1e-6
"""A temperature at which the likeliest token has a probability of 1, and any other one of 0."""


class FineTuner(ModelTrainer[SftConfig], Generic[RowT], abc.ABC):
    """The models of fine-tuning, and what is done with rows of some kind; the reference is that of preferences."""

    reference: Reference | None = None

    def build(self) -> None:
        """Load the model. Raises InputError for one that cannot be trained here."""
        self.facts = self._build()

    @command
    def _build(self) -> Facts:
        config = self._config
        self.policy = MegatronPolicy(
            config.model,
            config.parallel,
            config.optimizer,
            self.processes,
            temperature=1.0,
            updates_per_step=1,
            num_steps=config.num_steps,
            compute=config.compute,
            lora=config.lora,
            seed=config.seed,
        )
        if config.dpo and config.lora:
            self.reference = WithoutAdapters(self.policy)
        elif config.dpo:
            self.reference = ScoringModel(config.model, config.parallel, self.processes, 1.0, config.compute)
        return self._facts()

    @abc.abstractmethod
    def fine_tune(self, rows: Sequence[RowT], step: int) -> dict[str, float]:
        """The update of this step; its metrics."""

    @abc.abstractmethod
    def evaluate(self, rows: Sequence[RowT]) -> dict[str, float]:
        """Metrics of held-out rows, `evaluation/loss` among them."""

    def _plan(self, samples: Sequence[Sample]) -> PlannedSamples:
        budget = self._config.tokens_per_microbatch
        return plan_samples(flatten(samples), self.facts.packing_layout, token_budget=budget)

    def _received(self, samples: Own[PlannedSamples]) -> Sequence[MicroBatch]:
        longest = self._config.data.max_tokens
        batch = self.policy.receive(samples.value, aggregation="token_mean", max_response_tokens=longest)
        return batch.mini_batches[0]


class Imitator(FineTuner[Demonstration]):
    """Learns to say what demonstrations say."""

    def fine_tune(self, rows: Sequence[Demonstration], step: int) -> dict[str, float]:
        return self._fine_tune(Own(self._planned(rows)), step)

    @command
    def _fine_tune(self, samples: Own[PlannedSamples], step: int) -> dict[str, float]:
        batch = self._received(samples)
        metrics = self.policy.update([TokenBatch(micro) for micro in batch], SupervisedLoss())
        self.step = step
        return metrics

    def evaluate(self, rows: Sequence[Demonstration]) -> dict[str, float]:
        """Loss in nats per token, perplexity, and the share of tokens that are the likeliest ones."""
        sums = np.zeros(3)
        size = self._config.batch_samples
        for start in range(0, len(rows), size):
            sums += self._sums(Own(self._planned(rows[start : start + size])))
        num_tokens, loss, num_right = sums.tolist()
        return {
            "evaluation/loss": loss / num_tokens,
            "evaluation/perplexity": math.exp(min(loss / num_tokens, 700)),
            "evaluation/token_accuracy": num_right / num_tokens,
        }

    @command
    def _sums(self, samples: Own[PlannedSamples]) -> list[float]:
        """The number of tokens, their negative log-probs, and the number of those that are the likeliest."""
        batch = self._received(samples)
        sums = torch.zeros(3, dtype=torch.float64)
        scored, greedy = self.policy.score(batch), self.policy.score(batch, temperature=_NEARLY_GREEDY)
        if self.processes.counts_outputs:
            for score, sure in zip(scored, greedy, strict=True):
                nll, is_likeliest = -score.logprobs.double().sum(), sure.logprobs > math.log(0.5)
                sums += torch.stack([torch.tensor(len(score.logprobs)), nll.cpu(), is_likeliest.sum().cpu()])
        dist.all_reduce(sums, group=self.processes.control)
        return list(sums.tolist())

    def _planned(self, rows: Sequence[Demonstration]) -> PlannedSamples:
        return self._plan([single_turn(d.prompt_token_ids, d.response_token_ids, sampled=d.in_loss) for d in rows])
