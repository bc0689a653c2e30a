"""Rehearses a run: a step of its real code as every rank that differs, with as few micro-batches as show its peak."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from dapo_mega.config import Fp8Config, RunConfig
from dapo_mega.distributed import accelerator
from dapo_mega.errors import InputError
from dapo_mega.models import Architecture
from dapo_mega.planning.plan import find_architecture
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.workload import Workload
from dapo_mega.rehearsal.agreement import disagreements
from dapo_mega.rehearsal.communication import Exchange, World
from dapo_mega.rehearsal.rank import Played, rehearse, synthetic_samples, without_values
from dapo_mega.rehearsal.roles import Roles
from dapo_mega.rehearsal.together import together


@dataclass(frozen=True)
class Rehearsal:
    """What the rehearsed ranks did. `workload` is the step that was rehearsed, a part of the run's; `available_bytes`
    of a GPU may be used; `given` is the whole run as it was asked for."""

    config: RunConfig
    given: RunConfig
    available_bytes: float
    workload: Workload
    roles: Roles
    played: Mapping[int, Played]

    @property
    def as_given(self) -> RunConfig:
        """The rehearsed step with the layers that the run asks for."""
        model = self.config.model.model_copy(update={"layer_implementation": self.given.model.layer_implementation})
        return self.config.model_copy(update={"model": model})

    def disagreements(self) -> list[str]:
        """See `agreement.disagreements`; and ranks with other numbers of micro-batches."""
        found = disagreements(self.roles, {rank: played.events for rank, played in self.played.items()})
        (first, expected), *rest = sorted((rank, played.num_micro_batches) for rank, played in self.played.items())
        for rank, numbers in rest:
            if numbers != expected:
                one, other = self.roles.describe(first), self.roles.describe(rank)
                found.append(f"updates have {expected} micro-batches on {one}, and {numbers} on {other}")
        return found


def rehearse_run(config: RunConfig, world_size: int, available_bytes: float) -> Rehearsal:
    """Rehearse two updates. Raises InputError for what cannot be rehearsed, and if ranks wait for each other."""
    arch, notes = find_architecture(config)
    if arch is None:
        raise InputError("; ".join(notes))
    small = rehearsed_part(config, world_size)
    workload = longest_workload(small, arch, world_size)
    samples = synthetic_samples(workload)
    roles = Roles(config.parallel, world_size)

    def play(config: RunConfig, rank: int, exchange: Exchange) -> Played:
        torch.set_num_threads(1)
        logging.disable(logging.INFO)
        world, taken = World(rank, world_size, exchange), samples if rank == 0 else None
        return rehearse(config, world, taken, all_are_here=len(roles.rehearsed) == world_size)

    with tempfile.TemporaryDirectory() as folder, without_values(small, Path(folder)) as prepared:
        return Rehearsal(small, config, available_bytes, workload, roles, together(roles, partial(play, prepared)))


def longest_workload(config: RunConfig, arch: Architecture, world_size: int) -> Workload:
    """The run's step if all samples have the longest prompt and response."""
    placement = RankLayout(arch, config.parallel, world_size)
    workload = Workload(config, placement, config.data.max_prompt_tokens, config.rollout.max_response_tokens)
    context = config.parallel.context
    most = max(scored_positions(workload, number) for number in range(context))
    return replace(workload, scored_share=most * context / workload.longest)


def scored_positions(workload: Workload, context: int) -> float:
    """Positions of a longest sample that a context rank scores: it has the piece of its number, and the same from the
    end."""
    parallel, longest = workload.placement.parallel, workload.longest
    num_pieces, first = max(1, parallel.segment_multiple), longest - workload.mean_response - 1
    size = math.ceil(longest / num_pieces)
    starts = [size * piece for piece in {context, num_pieces - 1 - context}]
    return sum(max(0.0, min(start + size, longest - 1) - max(start, first)) for start in starts)


def has_emulated_gpu() -> bool:
    """Whether Transformer Engine's layers take tensors without values: where what it has compiled is plain PyTorch."""
    return accelerator.has_gpu() and accelerator.device().type == "cpu"


def rehearsed_part(config: RunConfig, world_size: int) -> RunConfig:
    """The run with two updates of as many micro-batches as fill the pipeline, all of the longest samples."""
    parallel, batch = config.parallel, config.batch
    data_size = parallel.data_size(world_size)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    stages = parallel.pipeline
    num_micro_batches = 2 if stages == 1 else 2 * stages if parallel.virtual_pipeline > 1 else stages + 1
    in_each = batch.tokens_per_microbatch // longest
    # One group for each replica and update.
    changed = {"groups_per_step": 2 * data_size, "mini_batch_groups": data_size, "epochs": 1}
    changed |= {"group_size": num_micro_batches * in_each, "tokens_per_microbatch": in_each * longest}
    model, compute = config.model, config.compute
    if not has_emulated_gpu():
        model = model.model_copy(update={"layer_implementation": "local"})
        compute = compute.model_copy(update={"fp8": Fp8Config()})
    checkpoint = config.checkpoint.model_copy(update={"asynchronous": True})
    changes = {"batch": batch.model_copy(update=changed), "model": model, "compute": compute, "checkpoint": checkpoint}
    return config.model_copy(update=changes)
