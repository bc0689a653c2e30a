"""Compares two checkpoints of either format: every tensor bit by bit, then the models' log-probs of a few prompts."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.config import ComputeConfig, ModelConfig, ParallelConfig
from dapo_mega.conversion.convert import Checkpoint
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.megatron_policy import ScoringModel
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.models.hf_checkpoint import same_bits
from dapo_mega.models.megatron_format.files import MegatronCheckpoint

# In nats; the two implementations sum in different orders.
LOGPROB_TOLERANCE = 1e-3
_PROMPT_LENGTHS = (2, 7, 16, 33)


@dataclass(frozen=True)
class LogprobComparison:
    """The largest difference in nats over the whole vocabulary, and the share of positions with the same most likely
    token.

    Most likely tokens whose log-probs are within LOGPROB_TOLERANCE in both models count as the same.
    """

    max_difference: float
    argmax_agreement: float
    num_undefined: tuple[int, int] = (0, 0)
    """Number of positions with NaN log-probs of each model; such positions are not compared."""
    num_positions: int = 0

    @property
    def agrees(self) -> bool:
        return self.max_difference <= LOGPROB_TOLERANCE and self.argmax_agreement == 1.0

    def sentence(self) -> str:
        """The outcome for a reader."""
        if any(self.num_undefined):
            first, second = self.num_undefined
            return (
                f"log-probs are NaN at {first} of {self.num_positions} positions of the first model and at {second} of "
                f"the second (a weight is NaN, infinite or far too large), which leaves nothing to compare there; "
                + ("apart from that the models agree" if self.agrees else "the models differ")
            )
        return (
            f"log-probs differ by at most {self.max_difference:.2e} nats ({LOGPROB_TOLERANCE:g} allowed), the most "
            f"likely token agrees at {self.argmax_agreement:.1%} of positions (100% needed; ties within "
            f"{LOGPROB_TOLERANCE:g} nats agree)"
        )


def different_fields(left: Checkpoint, right: Checkpoint) -> list[str]:
    """The fields of `Architecture` that differ between the two config.json, one line with both values per field. Which
    tensors are trained is none of them."""
    fields, others = (vars(replace(side.arch, trains_mtp=False)) for side in (left, right))
    return [f"{name}: {value} and {others[name]}" for name, value in fields.items() if value != others[name]]


def different_tensors(left: Checkpoint, right: Checkpoint) -> list[str]:
    """One line per differing tensor: missing on one side, another shape or dtype, or other values."""
    sides = (left, right)
    held = [set(side.names) for side in sides]
    lines = []
    for name in dict.fromkeys((*left.names, *right.names)):
        holders = [side for side, names in zip(sides, held, strict=True) if name in names]
        if len(holders) == 1:
            lines.append(f"{name}: only in {holders[0].path}")
            continue
        first, second = (side.source.spec(name) for side in sides)
        if first != second:
            lines.append(f"{name}: {first.shape} {first.dtype} and {second.shape} {second.dtype}")
        elif not same_bits(left.source.tensor(name), right.source.tensor(name)):
            lines.append(f"{name}: other values")
    return lines


def compare_logprobs(left: Checkpoint, right: Checkpoint) -> LogprobComparison:
    """Float32 log-probs of both models after prompts of random tokens.

    transformers runs Hugging Face checkpoints, the policy's model runs Megatron's, one after the other, each whole in
    memory. The models must have the same architecture.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, left.arch.vocab_size, length).tolist() for length in _PROMPT_LENGTHS]
    first, second = (_logprobs(checkpoint, prompts) for checkpoint in (left, right))
    return compare_distributions(first, second)


def compare_distributions(first: Tensor, second: Tensor) -> LogprobComparison:
    """Log-probs [positions, vocabulary] of two models.

    NaN in both counts as equal, NaN in one as an infinite difference.
    """
    undefined = [logprobs.isnan().any(-1) for logprobs in (first, second)]
    defined = ~(undefined[0] | undefined[1])
    counts = (int(undefined[0].sum()), int(undefined[1].sum()))
    if not torch.equal(*undefined):
        return LogprobComparison(math.inf, 0.0, counts, len(first))
    if not defined.any():
        return LogprobComparison(0.0, 1.0, counts, len(first))
    first, second = first[defined], second[defined]
    best_of_first, best_of_second = (logprobs.argmax(-1, keepdim=True) for logprobs in (first, second))
    lead_in_first = first.gather(-1, best_of_first) - first.gather(-1, best_of_second)
    lead_in_second = second.gather(-1, best_of_second) - second.gather(-1, best_of_first)
    same_best = torch.maximum(lead_in_first, lead_in_second) <= LOGPROB_TOLERANCE
    # Two log-probs of -inf are equal, their difference would be NaN.
    difference = torch.where(first == second, 0.0, (first - second).abs())
    return LogprobComparison(float(difference.max()), float(same_best.float().mean()), counts, len(defined))


def _logprobs(checkpoint: Checkpoint, prompts: Sequence[Sequence[int]]) -> Tensor:
    """[tokens of all prompts, vocabulary]."""
    is_megatron = isinstance(checkpoint.source, MegatronCheckpoint)
    with _folder_with_config(checkpoint) as folder:
        logits = (_megatron_logits if is_megatron else _transformers_logits)(folder, prompts)
    return logits[:, : checkpoint.arch.vocab_size].float().log_softmax(-1)


@contextlib.contextmanager
def _folder_with_config(checkpoint: Checkpoint) -> Iterator[Path]:
    """The checkpoint's folder or, if it has no config.json, a temporary folder of links to its files and to a
    config.json."""
    if checkpoint.companions == checkpoint.path:
        yield checkpoint.path
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in (*checkpoint.path.iterdir(), checkpoint.companions / "config.json"):
            (Path(folder) / file.name).symlink_to(file.resolve())
        yield Path(folder)


def _transformers_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> Tensor:
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except ImportError as error:  # Such as FP8 weights without the package accelerate.
        raise InputError(f"{folder}: transformers cannot load it ({error}); compare with --tensors-only") from error
    with torch.no_grad():
        return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])


def _megatron_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Logits of the prompts, packed into one micro-batch; a hook takes them from the output layer."""
    processes = start_processes(ParallelConfig(), 0)
    model = ScoringModel(
        ModelConfig(path=str(folder), dtype="fp32"),
        ParallelConfig(),
        processes,
        temperature=1.0,
        compute=ComputeConfig(fused_output_layer=False),
    )
    logits: list[Tensor] = []
    unwrapped(model.chunks[0]).output_layer.register_forward_hook(lambda _, __, output: logits.append(output[0][:, 0]))
    samples = [single_turn(ids[:1], ids[1:]) for ids in (np.array(prompt, np.int32) for prompt in prompts)]
    model.score([pack(flatten(samples), max_response_tokens=max(map(len, prompts)))])
    stop_processes()
    return logits[0].cpu()
