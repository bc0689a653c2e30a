"""Atomic checkpoints: Megatron's distributed checkpoint of the policy and the loop's own state, in one folder.

A checkpoint is written into `.step_N.partial` and renamed to `step_N` when everything in it is on disk; then the
file `latest` is replaced. A crash at any moment leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from dapo_mega.errors import InputError
from dapo_mega.files import replace_file
from dapo_mega.handover import leaving_together
from dapo_mega.policy.megatron_policy import MegatronPolicy
from dapo_mega.policy.model import unwrapped

Arrays = Mapping[str, npt.NDArray[Any]]

# The optimizer's shards are stored per parameter, so that any TP x PP x DP can read them.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class LoopState:
    """What the loop needs beside the policy: JSON values and arrays; `step` is the last completed one."""

    step: int
    values: Mapping[str, Any]
    arrays: Arrays


class CheckpointStore:
    """The checkpoints of one run, `root/step_N`. Methods are collective over all processes unless they say so."""

    def __init__(self, root: Path, keep_last: int) -> None:
        self.root = root
        self._keep_last = keep_last

    def latest(self) -> Path | None:
        """Folder of the newest complete checkpoint, or None. Local: reads only.

        Folders are complete as soon as they have their name; the file `latest` is for people and other tools.
        """
        complete = [path for path in self._steps() if (path / "loop.json").is_file()]
        return complete[-1] if complete else None

    def save(self, policy: MegatronPolicy, state: Callable[[], LoopState], step: int) -> Path:
        """Write `step_{step}`; `state` is asked on rank 0 only. Raises InputError when the disk refuses."""
        processes = policy.processes
        partial = self.root / f".step_{step:08d}.partial"
        final = self.root / f"step_{step:08d}"
        rng = _gather_rng(policy)
        failure = None
        if processes.rank == 0:
            failure = _attempt(lambda: _prepare(partial))
        self._check(policy, failure, partial)
        failure = _attempt(lambda: _save_megatron(policy, partial))
        if processes.rank == 0 and failure is None:
            num_optimizers = len(policy.optimizer.chained_optimizers)
            failure = _attempt(lambda: _write_loop_state(partial, state(), rng, num_optimizers))
        self._check(policy, failure, partial)
        if processes.rank == 0:
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            replace_file(self.root / "latest", final.name)
            for old in self._steps()[: -self._keep_last]:
                shutil.rmtree(old)
        dist.barrier(group=processes.control)
        return final

    def load(self, policy: MegatronPolicy, path: Path) -> LoopState:
        """Restore the policy in place, in any layout, and return the loop's state on every process."""
        with leaving_together(policy.processes.control):
            _check_optimizers(policy, path)
        _allocate_adam_state(policy)
        _keep_adam_step(policy)
        _keep_bucket_padding(policy)
        model = _sharded_model(policy)
        wanted: dict[str, Any] = {
            **model,
            "optimizer": policy.optimizer.sharded_state_dict(model, is_loading=True, metadata=_METADATA),
            "scheduler": {},
        }
        try:
            loaded = dist_checkpointing.load(wanted, str(path))
            values = json.loads((path / "loop.json").read_text())
            values.pop("num_optimizers", None)
            with np.load(path / "loop.npz") as file:
                arrays = {name: file[name] for name in file.files}
        except (CheckpointingException, TorchCheckpointException, OSError, ValueError, KeyError) as error:
            raise InputError(
                f"checkpoint {path} cannot be loaded into this model ({_one_line(error)}); resume with the model.path "
                f"the run was started with, remove the folder if it is damaged, or give another output_dir"
            ) from error
        for name, chunk in zip(model, policy.chunks, strict=True):
            unwrapped(chunk).load_state_dict(loaded[name])
        policy.optimizer.load_state_dict(loaded["optimizer"])
        _separate_adam_steps(policy)
        policy.scheduler.load_state_dict(loaded["scheduler"])
        _restore_rng(policy, arrays)
        return LoopState(values.pop("step"), values, arrays)

    def _steps(self) -> list[Path]:
        found = [p for p in self.root.glob("step_*") if _STEP.fullmatch(p.name)] if self.root.is_dir() else []
        return sorted(found)

    def _check(self, policy: MegatronPolicy, failure: str | None, partial: Path) -> None:
        """Leave together when any process failed; the partial folder goes, earlier checkpoints stay."""
        failures: list[Any] = [None] * policy.processes.world_size
        dist.all_gather_object(failures, failure, group=policy.processes.control)
        reason = next((f for f in failures if f), None)
        if reason is None:
            return
        if policy.processes.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise InputError(
            f"cannot write the checkpoint {partial.name[1:].removesuffix('.partial')} under {self.root} ({reason}); "
            f"earlier checkpoints are intact: free space or fix the permissions and start the same command again"
        )


