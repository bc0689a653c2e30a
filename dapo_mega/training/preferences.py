"""Direct preference optimisation (Rafailov et al., arXiv 2305.18290, eq. 7) with the policy and loop of fine-tuning.

Both responses of a pair may be in different micro-batches and on different processes: each step first scores all
responses, and its update then weighs the tokens of each by the derivative of the loss, which is exact for one update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.batching.samples import single_turn
from dapo_mega.batching.step import PlannedSamples
from dapo_mega.config import DpoConfig
from dapo_mega.data import Demonstration, Pair
from dapo_mega.distributed.commands import Own, command
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.training.fine_tuner import FineTuner


@dataclass(frozen=True)
class _Compared:
    """`log_ratios` [P, 2] float64: log p_policy - log p_reference of the chosen and the rejected response of each pair.
    `num_tokens` of all of them are in the loss."""

    log_ratios: Tensor
    num_tokens: float

    def losses(self, settings: DpoConfig) -> Tensor:
        """Of each pair [P]."""
        margins, smoothing = self.margins(settings), settings.label_smoothing
        return -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)

    def margins(self, settings: DpoConfig) -> Tensor:
        """How much more the policy prefers the chosen response than the reference does, in rewards [P]."""
        return settings.beta * (self.log_ratios[:, 0] - self.log_ratios[:, 1])

    def weights(self, settings: DpoConfig) -> Tensor:
        """-dL / dlog p of the tokens of each response, chosen and rejected in turn [2 P], times `num_tokens`, by which
        the loss of an update is divided. L is the mean of the pairs' losses."""
        margins, smoothing = self.margins(settings), settings.label_smoothing
        pulls = (1 - smoothing) * torch.sigmoid(-margins) - smoothing * torch.sigmoid(margins)
        pulls = settings.beta * pulls * self.num_tokens / len(margins)
        return torch.stack([pulls, -pulls], 1).flatten()

    def metrics(self, settings: DpoConfig) -> dict[str, float]:
        margins, rewards = self.margins(settings), settings.beta * self.log_ratios.mean(0)
        return {
            "preference/accuracy": float((margins > 0).double().mean()),
            "preference/margin": float(margins.mean()),
            "preference/chosen_reward": float(rewards[0]),
            "preference/rejected_reward": float(rewards[1]),
        }


class PreferenceTuner(FineTuner[Pair]):
    """Learns to prefer the chosen response of pairs."""

    def fine_tune(self, rows: Sequence[Pair], step: int) -> dict[str, float]:
        return self._prefer(Own(self._planned(rows)), len(rows), step)

    @command
    def _prefer(self, samples: Own[PlannedSamples], num_pairs: int, step: int) -> dict[str, float]:
        batch = self._received(samples)
        compared = self._compared(batch, num_pairs)
        weights = compared.weights(self._settings)
        weighted = [TokenBatch(micro.with_advantages(weights[micro.places()[0].long()])) for micro in batch]
        metrics = self.policy.update(weighted, SupervisedLoss(is_weighted=True))
        self.step = step
        loss = {"policy/loss": float(compared.losses(self._settings).mean())}
        return {**metrics, **loss, **compared.metrics(self._settings)}

    def evaluate(self, rows: Sequence[Pair]) -> dict[str, float]:
        """Loss of held-out pairs, how many are preferred rightly, and by how much."""
        size, found = self._config.batch_samples, []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            found.append(self._log_ratios(Own(self._planned(part)), len(part)))
        compared = _Compared(torch.tensor([pair for part in found for pair in part], dtype=torch.float64), 0)
        metrics = compared.metrics(self._settings)
        return {
            "evaluation/loss": float(compared.losses(self._settings).mean()),
            "evaluation/preference_accuracy": metrics["preference/accuracy"],
            "evaluation/preference_margin": metrics["preference/margin"],
        }

    @command
    def _log_ratios(self, samples: Own[PlannedSamples], num_pairs: int) -> list[list[float]]:
        return list(self._compared(self._received(samples), num_pairs).log_ratios.tolist())

    @property
    def _settings(self) -> DpoConfig:
        assert self._config.dpo
        return self._config.dpo

    def _planned(self, rows: Sequence[Pair]) -> PlannedSamples:
        responses: list[Demonstration] = [response for pair in rows for response in (pair.chosen, pair.rejected)]
        samples = [
            single_turn(each.prompt_token_ids, each.response_token_ids, sampled=each.in_loss, sample_id=number)
            for number, each in enumerate(responses)
        ]
        return self._plan(samples)

    def _compared(self, batch: Sequence[MicroBatch], num_pairs: int) -> _Compared:
        assert self.reference
        scored = zip(batch, self.policy.score(batch), self.reference.score(batch), strict=True)
        sums = torch.zeros(2 * num_pairs + 1, dtype=torch.float64)
        for micro, own, of_reference in scored if self.processes.counts_outputs else ():
            in_loss, sample_ids = micro.in_loss.cpu(), micro.places()[0].long()
            log_ratios = (own.logprobs - of_reference.logprobs).double().cpu()
            sums.index_add_(0, sample_ids[in_loss], log_ratios[in_loss])
            sums[-1] += in_loss.sum()
        dist.all_reduce(sums, group=self.processes.control)
        return _Compared(sums[:-1].view(num_pairs, 2), float(sums[-1]))
