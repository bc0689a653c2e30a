"""Megatron's distributed checkpoints: what they hold of a model and its optimizer, how they are written and read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding, force_all_tensors_to_non_fp8
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch.distributed.checkpoint.api import CheckpointException

from dapo_mega.megatron.core.repairs.background_writing import (
    MEGATRONS_WRITER,
    BackgroundWriting,
    from_snapshot,
    keep_results_in_process,
)
from dapo_mega.megatron.core.repairs.expert_layers import merge_layer_states
from dapo_mega.megatron.core.repairs.offloaded_optimizer import save_as_if_not_offloaded
from dapo_mega.megatron.core.repairs.optimizer_checkpoints import (
    allocate_adam_state,
    keep_adam_step,
    keep_bucket_padding,
    share_adam_step,
)
from dapo_mega.megatron.core.repairs.restricted_loading import checked_layer_states, load_restricted

__all__ = ["CHECKPOINT_ERRORS", "CheckpointWriting", "checked_layer_states", "load_restricted", "merge_layer_states"]

CHECKPOINT_ERRORS = (CheckpointingException, CheckpointException)
"""What Megatron and torch raise where a checkpoint cannot be written or read."""

# Stores the optimizer's shards per parameter, so that any TP x PP x DP can read them.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


class CheckpointWriting:
    """Writes sharded content in the background, one checkpoint after the other."""

    def __init__(self) -> None:
        self._queue = BackgroundWriting()

    def start(self, content: dict[str, Any], folder: Path, *, from_copy: bool) -> dict[str, int]:
        """Start writing this process's files; with `from_copy` the content may change at once. Returns the checksums of
        files by name, which are complete when the writing is. Collective."""
        # Addresses of the storages that training changes while the files are written.
        kinds = (ShardedTensor, ShardedTensorFactory)
        tensors = (shard.data for shard in nested_values(content) if isinstance(shard, kinds))
        live = frozenset(data.untyped_storage().data_ptr() for data in tensors if data is not None)
        keep_results_in_process()
        request = dist_checkpointing.save(
            content, str(folder), content_metadata=_METADATA, async_sharded_save=True, **MEGATRONS_WRITER
        )
        checksums: dict[str, int] = {}
        self._queue.schedule_async_request(from_snapshot(request, live if from_copy else frozenset(), checksums))
        return checksums

    def finalize(self, *, wait: bool) -> None:
        """Complete what all processes have written. Raises what writing raised. Collective."""
        self._queue.maybe_finalize_async_calls(blocking=wait)

    @property
    def is_pending(self) -> bool:
        """Whether files are still being written."""
        return bool(self._queue.get_num_unfinalized_calls())


def sharded_parameter(
    key: str,
    parameter: torch.Tensor,
    axis: int | None,
    shard: tuple[int, int],
    *,
    is_expert: bool,
    in_halves: bool,
    sections: Mapping[str, int],
) -> Any:
    """A parameter under the name `key` in the files. `axis`: that along which it is cut, None: it is the same on all
    tensor-parallel processes; `shard`: (rank, size) of these. `in_halves`: two tensors that are cut alike, one upon the
    other; `sections`: the rows that it has of tensors that are stored by themselves."""
    rank, size = shard
    replica = (
        parallel_state.get_expert_data_parallel_rank()
        if is_expert
        else parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    cuts = [] if axis is None else [(axis, rank, size)]
    place = (0, rank if axis is None else 0, replica)
    if sections:

        def parts(key: str, rows: torch.Tensor, place: Any, _: Any) -> list[ShardedTensor]:
            pieces = zip(sections, rows.split(list(sections.values())), strict=True)
            return [ShardedTensor.from_rank_offsets(f"{key}.{n}", t, *cuts, replica_id=place) for n, t in pieces]

        return ShardedTensorFactory(key, parameter, parts, torch.cat, place)
    whole = ShardedTensor.from_rank_offsets(key, parameter, *cuts, replica_id=place)
    return apply_swiglu_sharded_factory(whole, ()) if in_halves else whole


def sharded_optimizer(optimizer: Any, chunks: Mapping[str, Any], *, is_loading: bool = False) -> dict[str, Any]:
    """The state of the optimizer of these sharded chunks, to be saved or, if `is_loading`, filled. Collective."""
    allocate_adam_state(optimizer)
    share_adam_step(optimizer)
    if is_loading:
        keep_adam_step(optimizer)
    keep_bucket_padding(optimizer)
    save_as_if_not_offloaded(optimizer)
    state: dict[str, Any] = optimizer.sharded_state_dict(chunks, is_loading=is_loading, metadata=_METADATA)
    return state


def num_optimizers(optimizer: Any) -> int:
    """2 if experts have one of their own, as learning ones have with expert parallelism; otherwise 1."""
    return 1 + any(group["is_expert_parallel"] for group in optimizer.param_groups)


def without_fp8(content: dict[str, Any]) -> dict[str, Any]:
    """The content with 16-bit tensors in place of FP8 parameters, which have no storage that can be written."""
    force_all_tensors_to_non_fp8(content)
    return content


def with_prefix(content: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The content under other names in the files."""
    add_prefix_for_sharding(content, prefix)
    return content


def random_states() -> dict[str, torch.Tensor]:
    """The states of this process's random numbers, by name."""
    states = get_cuda_rng_tracker().get_states()
    return {"torch": torch.get_rng_state(), **{n: s for n, s in states.items() if isinstance(s, torch.Tensor)}}


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Continue with what `random_states` returned."""
    torch.set_rng_state(states["torch"])
    tracker = get_cuda_rng_tracker()
    tracker.set_states({**tracker.get_states(), **{name: s for name, s in states.items() if name != "torch"}})