def _allocate_adam_state(policy: MegatronPolicy) -> None:
    """Give torch's Adam the zero state it would start its first step with: Megatron 0.16 reads the step count out of
    it on saving and loading. The optimizers of Apex and Transformer Engine need none of this."""
    for part in policy.optimizer.chained_optimizers:
        inner = part.optimizer
        if not _is_torch_adam(inner):
            continue
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _keep_adam_step(policy: MegatronPolicy) -> None:
    """Megatron 0.16 expects torch's step count among the tensors of a `fully_reshardable` checkpoint, which keeps it
    in the groups. Can go when _set_main_param_and_optimizer_states skips "step" as saving does."""
    for part in policy.optimizer.chained_optimizers:
        if _is_torch_adam(part.optimizer):
            part._set_main_param_and_optimizer_states = functools.partial(_set_states_but_step, part)


def _keep_bucket_padding(policy: MegatronPolicy) -> None:
    """Megatron 0.16 gathers the optimizer's state without the padding at the end of each gradient bucket, and then
    cuts parameters out of it by positions that count the padding: with more than one bucket (tied embeddings on
    several pipeline stages have their own) it would write shifted state into the checkpoint. Here the padding is put
    back. Can go when sharded_param_state_fully_reshardable cuts what get_parameter_state_dp_zero returns."""
    for part in policy.optimizer.chained_optimizers:
        part.get_parameter_state_dp_zero = functools.partial(_padded_world_state, part)


def _padded_world_state(part: Any, **settings: Any) -> Any:
    state = type(part).get_parameter_state_dp_zero(part, **settings)
    if state is None:
        return None
    for index, buffer in enumerate(part.buffers):
        for tensors in state[index].values():
            for name, compact in tensors.items():
                if isinstance(compact, torch.Tensor):
                    tensors[name] = _with_bucket_padding(compact, buffer)
    return state


