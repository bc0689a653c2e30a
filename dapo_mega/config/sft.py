"""A whole run of supervised fine-tuning."""

import math
from typing import Self

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE, Section
from dapo_mega.config.compute import check_precision
from dapo_mega.config.data import SftDataConfig
from dapo_mega.config.optimizer import OptimizerConfig
from dapo_mega.config.training import TrainingConfig


class HeldOutConfig(Section):
    """Loss, perplexity and token accuracy on the demonstrations of data.evaluation."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; the last step has one, too. 0: none."""
    at_start: bool = False
    """Evaluate before the first step: the loss to compare with."""
    stop_after: int | None = Field(default=None, ge=1)
    """End the run after so many evaluations in a row that were no better than the lowest loss before. null: never."""
    keep_best: bool = False
    """Save a checkpoint whenever the loss is the lowest until then, and keep it whatever the section checkpoint says;
    only the last one of these stays so."""


class DpoConfig(Section):
    """Direct preference optimisation: learn to prefer the response of data.*.columns.response to that of
    columns.rejected ([Rafailov et al.](https://arxiv.org/abs/2305.18290), eq. 7). The reference is the model that
    training starts from; with lora it is the model without adapters."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference. Lower lets the policy go farther from it."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be the wrong way round."""


class SftConfig(TrainingConfig):
    """Supervised fine-tuning (R1's cold start) with the same policy code."""

    num_steps: int = Field(default=0, ge=0, json_schema_extra=FREE)
    """Updates at most. 0: as many as epochs make."""
    epochs: float | None = Field(default=None, gt=0, json_schema_extra=FREE)
    """Train for as many updates as have so many times the number of demonstrations; with num_steps, too, for the fewer
    of both. In a mixture each dataset begins its epochs by itself. null: num_steps says it."""
    batch_samples: int = Field(default=256, ge=1)
    """Demonstrations per optimizer update."""
    tokens_per_microbatch: int = Field(default=8192, ge=1, json_schema_extra=FREE)
    """Tokens of a micro-batch at most; at least data.max_tokens. Lower it when out of memory, raise it for speed."""
    data: SftDataConfig
    dpo: DpoConfig | None = None
    """Learn from pairs of a better and a worse response in place of demonstrations; batch_samples are pairs then. null:
    imitate."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    evaluation: HeldOutConfig = Field(default=HeldOutConfig(), json_schema_extra=FREE)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_precision(self.model, self.compute)
        if not (self.num_steps or self.epochs):
            raise ValueError("num_steps and epochs are both missing; add one of them")
        self._check_pairs()
        evaluation = self.evaluation
        if evaluation.every and not self.data.evaluation:
            raise ValueError("evaluation.every is set, but data.evaluation names no dataset; add it")
        if not evaluation.every and (evaluation.at_start or evaluation.stop_after or evaluation.keep_best):
            raise ValueError("the section evaluation asks for evaluations, but evaluation.every is 0; set it")
        if self.tokens_per_microbatch < self.data.max_tokens:
            raise ValueError(
                f"tokens_per_microbatch={self.tokens_per_microbatch} is smaller than data.max_tokens="
                f"{self.data.max_tokens}; set it to at least that"
            )
        return self

    def _check_pairs(self) -> None:
        for key, dataset in self.data.by_key.items():
            if self.dpo and (dataset.columns.rejected is None or dataset.columns.messages is not None):
                raise ValueError(
                    f"dpo compares {key}.columns.response with columns.rejected; name both, and no messages"
                )
            if not self.dpo and dataset.columns.rejected is not None:
                raise ValueError(
                    f"{key}.columns.rejected is for the section dpo; add that, as dpo: {{}}, or leave it out"
                )
        if self.dpo and self.data.long_rows != "refuse":
            raise ValueError(
                f"data.long_rows={self.data.long_rows} would leave pairs with one response; with dpo remove long rows"
            )

    def with_steps(self, num_demonstrations: int) -> Self:
        """The same with the number of updates that `epochs` make of so many demonstrations, if that is given."""
        if self.epochs is None:
            return self
        updates = max(math.ceil(self.epochs * num_demonstrations / self.batch_samples), 1)
        return self.model_copy(update={"num_steps": min(updates, self.num_steps or updates)})
