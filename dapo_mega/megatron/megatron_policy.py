"""The policy: a Megatron-Core model with its optimizer, updated on packed micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dapo_mega.algorithms.ratios import means_over
from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.config import ComputeConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.core.mtp import embedding_on_last_stage
from dapo_mega.megatron.core.routing import replay_routes
from dapo_mega.megatron.megatron_model import MegatronModel
from dapo_mega.megatron.objectives import Objective, TokenBatch, TokenScores
from dapo_mega.megatron.output_layer import ChosenTokens, PolicyStage, TokensAhead
from dapo_mega.megatron.trained_model import TrainedModel
from dapo_mega.models import Architecture
from dapo_mega.models.stored_model import open_policy

_MTP_SUMS = ("mtp_logprobs", "mtp_likeliest", "mtp_tokens")
_CALIBRATION_PASSES = 2
"""The largest values that the first pass sees come out of layers that computed with a scale of 1."""


class TokenScoring(MegatronModel):
    """What the policy and its frozen copies have in common: they score response tokens."""

    def score(
        self, micro_batches: Sequence[MicroBatch], *, temperature: float | None = None, top_k: int = 0
    ) -> list[TokenScores]:
        """Log-probs and entropies of every response token without gradients, and the `top_k` most probable tokens in
        place of each, one entry per micro-batch; `temperature` defaults to the model's."""
        for chunk in self.chunks:
            chunk.eval()
        batches = [TokenBatch(micro_batch) for micro_batch in micro_batches]
        make_labels = partial(chosen_tokens, with_entropy=True, with_others=False, top_k=top_k)
        with self._at_temperature(temperature):
            for _ in range(_CALIBRATION_PASSES if self._lacks_scales() else 0):
                # Transformer Engine takes scales from passes with gradients only, none of which was made yet. Nothing
                # is kept for their backward passes, which never come.
                with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, lambda kept: kept):
                    self._run(batches, make_labels)
            with torch.no_grad():
                outputs = self._run(batches, make_labels)
        return (
            [TokenScores.of(output, top_k) for output in outputs]
            if self.processes.is_last_stage
            else _no_scores(len(batches))
        )

    def _lacks_scales(self) -> bool:
        """Whether FP8 scales come from earlier passes (delayed scaling), and there was none."""
        if self.config.fp8_recipe != "delayed" or not self.config.fp8:
            return False
        states = [
            module.fp8_meta.get("scaling_fwd")
            for chunk in self.chunks
            for module in chunk.modules()
            if hasattr(module, "fp8_meta")
        ]
        # Of input, weight and output of each product: FP8 parameters have scales from the start, outputs never have.
        return not any(state is not None and bool((state.scale[::3] != 1).any()) for state in states)

    @contextlib.contextmanager
    def _at_temperature(self, temperature: float | None) -> Iterator[None]:
        stages = [unwrapped(chunk) for chunk in self.chunks]
        own = [stage.temperature for stage in stages]
        try:
            for stage, value in zip(stages, own, strict=True):
                stage.temperature = value if temperature is None else temperature
            yield
        finally:
            for stage, value in zip(stages, own, strict=True):
                stage.temperature = value


class ScoringModel(TokenScoring):
    """A Megatron model that can score response tokens and does not learn: a reference or a teacher."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        processes: Processes,
        temperature: float,
        compute: ComputeConfig | None = None,
    ) -> None:
        """Build this rank's model chunks and load its shard of the Hugging Face checkpoint `model.path`."""
        compute = (compute or ComputeConfig()).of_frozen_model()
        stored = open_policy(Path(model.path))
        make_stage = _stage_maker(stored.arch, temperature, compute)
        super().__init__(stored, model, stored.arch.layout_beside(parallel), processes, compute, make_stage)