def _with_bucket_padding(compact: torch.Tensor, buffer: Any) -> torch.Tensor:
    """[n without padding] to [buffer.numel], every bucket where the buffer has it."""
    padded = torch.zeros(buffer.numel, dtype=compact.dtype)
    start = 0
    for bucket in buffer.buckets:
        end = start + bucket.numel_unpadded
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = compact[start:end]
        start = end
    assert start == len(compact)
    return padded


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def _separate_adam_steps(policy: MegatronPolicy) -> None:
    """Megatron 0.16 loads one step tensor shared by all parameters, which torch's Adam then counts up once for each
    of them: the bias correction of the next updates would be wrong."""
    for part in policy.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _set_states_but_step(part: Any, model_param: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    group, order = part.model_param_group_index_map[model_param]
    main_param = part.optimizer.param_groups[group]["params"][order]
    step = part.optimizer.state[main_param]["step"]
    type(part)._set_main_param_and_optimizer_states(part, model_param, {**tensors, "step": step})


def _attempt(action: Callable[[], None]) -> str | None:
    """None, or why the file system refused."""
    try:
        action()
    except (OSError, CheckpointingException, TorchCheckpointException, RuntimeError) as error:
        return _one_line(error)
    return None


def _one_line(error: BaseException) -> str:
    """The last line: errors gathered from several processes are whole tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _prepare(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _save_megatron(policy: MegatronPolicy, folder: Path) -> None:
    _allocate_adam_state(policy)
    _keep_bucket_padding(policy)
    policy.finish_param_gather()
    model = _sharded_model(policy)
    content = {
        **model,
        "optimizer": policy.optimizer.sharded_state_dict(model, metadata=_METADATA),
        "scheduler": policy.scheduler.state_dict(),
    }
    # Megatron would start a manager process for the writers' results, which outlives a killed trainer; saving
    # synchronously, the results come back within this process.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(content, str(folder), content_metadata=_METADATA)


def _sharded_model(policy: MegatronPolicy) -> dict[str, Any]:
    """Megatron's description of each model chunk's shards, under the names it gives chunks."""
    names = ["model"] if len(policy.chunks) == 1 else [f"model{index}" for index in range(len(policy.chunks))]
    return {name: unwrapped(chunk).sharded_state_dict() for name, chunk in zip(names, policy.chunks, strict=True)}


def _check_optimizers(policy: MegatronPolicy, path: Path) -> None:
    """Under expert parallelism Megatron keeps the optimizer of the experts apart, also in the checkpoint."""
    here = len(policy.optimizer.chained_optimizers)
    try:
        there = json.loads((path / "loop.json").read_text()).get("num_optimizers", here)
    except (OSError, ValueError):
        return  # Loading will say what is wrong with the file.
    if here != there:
        raise InputError(
            f"checkpoint {path} was written {'with' if there > 1 else 'without'} expert parallelism and cannot be "
            f"loaded {'with' if here > 1 else 'without'} it; resume with parallel.expert "
            f"{'of 2 or more' if there > 1 else '= 1'}"
        )


def _write_loop_state(folder: Path, state: LoopState, rng: Arrays, num_optimizers: int) -> None:
    with (folder / "loop.npz").open("wb") as file:
        contents: dict[str, Any] = {**state.arrays, **rng}
        np.savez(file, **contents)
        file.flush()
        os.fsync(file.fileno())
    replace_file(
        folder / "loop.json", json.dumps({"step": state.step, "num_optimizers": num_optimizers, **state.values})
    )


def _gather_rng(policy: MegatronPolicy) -> Arrays:
    """Every process's random-number streams, on rank 0."""
    states = {"torch": torch.get_rng_state(), **tensor_parallel.get_cuda_rng_tracker().get_states()}
    mine = {name: state.cpu().numpy() for name, state in states.items() if isinstance(state, torch.Tensor)}
    gathered: list[Any] = [None] * policy.processes.world_size
    dist.all_gather_object(gathered, mine, group=policy.processes.control)
    return {
        f"rng/{_layout(policy)}/{rank}/{name}": s for rank, states in enumerate(gathered) for name, s in states.items()
    }


def _restore_rng(policy: MegatronPolicy, arrays: Arrays) -> None:
    """Continue this process's streams. In another layout they have no counterpart: the fresh, seeded ones stay.

    No result depends on them as long as there is no dropout; sampling draws from streams named by the request.
    """
    prefix = f"rng/{_layout(policy)}/{policy.processes.rank}/"
    mine = {name.removeprefix(prefix): torch.from_numpy(s) for name, s in arrays.items() if name.startswith(prefix)}
    if mine:
        torch.set_rng_state(mine.pop("torch"))
        tensor_parallel.get_cuda_rng_tracker().set_states(mine)


def _layout(policy: MegatronPolicy) -> str:
    p = policy.processes
    layout = f"tp{p.tensor_size}-pp{p.pipeline_size}-dp{p.data_size}"
    return f"{layout}-cp{p.context_size}" if p.context_size > 1 else layout