class MegatronPolicy(TrainedModel, TokenScoring):
    """The model being trained: Megatron's DDP, distributed AdamW, gradient clipping and learning-rate schedule. Tokens
    go through the experts that their micro-batch names."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        processes: Processes,
        *,
        temperature: float,
        updates_per_step: int,
        num_steps: int,
        compute: ComputeConfig | None = None,
        lora: LoraConfig | None = None,
        seed: int = 0,
    ) -> None:
        compute = compute or ComputeConfig()
        stored = open_policy(Path(model.path), trains_mtp=model.train_mtp)
        super().__init__(
            stored,
            model,
            parallel,
            optimizer,
            processes,
            make_stage=_stage_maker(stored.arch, temperature, compute),
            updates_per_step=updates_per_step,
            num_steps=num_steps,
            compute=compute,
            lora=lora,
            seed=seed,
        )
        replay_routes(map(unwrapped, self.chunks))

    def update(
        self,
        batches: Sequence[TokenBatch],
        objective: Objective,
        *,
        scores: list[TokenScores] | None = None,
        score_entropy: bool = True,
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch given as this rank's micro-batches; returns its metrics.

        Loss and gradient are sums over all ranks' tokens divided by the global denominator (DAPO eq. 8), so they do not
        depend on how the mini-batch was split. A mini-batch without tokens in the loss changes no weight, is
        counted, and has no metrics that would dilute those of the step's other updates. Nor does one with a gradient
        that is not finite: it is skipped, or raises InputError on all ranks (see `optimizer.max_skipped_updates`).

        `scores`, an empty list if given, gets the scores of each micro-batch's response tokens under the weights
        before the step; without `score_entropy` their entropies are 0 unless the objective needs them.
        """

        of_mtp = _MTP_SUMS if self.arch.trains_mtp else ()

        def make_loss(batch: TokenBatch) -> Any:
            def loss(output: Any) -> tuple[Tensor, Tensor, Tensor]:
                output, guessed = output if of_mtp else (output, None)
                if scores is not None:
                    scores.append(TokenScores(*output.detach()[:2].unbind()))
                term = objective.evaluate(TokenScores.of(output), batch)
                sums = torch.stack([term.sums[name] for name in objective.sum_names])
                if guessed is None:
                    return term.total, term.denominator, sums
                return term.total + guessed[0], term.denominator, torch.cat([sums, guessed[1:].detach()])

            return loss

        replay_routes(map(unwrapped, self.chunks))  # Without what an update that failed has left.
        with_entropy = "entropy" in objective.needs or (scores is not None and score_entropy)
        make_labels = partial(chosen_tokens, with_entropy=with_entropy, looks_ahead=bool(of_mtp))
        if of_mtp:
            self._share_embedding()
        update = self._step(batches, make_loss, make_labels, (*objective.sum_names, *of_mtp))
        unwrapped(self.chunks[-1]).received_embedding = None
        if scores is not None and not self.processes.is_last_stage:
            scores += _no_scores(len(batches))
        of_loss = {**objective.metrics(update.sums), "policy/empty_update_share": float(update.is_empty)}
        if of_mtp:
            logprobs, right, number = (update.sums[name] for name in of_mtp)
            of_loss |= means_over(number, {"policy/mtp_loss": -logprobs, "policy/mtp_accuracy": right})
        return self._metrics(update, of_loss)

    def _share_embedding(self) -> None:
        """Collective: gives the last stage's layer of multi-token prediction the embedding of the first."""
        if self.processes.pipeline_size == 1 or self.arch.tied_embeddings:
            return
        self.finish_param_gather()
        first, last = unwrapped(self.chunks[0]), unwrapped(self.chunks[-1])
        own = first.embedding.word_embeddings.weight if first.pre_process else None
        rows = self.arch.padded_vocab_size(self.processes.tensor_size) // self.processes.tensor_size
        last.received_embedding = embedding_on_last_stage(
            own, (rows, self.arch.hidden_size), self.config.params_dtype, self.processes.device
        )


class WithoutAdapters:
    """The reference of a policy with LoRA: the policy as its weights alone make it, which takes no memory."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._policy = policy

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[TokenScores]:
        """See `TokenScoring.score`. Like any reference, it chooses its experts itself."""
        assert self._policy.lora
        unrouted = [replace(b, targets=replace(b.targets, routes=b.targets.routes[:, :0, :0])) for b in micro_batches]
        with self._policy.lora.off():
            return self._policy.score(unrouted)


def chosen_tokens(
    batch: MicroBatch, *, with_entropy: bool, with_others: bool = True, top_k: int = 0, looks_ahead: bool = False
) -> ChosenTokens:
    """The response tokens of a micro-batch, to be scored; by default with the most probable ones of their teachers. If
    it `looks_ahead`, those in the loss are to be guessed a token before, too."""
    rows, top = batch.response_rows(), batch.targets.teacher_top_ids
    others = top[rows].long() if with_others and top.shape[1] else None
    tokens, ahead = batch.targets.token_ids, None
    if looks_ahead:
        guessed = batch.second_weights.nonzero()[:, 0]
        ahead = TokensAhead(tokens.long(), guessed, batch.second_tokens[guessed], batch.second_weights[guessed])
    return ChosenTokens(rows, tokens[rows].long(), with_entropy, others, top_k, ahead)


def _stage_maker(arch: Architecture, temperature: float, compute: ComputeConfig) -> Callable[..., PolicyStage]:
    return partial(
        PolicyStage,
        share_embeddings_and_output_weights=arch.tied_embeddings,
        temperature=temperature,
        true_vocab_size=arch.vocab_size,
        fused=compute.fused_output_layer,
    )


def _no_scores(num_batches: int) -> list[TokenScores]:
    return [TokenScores(torch.empty(0), torch.empty(0)) for _ in range(num_batches)]
